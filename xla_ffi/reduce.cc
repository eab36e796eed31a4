#include "reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cfenv>
#include <limits>
#include <type_traits>

namespace jaxhetero {
namespace {

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

// What an element is while it is reduced: a half as float, and the summands as unsigned, because they wrap where signed
// overflow would be undefined.
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

// The larger or the smaller of two numbers as IEEE 754-2019 has it: a NaN wins, and -0 is below +0. Unlike std::max it
// does not depend on the order of the two.
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

template <typename T, typename Wide>
inline T narrow(Wide value) {
  // Which of two NaNs an addition passes on depends on how the compiler orders its operands, here and in each kernel:
  // one NaN stands for all.
  if constexpr (std::is_floating_point_v<Wide>) value = value != value ? std::numeric_limits<Wide>::quiet_NaN() : value;
  if constexpr (std::is_same_v<T, F16>) {
    return store_f16(value);
  } else if constexpr (std::is_same_v<T, BF16>) {
    return store_bf16(value);
  } else {
    return static_cast<T>(value);
  }
}

// One block of every piece is reduced while it is in the first-level cache, so each piece is touched once.
template <Arithmetic kArithmetic, typename T>
[[gnu::always_inline]] inline void reduce_blocks(std::span<const std::byte* const> pieces, std::byte* out,
                                                 size_t count) {
  using Wide = decltype(widen<kArithmetic>(T{}));
  constexpr size_t kBlock = 1024;
  alignas(64) std::array<Wide, kBlock> results;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    const T* first = reinterpret_cast<const T*>(pieces[0]) + begin;
    for (size_t i = 0; i < n; ++i) results[i] = widen<kArithmetic>(first[i]);
    for (const std::byte* piece : pieces.subspan(1)) {
      const T* values = reinterpret_cast<const T*>(piece) + begin;
      for (size_t i = 0; i < n; ++i) results[i] = combine<kArithmetic>(results[i], widen<kArithmetic>(values[i]));
    }
    T* target = reinterpret_cast<T*>(out) + begin;
    for (size_t i = 0; i < n; ++i) target[i] = narrow<T>(results[i]);
  }
}

using Kernel = void (*)(std::span<const std::byte* const>, std::byte*, size_t);
using Kernels = std::array<Kernel, 3>;  // by Arithmetic

template <Arithmetic kArithmetic, typename T>
void reduce_baseline(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  reduce_blocks<kArithmetic, T>(pieces, out, count);
}

#if defined(__x86_64__)
template <Arithmetic kArithmetic, typename T>
[[gnu::target("avx2")]] void reduce_avx2(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  reduce_blocks<kArithmetic, T>(pieces, out, count);
}
#endif

struct Entry {
  size_t item_bytes = 0;
  std::string_view name = "?";
  Kernels baseline = {};
  Kernels wide = {};
};

template <typename T>
constexpr Entry entry(std::string_view name) {
  using enum Arithmetic;
  constexpr Kernels kBaseline = {&reduce_baseline<kSum, T>, &reduce_baseline<kMax, T>, &reduce_baseline<kMin, T>};
#if defined(__x86_64__)
  return {sizeof(T), name, kBaseline, {&reduce_avx2<kSum, T>, &reduce_avx2<kMax, T>, &reduce_avx2<kMin, T>}};
#else
  return {sizeof(T), name, kBaseline, kBaseline};
#endif
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

bool have_wide_vectors() {
#if defined(__x86_64__)
  static const bool have = __builtin_cpu_supports("avx2") != 0;
  return have;
#else
  return false;
#endif
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
