// The operations of programs on vectors of float32, for the interpreter and the fused kernels alike: both compute the
// same bits because both run these.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "xla_ffi/sum/arithmetic.h"
#include "xla_ffi/update/program.h"

namespace jaxhetero {

// Elements come in multiples of this, which every vector divides.
inline constexpr size_t kStrip = 8;

// What fits a register: operators work on each element. Unaligned is the same at any place in memory.
template <bool kIsWide>
struct VectorOfFloats {
  using Type [[gnu::vector_size(16)]] = float;
  using Bits [[gnu::vector_size(16)]] = uint32_t;
  using Unaligned [[gnu::aligned(1), gnu::may_alias]] = Type;
};
template <>
struct VectorOfFloats<true> {
  using Type [[gnu::vector_size(32)]] = float;
  using Bits [[gnu::vector_size(32)]] = uint32_t;
  using Unaligned [[gnu::aligned(1), gnu::may_alias]] = Type;
};

// kIsWide only in functions that are JAXHETERO_WIDE. No function takes or returns a vector by value: how that is done
// depends on the instruction set that the function is compiled for.
template <bool kIsWide>
struct Operations {
  using Vector = typename VectorOfFloats<kIsWide>::Type;
  using Bits = typename VectorOfFloats<kIsWide>::Bits;
  using Unaligned = typename VectorOfFloats<kIsWide>::Unaligned;
  static constexpr size_t kLanes = sizeof(Vector) / sizeof(float);

  [[gnu::always_inline]] static void load(const float* from, Vector& value) {
    value = *reinterpret_cast<const Unaligned*>(from);
  }
  [[gnu::always_inline]] static void store(const Vector& value, float* to) {
    *reinterpret_cast<Unaligned*>(to) = value;
  }

  template <Opcode kOpcode>
  [[gnu::always_inline]] static void apply(const Vector& a, const Vector& b, const Vector& c, Vector& to) {
    using enum Opcode;
    if constexpr (kOpcode == kCopy) to = a;
    if constexpr (kOpcode == kAdd) to = a + b;
    if constexpr (kOpcode == kSub) to = a - b;
    if constexpr (kOpcode == kMul) to = a * b;
    if constexpr (kOpcode == kDiv) to = a / b;
    if constexpr (kOpcode == kMax || kOpcode == kMin) extreme<kOpcode == kMax>(a, b, to);
    if constexpr (kOpcode == kSqrt) square_root(a, to);
    if constexpr (kOpcode == kAbs) to = __builtin_bit_cast(Vector, __builtin_bit_cast(Bits, a) & ~kSignBit);
    if constexpr (kOpcode == kNeg) to = __builtin_bit_cast(Vector, __builtin_bit_cast(Bits, a) ^ kSignBit);
    if constexpr (kOpcode == kSign) sign(a, to);
    if constexpr (kOpcode == kLess) to = a < b ? Vector{} + 1.0f : Vector{};
    if constexpr (kOpcode == kLessEqual) to = a <= b ? Vector{} + 1.0f : Vector{};
    if constexpr (kOpcode == kEqual) to = a == b ? Vector{} + 1.0f : Vector{};
    if constexpr (kOpcode == kSelect) to = a != 0.0f ? b : c;
    if constexpr (kOpcode == kRoundBf16) round_bf16(a, to);
  }

  // Replaces every NaN by one. Which of two NaNs an operation returns depends on how the compiler orders the operands.
  [[gnu::always_inline]] static void make_canonical(Vector& value) {
    value = value != value ? Vector{} + std::numeric_limits<float>::quiet_NaN() : value;
  }

 private:
  static constexpr uint32_t kSignBit = 0x80000000u;

  // maximum and minimum of IEEE 754-2019, as in sum/reduce.cc.
  template <bool kIsMax>
  [[gnu::always_inline]] static void extreme(const Vector& a, const Vector& b, Vector& to) {
    const Bits a_bits = __builtin_bit_cast(Bits, a);
    const Bits b_bits = __builtin_bit_cast(Bits, b);
    const Vector equal = __builtin_bit_cast(Vector, kIsMax ? a_bits & b_bits : a_bits | b_bits);
    const Vector chosen = (kIsMax ? a > b : a < b) ? a : b;
    const Vector number = a == b ? equal : chosen;
    to = ((a != a) | (b != b)) ? Vector{} + std::numeric_limits<float>::quiet_NaN() : number;
  }

  [[gnu::always_inline]] static void sign(const Vector& a, Vector& to) {
    const Vector below = a < 0.0f ? Vector{} - 1.0f : a;
    to = a > 0.0f ? Vector{} + 1.0f : below;
  }

  // std::sqrt may set errno, which keeps compilers from making it one instruction. g++ warns that functions which
  // return vectors are called in another way with wide vectors; this one becomes no call.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"
  [[gnu::always_inline]] static void square_root(const Vector& a, Vector& to) {
#if defined(__x86_64__) && !defined(__clang__)
    if constexpr (kIsWide) {
      to = __builtin_ia32_sqrtps256(a);
    } else {
      to = __builtin_ia32_sqrtps(a);
    }
#else
    for (size_t i = 0; i < kLanes; ++i) to[i] = std::sqrt(a[i]);
#endif
  }
#pragma GCC diagnostic pop

  // As store_bf16() and load() in sum/arithmetic.h.
  [[gnu::always_inline]] static void round_bf16(const Vector& a, Vector& to) {
    const Bits bits = __builtin_bit_cast(Bits, a);
    const Bits rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const Bits chosen = a != a ? bits | 0x400000u : rounded;
    to = __builtin_bit_cast(Vector, chosen & 0xffff0000u);
  }
};

// Calls function.template operator()<kOpcode>() for the opcode, which is a known one.
template <typename Function>
[[gnu::always_inline]] inline void dispatch(Opcode opcode, const Function& function) {
  using enum Opcode;
  switch (opcode) {
    case kCopy:
      return function.template operator()<kCopy>();
    case kAdd:
      return function.template operator()<kAdd>();
    case kSub:
      return function.template operator()<kSub>();
    case kMul:
      return function.template operator()<kMul>();
    case kDiv:
      return function.template operator()<kDiv>();
    case kMax:
      return function.template operator()<kMax>();
    case kMin:
      return function.template operator()<kMin>();
    case kSqrt:
      return function.template operator()<kSqrt>();
    case kAbs:
      return function.template operator()<kAbs>();
    case kNeg:
      return function.template operator()<kNeg>();
    case kSign:
      return function.template operator()<kSign>();
    case kLess:
      return function.template operator()<kLess>();
    case kLessEqual:
      return function.template operator()<kLessEqual>();
    case kEqual:
      return function.template operator()<kEqual>();
    case kSelect:
      return function.template operator()<kSelect>();
    case kRoundBf16:
      return function.template operator()<kRoundBf16>();
  }
}

}  // namespace jaxhetero
