// The arithmetic of a reducer: the sum of one chunk over all workers.
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

// Bytes per element; 0 for a number that names no type (it may come from the network).
size_t item_bytes(DType dtype);
std::string_view dtype_name(DType dtype);

// out[i] = ((pieces[0][i] + pieces[1][i]) + pieces[2][i]) + ...: in the order of `pieces`, whatever their number, so
// the bits depend on nothing else. float16 and bfloat16 are summed in float32 and rounded once (to nearest, ties to
// even); integers wrap. `out` may be one of the pieces. All pointers are aligned to the element size.
void sum_in_order(DType dtype, std::span<const std::byte* const> pieces, std::byte* out, size_t count);

namespace internal {
// For tests: the same sum compiled without any instruction beyond the platform's baseline.
void sum_in_order_baseline(DType dtype, std::span<const std::byte* const> pieces, std::byte* out, size_t count);
}  // namespace internal

}  // namespace jaxhetero
