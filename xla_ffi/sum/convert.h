// Between the program's float32 and the 16-bit floats that it wants on the wire.
#pragma once

#include <cstddef>
#include <span>

#include "xla_ffi/sum/reduce.h"

namespace jaxhetero {

// out[i] = values[i], rounded once: to nearest, ties to even; what is too large becomes infinite, a NaN stays one. `to`
// is kF16 or kBF16.
void narrow(DType to, std::span<const float> values, std::byte* out);

// Spreads the 16-bit floats in the last half of `memory` over all of it, as float32. Exact.
void widen_in_place(DType from, std::span<std::byte> memory);

}  // namespace jaxhetero
