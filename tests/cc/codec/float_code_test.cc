// The code of floats: the same bits come back, for every vector unit; what is no code is refused.
#include "xla_ffi/codec/float_code.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace jaxhetero {
namespace {

using internal::Vectors;
using Bytes = std::vector<std::byte>;

constexpr size_t kBlock = 1024;

std::vector<Vectors> all_vectors() {
  std::vector<Vectors> all;
  for (const Vectors vectors : {Vectors::kPlain, Vectors::kAvx2, Vectors::kAvx512}) {
    if (internal::have(vectors)) all.push_back(vectors);
  }
  return all;
}

// Elements of a kind, by their bits as float32. As bfloat16 they are the upper halves.
struct Pattern {
  std::string name;
  std::function<uint32_t(std::mt19937&)> next;
};

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

float gaussian(std::mt19937& random) { return std::normal_distribution<float>(0, 1e-3f)(random); }

// The sum of eight bfloat16 values.
uint32_t total(std::mt19937& random) {
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += std::bit_cast<float>(bits_of(gaussian(random)) & 0xffff0000u);
  return bits_of(sum);
}

const std::vector<Pattern> kPatterns = {
    {"zeros", [](auto&) { return 0u; }},
    {"negative zeros", [](auto&) { return 0x80000000u; }},
    {"ones", [](auto&) { return ~0u; }},
    {"one value", [](auto&) { return bits_of(0.1f); }},
    {"denormals", [](auto& random) { return static_cast<uint32_t>(random()) & 0x807fffffu; }},
    {"infinities", [](auto& random) { return 0x7f800000u | (static_cast<uint32_t>(random()) & 0x80000000u); }},
    {"NaN of any payload", [](auto& random) { return 0x7f800000u | static_cast<uint32_t>(random()); }},
    {"integers", [](auto& random) { return bits_of(static_cast<float>(random() % 100)); }},
    {"gradients", [](auto& random) { return bits_of(gaussian(random)); }},
    {"gradients of bfloat16 computation", [](auto& random) { return bits_of(gaussian(random)) & 0xffff0000u; }},
    {"their totals", total},
    {"two scales", [](auto& random) { return bits_of(gaussian(random) * (random() % 2 == 0 ? 1e-6f : 1.0f)); }},
    {"rare", [](auto& random) { return random() % 100 == 0 ? bits_of(gaussian(random)) : 0u; }},
    {"rare special ones",
     [](auto& random) { return random() % 50 == 0 ? static_cast<uint32_t>(random()) : bits_of(gaussian(random)); }},
    {"all exponents", [](auto& random) { return static_cast<uint32_t>(random()) & 0xff800000u; }},
    {"random bits", [](auto& random) { return static_cast<uint32_t>(random()); }},
};

Bytes values_of(const Pattern& pattern, DType dtype, size_t count) {
  std::mt19937 random(static_cast<unsigned>(count));
  Bytes values(count * item_bytes(dtype));
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = pattern.next(random);
    const auto half = static_cast<uint16_t>(bits >> 16);
    const void* from = dtype == DType::kF32 ? static_cast<const void*>(&bits) : &half;
    std::memcpy(values.data() + i * item_bytes(dtype), from, item_bytes(dtype));
  }
  return values;
}

Bytes encoded(Vectors vectors, DType dtype, const Bytes& values) {
  Bytes coded(most_coded_bytes(dtype, values.size()));
  coded.resize(internal::encode(vectors, dtype, values, coded));
  return coded;
}

class FloatCode : public testing::TestWithParam<DType> {};

TEST_P(FloatCode, GivesTheSameBitsBackWhateverTheyAre) {
  for (const Pattern& pattern : kPatterns) {
    for (const size_t count : {0, 1, 2, 63, 64, 65, 1000, 1023, 1024, 1025, 3000, 16384}) {
      const Bytes values = values_of(pattern, GetParam(), count);
      const Bytes expected = encoded(Vectors::kPlain, GetParam(), values);
      for (const Vectors vectors : all_vectors()) {
        const Bytes coded = encoded(vectors, GetParam(), values);
        ASSERT_EQ(coded, expected) << pattern.name << ", " << count << ": vectors " << int(vectors);
        if (coded.empty()) continue;
        EXPECT_LT(coded.size(), values.size());
        Bytes again(values.size(), std::byte{0xee});
        ASSERT_TRUE(internal::decode(vectors, GetParam(), coded, again)) << pattern.name << ", " << count;
        ASSERT_EQ(again, values) << pattern.name << ", " << count << ": vectors " << int(vectors);
      }
    }
  }
}

