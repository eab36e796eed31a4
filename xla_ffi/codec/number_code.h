// A lossless code for chunks of float32 whose values have been rounded to small numbers of a scale, block by block, as
// jaxhetero/_collectives/quanta.py does: a byte or half of one for each element, and a byte for each block. Pure
// functions, on any thread.
//
// A block has 64 elements of one leaf; the last one of a leaf may have fewer, and so has one that a chunk cuts. Its
// code:
//
//   a byte          0 where it has other than 64 elements, and then a byte for how many; no exponent is 0
//   the exponent    a byte: that of the block's largest magnitude, or one more, from which its scale follows; 255 where
//                   all elements are NaN, and then no numbers follow
//   the numbers     int8, or float8_e4m3fn; of int4 two in a byte, the first half of the block in the lower bits
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "xla_ffi/sum/reduce.h"

namespace jaxhetero {

// Writes the code of `values` to the front of `out`, which has as many bytes as they. They are the elements of a bucket
// from `first` on, whose leaves end before the elements `leaf_ends`. Returns the bytes of the code; 0 where it would
// not be shorter than the values, or some of them are no such numbers.
size_t encode_numbers(Numbers numbers, std::span<const float> values, uint64_t first,
                      std::span<const uint64_t> leaf_ends, std::span<std::byte> out);

// Fills `values` from their code. False where `coded` is no code of so many values; then `values` has any bits. `coded`
// may come from the network.
bool decode_numbers(Numbers numbers, std::span<const std::byte> coded, std::span<float> values);

}  // namespace jaxhetero
