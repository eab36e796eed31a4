// What every loop over elements stands on: the 16-bit floats, the usual rounding, and whether there are wide vectors.
#pragma once

#include <bit>
#include <cfenv>
#include <cstdint>

namespace jaxhetero {

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

// Branch-free selects throughout, so that the compiler turns the loops below into vector code.
inline float load(F16 half) {
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
  const uint32_t magnitude = half.bits & 0x7fffu;
  // Shifted into float's fields the exponent is 112 too small; a multiplication mends normals and subnormals alike.
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  const uint32_t is_special = 0u - static_cast<uint32_t>(magnitude >= 0x7c00u);
  return std::bit_cast<float>(sign | (special & is_special) | (finite & ~is_special));
}

inline F16 store_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // From 2^-14: re-bias and round to nearest even on the 13 bits that fall off; 65520 and above carry into infinity.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below: adding 0.5 leaves the result's bits, rounded by the adder, at the end of the mantissa.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t huge = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? huge : half;
  return {static_cast<uint16_t>(sign | half)};
}

inline float load(BF16 brain) { return std::bit_cast<float>(static_cast<uint32_t>(brain.bits) << 16); }

inline BF16 store_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
}

// The usual rounding, and subnormals kept: a library in this process may have set this thread's mode otherwise, and the
// bits of a sum must not depend on that.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&callers_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  std::fenv_t callers_;
};

// A function that is compiled with them, to be called only where they are.
#if defined(__x86_64__)
#define JAXHETERO_WIDE [[gnu::target("avx2")]]
inline bool have_wide_vectors() {
  static const bool have = __builtin_cpu_supports("avx2") != 0;
  return have;
}
#else
#define JAXHETERO_WIDE
inline bool have_wide_vectors() { return false; }
#endif

}  // namespace jaxhetero
