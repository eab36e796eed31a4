// The codes of floats and of numbers: bytes of a peer that are decoded, and values that are encoded and decoded again.
// The first three bytes choose which, and how many elements; the rest is for it.
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "xla_ffi/codec/float_code.h"
#include "xla_ffi/codec/number_code.h"

namespace jaxhetero {
namespace {

using internal::Vectors;

constexpr std::array<Vectors, 3> kVectors = {Vectors::kPlain, Vectors::kAvx2, Vectors::kAvx512};

// In memory of just this size, so that the sanitizers see what goes past its end.
void expect_round_trip(Vectors vectors, DType dtype, const std::vector<std::byte>& values) {
  std::vector<std::byte> coded(most_coded_bytes(dtype, values.size()));
  const size_t bytes = internal::encode(vectors, dtype, values, coded);
  if (bytes == 0) return;
  if (bytes >= values.size()) std::abort();
  const std::vector<std::byte> exact(coded.begin(), coded.begin() + static_cast<std::ptrdiff_t>(bytes));
  std::vector<std::byte> again(values.size());
  if (!internal::decode(vectors, dtype, exact, again) || again != values) std::abort();
}

// What is a code for one vector unit is one for all, of the same values.
void expect_same(DType dtype, const std::vector<std::byte>& coded, size_t bytes) {
  std::vector<std::byte> values(bytes);
  const bool is_code = internal::decode(Vectors::kPlain, dtype, coded, values);
  for (const Vectors vectors : kVectors) {
    if (!internal::have(vectors)) continue;
    std::vector<std::byte> others(bytes);
    if (internal::decode(vectors, dtype, coded, others) != is_code) std::abort();
    if (is_code && others != values) std::abort();
    if (is_code) expect_round_trip(vectors, dtype, values);
  }
}

// What comes of a code has one again, but where a number is -0, and wherever the leaves end.
void expect_numbers(Numbers numbers, const std::vector<std::byte>& coded, size_t count) {
  std::vector<float> values(count);
  if (!decode_numbers(numbers, coded, values)) return;
  const std::array<uint64_t, 3> leaf_ends = {count / 3, count / 2, count + 1};
  std::vector<std::byte> code(count * sizeof(float));
  const size_t bytes = encode_numbers(numbers, values, 0, leaf_ends, code);
  if (bytes == 0) return;
  const std::vector<std::byte> exact(code.begin(), code.begin() + static_cast<std::ptrdiff_t>(bytes));
  std::vector<float> again(count);
  if (!decode_numbers(numbers, exact, again)) std::abort();
  for (size_t i = 0; i < count; ++i) {
    const bool are_nan = values[i] != values[i] && again[i] != again[i];
    if (!are_nan && std::bit_cast<uint32_t>(values[i]) != std::bit_cast<uint32_t>(again[i])) std::abort();
  }
}

}  // namespace
}  // namespace jaxhetero

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jaxhetero;
  if (size < 3) return 0;
  const DType dtype = (data[0] & 1) != 0 ? DType::kF32 : DType::kBF16;
  const size_t bytes = (data[1] | (data[2] & 7) << 8) * item_bytes(dtype);
  const auto input = std::as_bytes(std::span(data + 3, size - 3));
  const std::vector<std::byte> rest(input.begin(), input.end());
  if (const auto numbers = static_cast<Numbers>(data[0] >> 2 & 3); numbers != Numbers::kNone) {
    expect_numbers(numbers, rest, bytes / item_bytes(dtype));
    return 0;
  }
  if ((data[0] & 2) != 0) {
    expect_same(dtype, rest, bytes);
    return 0;
  }
  // The input over and over, so that there are blocks with structure.
  std::vector<std::byte> values(bytes);
  for (size_t i = 0; i < bytes && !rest.empty(); ++i) values[i] = rest[i % rest.size()];
  for (const Vectors vectors : kVectors) {
    if (internal::have(vectors)) expect_round_trip(vectors, dtype, values);
  }
  return 0;
}
