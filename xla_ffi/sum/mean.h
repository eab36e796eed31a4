// The mean of small whole numbers, or of floats of 8 bits, over all workers. Pure functions, on any thread.
#pragma once

#include <cstddef>
#include <span>

namespace jaxhetero {

// out[i] = the mean of pieces[..][i], rounded to nearest, ties to even; exact up to there, so that the order of the
// pieces does not matter. There are 1 to 4,096 pieces; `out` may be one of them. Elements are bytes: signed numbers of
// 8 bits, pairs of such of 4 bits, or float8_e4m3fn: a sign, four bits of exponent, three of mantissa. NaN of the last
// counts as 0, and no mean is -0.
void mean_of_8_bits(std::span<const std::byte* const> pieces, std::byte* out, size_t count);
void mean_of_4_bits(std::span<const std::byte* const> pieces, std::byte* out, size_t count);
void mean_of_8_bit_floats(std::span<const std::byte* const> pieces, std::byte* out, size_t count);

}  // namespace jaxhetero
