// A lossless code for chunks of floats: the same bits in fewer bytes. Pure functions, on any thread.
//
// Elements are coded in blocks of 1,024. A block's bits are sorted into planes:
//
//   float32, bfloat16   the exponent, in 4 bits: see below; the sign and the upper 7 bits of the mantissa
//   float32 alone       the lower 16 bits of the mantissa, in planes of 4, 4 and 8 bits
//
// Each plane takes one of several forms. These are the three to know:
//
//   zero     nothing
//   sparse   a bit for each element, whether it is not zero; then those that are not
//   dense    every element
//
// Exponents of one gradient lie close together: 14 of them, below the largest of the block, have a code in 4 bits. 0
// stands for itself, and any other exponent takes 8 bits more. A model that computes in bfloat16 has gradients in
// float32 whose lower bits are zero, and so are most of the lower bits of their sums.
//
// docs/wire.md has the format, with all forms.
#pragma once

#include <cstddef>
#include <span>

#include "xla_ffi/sum/reduce.h"

namespace jaxhetero {

// Whether there is a code for this type: float32 and bfloat16.
bool has_code(DType dtype);

// Whether this processor has vectors for it: else it is slower than most networks.
bool has_fast_code();

// The memory that encode() needs for values of so many bytes, which is more than the code takes.
size_t most_coded_bytes(DType dtype, size_t plain_bytes);

// Writes the code of `values`, whole elements of a type that has one, to the front of `out`, which has
// most_coded_bytes(). Returns the bytes of the code; 0 where it would not be shorter than the values.
size_t encode(DType dtype, std::span<const std::byte> values, std::span<std::byte> out);

// Fills `values` from their code. False where `coded` is no code of so many values; then `values` has any bits. `coded`
// may come from the network.
bool decode(DType dtype, std::span<const std::byte> coded, std::span<std::byte> values);

namespace internal {
// For tests and benchmarks: the same functions, compiled for one vector unit.
enum class Vectors { kPlain, kAvx2, kAvx512 };
bool have(Vectors vectors);
size_t encode(Vectors vectors, DType dtype, std::span<const std::byte> values, std::span<std::byte> out);
bool decode(Vectors vectors, DType dtype, std::span<const std::byte> coded, std::span<std::byte> values);
}  // namespace internal

}  // namespace jaxhetero
