// The 16-bit floats by their definition, for tests to compare with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "xla_ffi/sum/reduce.h"

namespace jaxhetero {

// A float format by its definition (IEEE 754, section 3.4), in double arithmetic, which is exact for both halves.
struct HalfFormat {
  int mantissa_bits;
  int min_exponent;  // of the smallest normal number
  int max_exponent;

  [[nodiscard]] double value_of(uint16_t bits) const {
    const int magnitude = bits & 0x7fff;
    const int mantissa = magnitude & ((1 << mantissa_bits) - 1);
    const int exponent = magnitude >> mantissa_bits;
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if (exponent > max_exponent - min_exponent + 1) {
      return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
    }
    const int hidden = exponent == 0 ? 0 : 1 << mantissa_bits;
    return sign * std::ldexp(hidden + mantissa, min_exponent + std::max(exponent - 1, 0) - mantissa_bits);
  }

  // The nearest value; in the middle between two, the one with an even mantissa.
  [[nodiscard]] uint16_t nearest(double value) const {
    const int infinity = (max_exponent - min_exponent + 2) << mantissa_bits;
    const int sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return static_cast<uint16_t>(sign | infinity | 1);
    if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
    const double magnitude = std::fabs(value);
    const int exponent = magnitude == 0 ? min_exponent : std::max(std::ilogb(magnitude), min_exponent);
    const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent)));
    // A carry out of the mantissa runs into the exponent field, where it belongs.
    const int bits = ((exponent - min_exponent) << mantissa_bits) + steps;
    return static_cast<uint16_t>(sign | std::min(bits, infinity));
  }
};
inline constexpr HalfFormat kHalf{10, -14, 15};
inline constexpr HalfFormat kBrain{7, -126, 127};
inline const HalfFormat& format_of(DType dtype) { return dtype == DType::kF16 ? kHalf : kBrain; }

}  // namespace jaxhetero
