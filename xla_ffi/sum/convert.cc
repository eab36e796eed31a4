#include "xla_ffi/sum/convert.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "xla_ffi/sum/arithmetic.h"

namespace jaxhetero {
namespace {

template <bool kIsWide, typename Half>
[[gnu::always_inline]] inline void narrow_all(std::span<const float> values, std::byte* out) {
  store_all<kIsWide>(values.data(), reinterpret_cast<Half*>(out), values.size());
}

// Goes from front to back. Element i ends at byte 4 (i + 1); the halves that are not read yet start at byte
// 2 (count + i + 1), which is never before that.
template <bool kIsWide, typename Half>
[[gnu::always_inline]] inline void widen_all(std::span<std::byte> memory) {
  constexpr size_t kBlock = 1024;
  const size_t count = memory.size() / sizeof(float);
  const std::byte* halves = memory.data() + count * sizeof(Half);
  auto* values = reinterpret_cast<float*>(memory.data());
  std::array<Half, kBlock> block;
  for (size_t first = 0; first < count; first += kBlock) {
    const size_t n = std::min(kBlock, count - first);
    std::memcpy(block.data(), halves + first * sizeof(Half), n * sizeof(Half));
    load_all<kIsWide>(block.data(), values + first, n);
  }
}

template <bool kIsWide>
[[gnu::always_inline]] inline void narrow_any(DType to, std::span<const float> values, std::byte* out) {
  to == DType::kF16 ? narrow_all<kIsWide, F16>(values, out) : narrow_all<kIsWide, BF16>(values, out);
}

template <bool kIsWide>
[[gnu::always_inline]] inline void widen_any(DType from, std::span<std::byte> memory) {
  from == DType::kF16 ? widen_all<kIsWide, F16>(memory) : widen_all<kIsWide, BF16>(memory);
}

template <bool kIsWide>
[[gnu::always_inline]] inline void load_any(DType from, const std::byte* halves, std::span<float> values) {
  if (from == DType::kF16) {
    load_all<kIsWide>(reinterpret_cast<const F16*>(halves), values.data(), values.size());
  } else {
    load_all<kIsWide>(reinterpret_cast<const BF16*>(halves), values.data(), values.size());
  }
}

// The same functions, compiled for processors with wide vectors.
JAXHETERO_WIDE void load_wide_any(DType from, const std::byte* halves, std::span<float> values) {
  load_any<true>(from, halves, values);
}
JAXHETERO_WIDE void narrow_wide(DType to, std::span<const float> values, std::byte* out) {
  narrow_any<true>(to, values, out);
}
JAXHETERO_WIDE void widen_wide(DType from, std::span<std::byte> memory) { widen_any<true>(from, memory); }

}  // namespace

void narrow(DType to, std::span<const float> values, std::byte* out) {
  const DefaultFloatingPoint mode;
  have_wide_vectors() ? narrow_wide(to, values, out) : narrow_any<false>(to, values, out);
}

void sum_widened(DType from, std::span<const std::byte* const> pieces, std::span<float> total) {
  constexpr size_t kBlock = 1024;
  std::array<float, kBlock> widened;
  const DefaultFloatingPoint mode;
  for (size_t first = 0; first < total.size(); first += kBlock) {
    const size_t count = std::min(kBlock, total.size() - first);
    auto* const sum = reinterpret_cast<std::byte*>(total.data() + first);
    auto* const next = reinterpret_cast<const std::byte*>(widened.data());
    for (size_t i = 0; i < pieces.size(); ++i) {
      const auto load = have_wide_vectors() ? load_wide_any : load_any<false>;
      load(from, pieces[i] + first * sizeof(uint16_t), std::span(widened).first(count));
      const std::array<const std::byte*, 2> operands = {sum, next};
      reduce_in_order(Arithmetic::kSum, DType::kF32, std::span(operands).subspan(i == 0 ? 1 : 0), sum, count);
    }
  }
}

void widen_in_place(DType from, std::span<std::byte> memory) {
  const DefaultFloatingPoint mode;
  have_wide_vectors() ? widen_wide(from, memory) : widen_any<false>(from, memory);
}

}  // namespace jaxhetero
