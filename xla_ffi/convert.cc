#include "convert.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "arithmetic.h"

namespace jaxhetero {
namespace {

inline void store(float value, F16& out) { out = store_f16(value); }
inline void store(float value, BF16& out) { out = store_bf16(value); }

template <typename Half>
[[gnu::always_inline]] inline void narrow_all(std::span<const float> values, std::byte* out) {
  auto* halves = reinterpret_cast<Half*>(out);
  for (size_t i = 0; i < values.size(); ++i) store(values[i], halves[i]);
}

// From the front. Element i ends at byte 4 (i + 1), and the halves not yet read begin at 2 (count + i + 1) or behind
// it.
template <typename Half>
[[gnu::always_inline]] inline void widen_all(std::span<std::byte> memory) {
  constexpr size_t kBlock = 1024;
  const size_t count = memory.size() / sizeof(float);
  const std::byte* halves = memory.data() + count * sizeof(Half);
  auto* values = reinterpret_cast<float*>(memory.data());
  std::array<Half, kBlock> block;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    std::memcpy(block.data(), halves + begin * sizeof(Half), n * sizeof(Half));
    for (size_t i = 0; i < n; ++i) values[begin + i] = load(block[i]);
  }
}

[[gnu::always_inline]] inline void narrow_any(DType to, std::span<const float> values, std::byte* out) {
  to == DType::kF16 ? narrow_all<F16>(values, out) : narrow_all<BF16>(values, out);
}

[[gnu::always_inline]] inline void widen_any(DType from, std::span<std::byte> memory) {
  from == DType::kF16 ? widen_all<F16>(memory) : widen_all<BF16>(memory);
}

// The same once more, for processors that have wide vectors.
JAXHETERO_WIDE void narrow_wide(DType to, std::span<const float> values, std::byte* out) {
  narrow_any(to, values, out);
}
JAXHETERO_WIDE void widen_wide(DType from, std::span<std::byte> memory) { widen_any(from, memory); }

}  // namespace

void narrow(DType to, std::span<const float> values, std::byte* out) {
  const DefaultFloatingPoint mode;
  have_wide_vectors() ? narrow_wide(to, values, out) : narrow_any(to, values, out);
}

void widen_in_place(DType from, std::span<std::byte> memory) {
  const DefaultFloatingPoint mode;
  have_wide_vectors() ? widen_wide(from, memory) : widen_any(from, memory);
}

}  // namespace jaxhetero
