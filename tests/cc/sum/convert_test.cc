#include "xla_ffi/sum/convert.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "tests/cc/half_format.h"
#include "tests/cc/strange_rounding.h"
#include "xla_ffi/sum/reduce.h"

namespace jaxhetero {
namespace {

class ConvertTest : public testing::TestWithParam<DType> {
 protected:
  [[nodiscard]] const HalfFormat& format() const { return format_of(GetParam()); }

  [[nodiscard]] std::vector<uint16_t> narrowed(const std::vector<float>& values) const {
    std::vector<uint16_t> halves(values.size());
    narrow(GetParam(), values, std::as_writable_bytes(std::span(halves)).data());
    return halves;
  }
  [[nodiscard]] std::vector<float> widened(const std::vector<uint16_t>& halves) const {
    std::vector<float> values(halves.size());
    const auto memory = std::as_writable_bytes(std::span(values));
    if (!halves.empty()) std::memcpy(memory.data() + memory.size() / 2, halves.data(), memory.size() / 2);
    widen_in_place(GetParam(), memory);
    return values;
  }
};

std::vector<uint16_t> all_halves() {
  std::vector<uint16_t> halves(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  return halves;
}

bool same(float a, double b) { return std::isnan(b) ? std::isnan(a) : a == b && std::signbit(a) == std::signbit(b); }

TEST_P(ConvertTest, WidensEveryNumber) {
  const std::vector<float> values = widened(all_halves());
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_TRUE(same(values[i], format().value_of(static_cast<uint16_t>(i)))) << i << " became " << values[i];
  }
}

// All numbers of 16 bits, what is in the middle between two, and what is next to that.
TEST_P(ConvertTest, RoundsToTheNearest) {
  std::vector<float> values;
  for (const uint16_t half : all_halves()) {
    const auto value = static_cast<float>(format().value_of(half));
    const auto next = static_cast<float>(format().value_of(static_cast<uint16_t>(half + 1)));
    const float middle = value / 2 + next / 2;
    values.insert(values.end(), {value, middle, std::nextafter(middle, value), std::nextafter(middle, next)});
  }
  std::mt19937 random(1);
  for (int i = 0; i < 100'000; ++i) values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  const std::vector<uint16_t> halves = narrowed(values);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t expected = format().nearest(values[i]);
    if (std::isnan(values[i])) {
      ASSERT_TRUE(std::isnan(format().value_of(halves[i]))) << i;
    } else {
      ASSERT_EQ(halves[i], expected) << values[i];
    }
  }
}

// Of any length, at any place, and nothing else is touched.
TEST_P(ConvertTest, KeepsToItsMemory) {
  constexpr std::byte kMark{0xa5};
  for (const size_t count : {0u, 1u, 2u, 7u, 1023u, 1024u, 1025u, 4099u}) {
    std::vector<uint16_t> halves(count);
    for (size_t i = 0; i < count; ++i) halves[i] = static_cast<uint16_t>(0x3c00 + i % 0x1000);
    const std::vector<float> values = widened(halves);
    EXPECT_EQ(narrowed(values), halves) << count;

    std::vector<std::byte> memory((count + 2) * sizeof(float), kMark);
    const auto inner = std::span(memory).subspan(sizeof(float), count * sizeof(float));
    if (count > 0) std::memcpy(inner.data() + inner.size() / 2, halves.data(), inner.size() / 2);
    widen_in_place(GetParam(), inner);
    EXPECT_TRUE(std::ranges::equal(inner, std::as_bytes(std::span(values)))) << count;
    narrow(GetParam(), values, inner.data());
    for (const size_t at : {size_t{0}, size_t{3}, memory.size() - 4, memory.size() - 1}) EXPECT_EQ(memory[at], kMark);
  }
}

TEST_P(ConvertTest, DoesNotDependOnTheRoundingOfTheThread) {
  std::mt19937 random(2);
  std::vector<float> values(5000);
  for (float& value : values) value = std::ldexp(static_cast<float>(random()), -24 - static_cast<int>(random() % 48));
  const std::vector<uint16_t> halves = narrowed(values);
  const std::vector<float> again = widened(halves);
  const StrangeRounding mode;
  EXPECT_TRUE(narrowed(values) == halves);
  EXPECT_TRUE(widened(halves) == again);
  EXPECT_TRUE(mode.is_untouched());
}

INSTANTIATE_TEST_SUITE_P(Halves, ConvertTest, testing::Values(DType::kF16, DType::kBF16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

}  // namespace
}  // namespace jaxhetero
