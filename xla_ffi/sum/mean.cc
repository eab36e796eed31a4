#include "xla_ffi/sum/mean.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "xla_ffi/sum/arithmetic.h"

namespace jaxhetero {
namespace {

constexpr size_t kBlock = 1024;
using Totals = std::array<int32_t, kBlock>;

int8_t lower(int8_t pair) { return static_cast<int8_t>(static_cast<int8_t>(static_cast<uint8_t>(pair) << 4) >> 4); }
int8_t upper(int8_t pair) { return static_cast<int8_t>(pair >> 4); }

// The sum is below 2^24 and so exact as a float. A quotient that is no tie is farther from one than float's rounding
// takes it. Adding 1.5 * 2^23 leaves no bits for a fraction.
[[gnu::always_inline]] inline int8_t mean(int32_t total, float count) {
  constexpr float kNoFraction = 12582912.0f;
  return static_cast<int8_t>(static_cast<int32_t>((static_cast<float>(total) / count + kNoFraction) - kNoFraction));
}

template <bool kArePairs>
[[gnu::always_inline]] inline void mean_all(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  const auto divisor = static_cast<float>(pieces.size());
  for (size_t first = 0; first < count; first += kBlock) {
    const size_t n = std::min(kBlock, count - first);
    Totals totals{};
    Totals uppers{};
    for (const std::byte* piece : pieces) {
      const auto* const numbers = reinterpret_cast<const int8_t*>(piece) + first;
      for (size_t i = 0; i < n; ++i) totals[i] += kArePairs ? lower(numbers[i]) : numbers[i];
      if constexpr (kArePairs) {
        for (size_t i = 0; i < n; ++i) uppers[i] += upper(numbers[i]);
      }
    }
    auto* const means = reinterpret_cast<int8_t*>(out) + first;
    for (size_t i = 0; i < n; ++i) {
      means[i] = mean(totals[i], divisor);
      if constexpr (kArePairs) {
        const auto pair = static_cast<uint32_t>(mean(uppers[i], divisor)) << 4 | (static_cast<uint32_t>(means[i]) & 15);
        means[i] = static_cast<int8_t>(pair);
      }
    }
  }
}

// The value of a float8_e4m3fn in units of 2^-9, the least one that is not 0; at most 448 * 2^9.
[[gnu::always_inline]] inline int32_t units(uint8_t bits) {
  constexpr int32_t kNan = 0x7f;
  const int32_t magnitude = bits & 0x7f;
  const int32_t exponent = magnitude >> 3;
  const int32_t mantissa = (magnitude & 7) | (exponent > 0 ? 8 : 0);
  const int32_t value = magnitude == kNan ? 0 : mantissa << std::max(exponent - 1, 0);
  return (bits & 0x80) != 0 ? -value : value;
}

// The float nearest to total / count units, ties to even. Floats that are next to each other differ by a power of two,
// 1 below 16 units, and their bits by 1. The sum, below 2^31, is exact as a double; for ties, see mean().
[[gnu::always_inline]] inline uint8_t float_of_mean(int32_t total, double count) {
  constexpr double kNoFraction = 0x1.8p52;
  const double quotient = static_cast<double>(total < 0 ? -total : total) / count;
  const int64_t step_exponent = std::max<int64_t>((std::bit_cast<int64_t>(quotient) >> 52) - 1023 - 3, 0);
  const double steps_per_unit = std::bit_cast<double>((1023 - step_exponent) << 52);
  const double steps = (quotient * steps_per_unit + kNoFraction) - kNoFraction;
  const auto bits = static_cast<uint32_t>(step_exponent * 8 + static_cast<int64_t>(steps));
  return static_cast<uint8_t>(total < 0 && bits != 0 ? bits | 0x80 : bits);
}

[[gnu::always_inline]] inline void mean_all_floats(std::span<const std::byte* const> pieces, std::byte* out,
                                                   size_t count) {
  const auto divisor = static_cast<double>(pieces.size());
  for (size_t first = 0; first < count; first += kBlock) {
    const size_t n = std::min(kBlock, count - first);
    Totals totals{};
    for (const std::byte* piece : pieces) {
      const auto* const floats = reinterpret_cast<const uint8_t*>(piece) + first;
      for (size_t i = 0; i < n; ++i) totals[i] += units(floats[i]);
    }
    auto* const means = reinterpret_cast<uint8_t*>(out) + first;
    for (size_t i = 0; i < n; ++i) means[i] = float_of_mean(totals[i], divisor);
  }
}

// The same functions, compiled for processors with wide vectors.
JAXHETERO_WIDE void mean_of_8_bits_wide(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  mean_all<false>(pieces, out, count);
}
JAXHETERO_WIDE void mean_of_4_bits_wide(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  mean_all<true>(pieces, out, count);
}
JAXHETERO_WIDE void mean_of_8_bit_floats_wide(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  mean_all_floats(pieces, out, count);
}

}  // namespace

void mean_of_8_bits(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  const DefaultFloatingPoint mode;
  have_wide_vectors() ? mean_of_8_bits_wide(pieces, out, count) : mean_all<false>(pieces, out, count);
}

void mean_of_4_bits(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  const DefaultFloatingPoint mode;
  have_wide_vectors() ? mean_of_4_bits_wide(pieces, out, count) : mean_all<true>(pieces, out, count);
}

void mean_of_8_bit_floats(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  const DefaultFloatingPoint mode;
  have_wide_vectors() ? mean_of_8_bit_floats_wide(pieces, out, count) : mean_all_floats(pieces, out, count);
}

}  // namespace jaxhetero
