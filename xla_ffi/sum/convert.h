// Conversions between the program's float32 and 16-bit floats on the wire. Pure functions, on any thread.
#pragma once

#include <cstddef>
#include <span>

#include "xla_ffi/sum/reduce.h"

namespace jaxhetero {

// out[i] = values[i], rounded to nearest, ties to even. Values that are too large become infinite; NaN stays NaN. `to`
// is kF16 or kBF16.
void narrow(DType to, std::span<const float> values, std::byte* out);

// Converts the 16-bit floats in the second half of `memory` to float32, which fill all of it. Exact.
void widen_in_place(DType from, std::span<std::byte> memory);

// The sum of 16-bit floats in float32, in the order of `pieces`, which are as long as `total`; at least one. Bits as in
// reduce_in_order(), but for the rounding at the end.
void sum_widened(DType from, std::span<const std::byte* const> pieces, std::span<float> total);

}  // namespace jaxhetero
