#include "xla_ffi/sum/mean.h"

#include <algorithm>
#include <array>
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

// The same functions, compiled for processors with wide vectors.
JAXHETERO_WIDE void mean_of_8_bits_wide(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  mean_all<false>(pieces, out, count);
}
JAXHETERO_WIDE void mean_of_4_bits_wide(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  mean_all<true>(pieces, out, count);
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

}  // namespace jaxhetero
