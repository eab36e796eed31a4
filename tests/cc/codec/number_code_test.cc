// The code of numbers of scales: the same bits come back, whatever leaves and chunks there are; other values have none.
#include "xla_ffi/codec/number_code.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace jaxhetero {
namespace {

constexpr size_t kBlock = 64;

struct Case {
  Numbers numbers;
  std::vector<float> all;  // from zero upwards
  int least_exponent;      // of the scale's power of two
  size_t block_bytes;
};

std::vector<float> whole(int largest) {
  std::vector<float> all;
  for (int i = 0; i <= largest; ++i) all.push_back(static_cast<float>(i));
  return all;
}

// Every float8_e4m3fn.
std::vector<float> floats() {
  std::vector<float> all;
  for (int i = 0; i < 8; ++i) all.push_back(std::ldexp(static_cast<float>(i), -9));
  for (int exponent = -6; exponent <= 8; ++exponent) {
    for (int i = 8; i < 16; ++i) all.push_back(std::ldexp(static_cast<float>(i), exponent - 3));
  }
  all.pop_back();  // 480, whose bits are NaN's
  return all;
}

const std::vector<Case> kCases = {
    {Numbers::kInt8, whole(127), -126, 65},
    {Numbers::kInt4, whole(7), -126, 33},
    {Numbers::kFloat8, floats(), -117, 65},
};

std::vector<uint64_t> ends_of(const std::vector<uint64_t>& counts) {
  std::vector<uint64_t> ends;
  for (const uint64_t count : counts) ends.push_back((ends.empty() ? 0 : ends.back()) + count);
  return ends;
}

// A bucket with these leaves, whose blocks have scales far apart; some are zeros or NaN.
std::vector<float> bucket_of(const Case& of, const std::vector<uint64_t>& counts) {
  std::mt19937 random(1);
  std::vector<float> values;
  for (const uint64_t count : counts) {
    float scale = 0;
    for (uint64_t i = 0; i < count; ++i) {
      if (i % kBlock == 0) {
        scale = std::ldexp(1.0f, of.least_exponent + static_cast<int>(random() % 230));
        if (random() % 16 == 0) scale = 0;
        if (random() % 16 == 0) scale = std::numeric_limits<float>::quiet_NaN();
      }
      const float number = of.all[random() % of.all.size()];
      values.push_back((random() % 2 == 0 || number == 0 ? number : -number) * std::abs(scale) + 0.0f);
    }
  }
  return values;
}

void expect_same(std::span<const float> values, std::span<const float> others) {
  ASSERT_EQ(values.size(), others.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const bool are_nan = std::isnan(values[i]) && std::isnan(others[i]);
    ASSERT_TRUE(are_nan || std::bit_cast<uint32_t>(values[i]) == std::bit_cast<uint32_t>(others[i])) << i;
  }
}

// Returns the bytes of the code.
size_t round_trip(const Case& of, std::span<const float> values, uint64_t first, std::span<const uint64_t> ends) {
  std::vector<std::byte> coded(values.size_bytes());
  coded.resize(encode_numbers(of.numbers, values, first, ends, coded));
  if (coded.empty()) return 0;
  coded.shrink_to_fit();
  std::vector<float> again(values.size(), 1.0f);
  EXPECT_TRUE(decode_numbers(of.numbers, coded, again));
  expect_same(values, again);
  return coded.size();
}

TEST(NumberCode, GivesEveryNumberOfEveryScaleBack) {
  for (const Case& of : kCases) {
    for (int exponent = of.least_exponent; std::isfinite(std::ldexp(of.all.back(), exponent)); ++exponent) {
      std::vector<float> values;
      for (const float number : of.all) {
        values.push_back(std::ldexp(number, exponent));
        values.push_back(number == 0 ? 0 : -values.back());
      }
      EXPECT_GT(round_trip(of, values, 0, ends_of({values.size()})), 0u) << int(of.numbers) << ", " << exponent;
    }
  }
}

TEST(NumberCode, FollowsTheBlocksOfLeavesWhereverChunksAreCut) {
  const std::vector<uint64_t> counts = {1000, 1, 0, 64, 63, 0, 0, 640, 7, 7, 200, 0};
  const std::vector<uint64_t> ends = ends_of(counts);
  for (const Case& of : kCases) {
    const std::vector<float> values = bucket_of(of, counts);
    for (size_t first = 0; first < values.size(); first += 37) {
      for (const size_t count : {size_t{65}, size_t{256}, values.size()}) {
        const auto chunk = std::span(values).subspan(first).first(std::min(count, values.size() - first));
        if (chunk.size() > kBlock) {
          EXPECT_GT(round_trip(of, chunk, first, ends), 0u) << first;
        }
      }
    }
  }
}

TEST(NumberCode, HasAByteMoreForEachBlock) {
  for (const Case& of : kCases) {
    std::vector<float> values(16 * kBlock);
    for (size_t i = 0; i < values.size(); ++i) values[i] = of.all[i % of.all.size()];
    EXPECT_EQ(round_trip(of, values, 0, ends_of({values.size()})), 16 * of.block_bytes);
    // Cut in two places, each of which takes a block more, and all blocks' counts where they are not whole.
    EXPECT_LE(round_trip(of, std::span(values).subspan(10, 512), 10, ends_of({values.size()})), 8 * of.block_bytes + 8);
  }
}

TEST(NumberCode, HasNoneOfOtherValues) {
  for (const Case& of : kCases) {
    std::vector<float> values(kBlock, of.all.back());
    const std::vector<uint64_t> ends = ends_of({kBlock});
    ASSERT_GT(round_trip(of, values, 0, ends), 0u);
    for (const float other : {0.3f, 1e-45f, -0.0f, std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::max()}) {
      values[5] = other;
      EXPECT_EQ(round_trip(of, values, 0, ends) > 0, of.numbers == Numbers::kFloat8 && other == 0) << other;
    }
  }
}

TEST(NumberCode, RefusesWhatIsNone) {
  std::mt19937 random(3);
  for (const Case& of : kCases) {
    const std::vector<float> values = bucket_of(of, {300, 500});
    std::vector<std::byte> coded(values.size() * sizeof(float));
    coded.resize(encode_numbers(of.numbers, values, 0, ends_of({300, 500}), coded));
    std::vector<float> again(values.size());
    for (size_t bytes = 0; bytes < coded.size(); ++bytes) {
      const std::vector<std::byte> front(coded.begin(), coded.begin() + static_cast<std::ptrdiff_t>(bytes));
      EXPECT_FALSE(decode_numbers(of.numbers, front, again));
    }
    EXPECT_FALSE(decode_numbers(of.numbers, coded, std::span(again).first(799)));
    for (int i = 0; i < 1000; ++i) {  // of any bytes, the sanitizers say what goes past their end
      std::vector<std::byte> bytes(random() % 200);
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() % 4 == 0 ? 0 : random());
      decode_numbers(of.numbers, bytes, again);
    }
  }
}

}  // namespace
}  // namespace jaxhetero