// Every value of 16 bits, in their order and mixed.
TEST_P(FloatCode, GivesEverySignExponentAndMantissaBack) {
  std::vector<uint16_t> halves(size_t{1} << 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  for (int turn = 0; turn < 2; ++turn) {
    for (size_t first = 0; first < halves.size(); first += 4 * kBlock) {
      Bytes values;
      for (size_t i = first; i < first + 4 * kBlock; ++i) {
        const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16 | (turn == 0 ? 0 : halves[halves.size() - 1 - i]);
        const auto* from = reinterpret_cast<const std::byte*>(&bits);
        if (GetParam() == DType::kF32) {
          values.insert(values.end(), from, from + 4);
        } else {
          values.insert(values.end(), from + 2, from + 4);
        }
      }
      for (const Vectors vectors : all_vectors()) {
        const Bytes coded = encoded(vectors, GetParam(), values);
        Bytes again(values.size());
        if (coded.empty()) continue;
        ASSERT_TRUE(internal::decode(vectors, GetParam(), coded, again));
        ASSERT_EQ(again, values) << "from " << first;
      }
    }
    std::shuffle(halves.begin(), halves.end(), std::mt19937(1));
  }
}

// What a truncated code has instead of values, nobody says; but nothing beside them is written.
TEST_P(FloatCode, RefusesWhatIsNoCode) {
  for (const Pattern& pattern : kPatterns) {
    const Bytes values = values_of(pattern, GetParam(), kBlock + 100);
    const Bytes coded = encoded(Vectors::kPlain, GetParam(), values);
    for (const Vectors vectors : all_vectors()) {
      Bytes out(values.size());
      for (size_t bytes = 0; bytes < coded.size(); bytes += bytes < 100 ? 1 : 37) {
        const Bytes part(coded.begin(), coded.begin() + static_cast<std::ptrdiff_t>(bytes));
        EXPECT_FALSE(internal::decode(vectors, GetParam(), part, out)) << pattern.name << " cut at " << bytes;
      }
      if (coded.empty()) continue;
      Bytes longer = coded;
      longer.push_back(std::byte{0});
      EXPECT_FALSE(internal::decode(vectors, GetParam(), longer, out)) << pattern.name;
      Bytes fewer(values.size() - 200 * item_bytes(GetParam()));
      EXPECT_FALSE(internal::decode(vectors, GetParam(), coded, fewer)) << pattern.name;
      // Forms that no plane has, or not this one.
      for (const size_t at : {2, 3}) {
        Bytes damaged = coded;
        damaged[at] = std::byte{0xff};
        EXPECT_FALSE(internal::decode(vectors, GetParam(), damaged, out)) << pattern.name;
      }
    }
  }
}

TEST_P(FloatCode, DecodesDamagedBytesToTheSameValuesWithAllVectors) {
  std::mt19937 random(1);
  for (const Pattern& pattern : kPatterns) {
    const Bytes values = values_of(pattern, GetParam(), 700);
    Bytes coded = encoded(Vectors::kPlain, GetParam(), values);
    for (int turn = 0; turn < 100 && !coded.empty(); ++turn) {
      coded[random() % coded.size()] = static_cast<std::byte>(random());
      Bytes expected(values.size());
      const bool is_code = internal::decode(Vectors::kPlain, GetParam(), coded, expected);
      for (const Vectors vectors : all_vectors()) {
        Bytes out(values.size());
        ASSERT_EQ(internal::decode(vectors, GetParam(), coded, out), is_code) << pattern.name;
        if (!is_code) continue;
        ASSERT_EQ(out, expected) << pattern.name;
      }
    }
  }
}

// As gradients are: see notebook/wire.md.
TEST_P(FloatCode, IsAsShortAsPromised) {
  const bool is_wide = GetParam() == DType::kF32;
  const std::vector<std::pair<std::string, double>> most = {
      {"gradients", is_wide ? 0.86 : 0.72},
      {"gradients of bfloat16 computation", is_wide ? 0.36 : 0.72},
      {"their totals", is_wide ? 0.59 : 0.72},
      {"rare", 0.10},
      {"zeros", 0.01},
  };
  for (const auto& [name, part] : most) {
    const auto pattern = std::ranges::find(kPatterns, name, &Pattern::name);
    const Bytes values = values_of(*pattern, GetParam(), 16384);
    const Bytes coded = encoded(all_vectors().back(), GetParam(), values);
    EXPECT_GT(coded.size(), 0u) << name;
    EXPECT_LT(static_cast<double>(coded.size()), part * static_cast<double>(values.size())) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, FloatCode, testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST(FloatCode, IsForSomeTypes) {
  EXPECT_TRUE(has_code(DType::kF32));
  EXPECT_TRUE(has_code(DType::kBF16));
  for (const DType dtype : {DType::kF16, DType::kF64, DType::kI32, DType::kU8}) EXPECT_FALSE(has_code(dtype));
}

}  // namespace
}  // namespace jaxhetero
