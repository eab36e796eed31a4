// The arithmetic of a reducer: the sum, maximum or minimum of one chunk over all workers. Pure functions, on any
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace jaxhetero {

// Element types on the wire. The numbers are part of the protocol.
enum class DType : uint8_t {
  kF16 = 1,
  kBF16 = 2,
  kF32 = 3,
  kF64 = 4,
  kI8 = 5,
  kI16 = 6,
  kI32 = 7,
  kI64 = 8,
  kU8 = 9,
  kU16 = 10,
  kU32 = 11,
  kU64 = 12,
};

// Bytes per element; 0 for a number that is no type (it may come from the network).
size_t item_bytes(DType dtype);
std::string_view dtype_name(DType dtype);

// What float32 has been rounded to, block by block: numbers of a scale. The values are part of the protocol.
enum class Numbers : uint8_t { kNone, kInt8, kInt4, kFloat8 };

// How elements of two workers are combined.
enum class Arithmetic : uint8_t { kSum, kMax, kMin };

// out[i] = ((pieces[0][i] + pieces[1][i]) + pieces[2][i]) + ..., for i < count, always in the order of `pieces`: the
// result's bits depend on the inputs alone. float16 and bfloat16 are summed in float32 and rounded once (to nearest,
// ties to even). Integers wrap. Maximum and minimum are NaN where any piece is NaN, and -0 is below +0. There is at
// least one piece; `out` may be one of them. All pointers are aligned to the element size.
void reduce_in_order(Arithmetic arithmetic, DType dtype, std::span<const std::byte* const> pieces, std::byte* out,
                     size_t count);

namespace internal {
// For tests: the same function, compiled for the platform's baseline instruction set.
void reduce_in_order_baseline(Arithmetic arithmetic, DType dtype, std::span<const std::byte* const> pieces,
                              std::byte* out, size_t count);
}  // namespace internal

}  // namespace jaxhetero
