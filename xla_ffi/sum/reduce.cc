#include "xla_ffi/sum/reduce.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <limits>
#include <type_traits>

#include "xla_ffi/sum/arithmetic.h"

namespace jaxhetero {
namespace {

// The type that an element has while it is reduced: 16-bit floats as float, integer summands as unsigned. Unsigned
// integers wrap; signed overflow would be undefined.
template <Arithmetic kArithmetic, typename T>
inline auto widen(T value) {
  if constexpr (std::is_same_v<T, F16> || std::is_same_v<T, BF16>) {
    return load(value);
  } else if constexpr (std::is_floating_point_v<T> || kArithmetic != Arithmetic::kSum) {
    return value;
  } else {
    return static_cast<std::make_unsigned_t<T>>(value);
  }
}

// maximum and minimum of IEEE 754-2019: NaN if either operand is, and -0 is below +0. Unlike std::max, symmetric.
template <Arithmetic kArithmetic, typename Float>
inline Float extreme_float(Float a, Float b) {
  using Bits = std::conditional_t<sizeof(Float) == 4, uint32_t, uint64_t>;
  const auto bits_a = std::bit_cast<Bits>(a);
  const auto bits_b = std::bit_cast<Bits>(b);
  const bool is_max = kArithmetic == Arithmetic::kMax;
  const auto equal = std::bit_cast<Float>(is_max ? bits_a & bits_b : bits_a | bits_b);  // differ in a zero's sign only
  const Float chosen = (is_max ? a > b : a < b) ? a : b;
  const Float number = a == b ? equal : chosen;
  return ((a != a) | (b != b)) ? std::numeric_limits<Float>::quiet_NaN() : number;
}

template <Arithmetic kArithmetic, typename Wide>
inline Wide combine(Wide a, Wide b) {
  if constexpr (kArithmetic == Arithmetic::kSum) {
    return static_cast<Wide>(a + b);
  } else if constexpr (std::is_floating_point_v<Wide>) {
    return extreme_float<kArithmetic>(a, b);
  } else {
    return kArithmetic == Arithmetic::kMax ? std::max(a, b) : std::min(a, b);
  }
}

// Replaces every NaN by one. Which of two NaNs an addition returns depends on how the compiler orders the operands, and
// that differs between kernels.
template <typename Wide>
inline Wide canonical(Wide value) {
  if constexpr (std::is_floating_point_v<Wide>) {
    return value != value ? std::numeric_limits<Wide>::quiet_NaN() : value;
  } else {
    return value;
  }
}

template <typename T, typename Wide>
inline T narrow(Wide value) {
  if constexpr (std::is_same_v<T, F16>) {
    return store_f16(canonical(value));
  } else if constexpr (std::is_same_v<T, BF16>) {
    return store_bf16(canonical(value));
  } else {
    return static_cast<T>(canonical(value));
  }
}

// Reduces block by block, so that the results stay in the first-level cache and each piece is read once.
template <bool kIsWide, Arithmetic kArithmetic, typename T>
[[gnu::always_inline]] inline void reduce_blocks(std::span<const std::byte* const> pieces, std::byte* out,
                                                 size_t count) {
  using Wide = decltype(widen<kArithmetic>(T{}));
  constexpr bool kConvertsBlocks = kIsWide && std::is_same_v<T, F16>;
  constexpr size_t kBlock = 1024;
  alignas(64) std::array<Wide, kBlock> results;
  alignas(64) std::array<Wide, kConvertsBlocks ? kBlock : 1> converted;
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t n = std::min(kBlock, count - start);
    const auto block_of = [&](const std::byte* piece) {
      const T* values = reinterpret_cast<const T*>(piece) + start;
      if constexpr (kConvertsBlocks) {
        load_wide(values, converted.data(), n);
        return converted.data();
      } else {
        return values;
      }
    };
    const auto* first = block_of(pieces[0]);
    for (size_t i = 0; i < n; ++i) results[i] = widen<kArithmetic>(first[i]);
    for (const std::byte* piece : pieces.subspan(1)) {
      const auto* values = block_of(piece);
      for (size_t i = 0; i < n; ++i) results[i] = combine<kArithmetic>(results[i], widen<kArithmetic>(values[i]));
      // Without this fence, gcc at -O3 fuses the loops of two pieces, and does not vectorise the result.
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
    T* target = reinterpret_cast<T*>(out) + start;
    if constexpr (kConvertsBlocks) {
      for (size_t i = 0; i < n; ++i) results[i] = canonical(results[i]);
      store_wide(results.data(), target, n);
    } else {
      for (size_t i = 0; i < n; ++i) target[i] = narrow<T>(results[i]);
    }
  }
}

using Kernel = void (*)(std::span<const std::byte* const>, std::byte*, size_t);
using Kernels = std::array<Kernel, 3>;  // by Arithmetic

template <Arithmetic kArithmetic, typename T>
void reduce_baseline(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  reduce_blocks<false, kArithmetic, T>(pieces, out, count);
}

template <Arithmetic kArithmetic, typename T>
JAXHETERO_WIDE void reduce_wide(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  reduce_blocks<true, kArithmetic, T>(pieces, out, count);
}

struct Entry {
  size_t item_bytes = 0;
  std::string_view name = "?";
  Kernels baseline = {};
  Kernels wide = {};
};

template <typename T>
constexpr Entry entry(std::string_view name) {
  using enum Arithmetic;
  return {sizeof(T),
          name,
          {&reduce_baseline<kSum, T>, &reduce_baseline<kMax, T>, &reduce_baseline<kMin, T>},
          {&reduce_wide<kSum, T>, &reduce_wide<kMax, T>, &reduce_wide<kMin, T>}};
}

// In the order of DType, which starts at 1.
constexpr std::array<Entry, 13> kEntries = {
    Entry{},
    entry<F16>("float16"),
    entry<BF16>("bfloat16"),
    entry<float>("float32"),
    entry<double>("float64"),
    entry<int8_t>("int8"),
    entry<int16_t>("int16"),
    entry<int32_t>("int32"),
    entry<int64_t>("int64"),
    entry<uint8_t>("uint8"),
    entry<uint16_t>("uint16"),
    entry<uint32_t>("uint32"),
    entry<uint64_t>("uint64"),
};

const Entry& entry_of(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  return kEntries[index < kEntries.size() ? index : 0];
}

}  // namespace

size_t item_bytes(DType dtype) { return entry_of(dtype).item_bytes; }

std::string_view dtype_name(DType dtype) { return entry_of(dtype).name; }

void reduce_in_order(Arithmetic arithmetic, DType dtype, std::span<const std::byte* const> pieces, std::byte* out,
                     size_t count) {
  const Entry& chosen = entry_of(dtype);
  const DefaultFloatingPoint mode;
  (have_wide_vectors() ? chosen.wide : chosen.baseline)[static_cast<size_t>(arithmetic)](pieces, out, count);
}

namespace internal {
void reduce_in_order_baseline(Arithmetic arithmetic, DType dtype, std::span<const std::byte* const> pieces,
                              std::byte* out, size_t count) {
  const DefaultFloatingPoint mode;
  entry_of(dtype).baseline[static_cast<size_t>(arithmetic)](pieces, out, count);
}
}  // namespace internal

}  // namespace jaxhetero
