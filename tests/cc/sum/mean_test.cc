// The mean of small whole numbers, and of floats of 8 bits: exact, and rounded once.
#include "xla_ffi/sum/mean.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#include "tests/cc/strange_rounding.h"

namespace jaxhetero {
namespace {

// Without floats: to nearest, ties to even.
int rounded(int total, int count) {
  const int quotient = total >= 0 ? total / count : -((-total + count - 1) / count);  // downwards
  const int twice = 2 * (total - quotient * count);
  const bool is_up = twice > count || (twice == count && quotient % 2 != 0);
  return quotient + (is_up ? 1 : 0);
}

using Numbers = std::vector<int8_t>;

std::vector<const std::byte*> pointers(const std::vector<Numbers>& pieces) {
  std::vector<const std::byte*> found;
  for (const Numbers& piece : pieces) found.push_back(reinterpret_cast<const std::byte*>(piece.data()));
  return found;
}

int lower(int8_t pair) { return (static_cast<int>(pair & 15) ^ 8) - 8; }
int upper(int8_t pair) { return (static_cast<int>(pair >> 4 & 15) ^ 8) - 8; }

class Mean : public testing::TestWithParam<size_t> {};

TEST_P(Mean, IsRoundedOnceWhateverTheOrderAndTheMode) {
  std::mt19937 random(1);
  for (const size_t count : {1u, 31u, 1024u, 3001u}) {
    std::vector<Numbers> pieces(GetParam(), Numbers(count));
    for (Numbers& piece : pieces) {
      for (int8_t& number : piece) number = static_cast<int8_t>(random());
    }
    Numbers eight(count);
    Numbers four(count);
    {
      const StrangeRounding mode;
      mean_of_8_bits(pointers(pieces), reinterpret_cast<std::byte*>(eight.data()), count);
      std::ranges::shuffle(pieces, random);
      mean_of_4_bits(pointers(pieces), reinterpret_cast<std::byte*>(four.data()), count);
    }
    for (size_t i = 0; i < count; ++i) {
      int total = 0;
      int lowers = 0;
      int uppers = 0;
      for (const Numbers& piece : pieces) {
        total += piece[i];
        lowers += lower(piece[i]);
        uppers += upper(piece[i]);
      }
      const int workers = static_cast<int>(GetParam());
      ASSERT_EQ(eight[i], rounded(total, workers)) << "element " << i << " of " << count;
      ASSERT_EQ(lower(four[i]), rounded(lowers, workers)) << "element " << i << " of " << count;
      ASSERT_EQ(upper(four[i]), rounded(uppers, workers)) << "element " << i << " of " << count;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Workers, Mean, testing::Values(1, 2, 3, 4, 7, 8, 64, 4096));

// Every sum of two, and of the most workers.
TEST(Mean, OfTheExtremesIsExact) {
  for (int a = -128; a < 128; ++a) {
    for (int b = -128; b < 128; ++b) {
      std::vector<Numbers> pieces = {{static_cast<int8_t>(a)}, {static_cast<int8_t>(b)}};
      mean_of_8_bits(pointers(pieces), reinterpret_cast<std::byte*>(pieces[0].data()), 1);
      ASSERT_EQ(pieces[0][0], rounded(a + b, 2));
    }
  }
}

// --- Floats of 8 bits.

// In units of 2^-9, by the definition of float8_e4m3fn; NaN is taken for 0.
int64_t units(uint8_t bits) {
  const int exponent = bits >> 3 & 15;
  const int mantissa = bits & 7;
  if ((bits & 0x7f) == 0x7f) return 0;
  const int64_t magnitude = exponent == 0 ? mantissa : int64_t{8 + mantissa} << (exponent - 1);
  return bits >= 0x80 ? -magnitude : magnitude;
}

// Whole numbers alone: the float for which |count * value - total| is least, of two such the one with an even mantissa.
uint8_t nearest(int64_t total, int64_t count) {
  uint8_t best = 0;
  for (int bits = 1; bits < 0x7f; ++bits) {
    const int64_t distance = std::abs(count * units(static_cast<uint8_t>(bits)) - std::abs(total));
    const int64_t least = std::abs(count * units(best) - std::abs(total));
    if (distance < least || (distance == least && bits % 2 == 0)) best = static_cast<uint8_t>(bits);
  }
  return static_cast<uint8_t>(total < 0 && best != 0 ? best | 0x80 : best);
}

TEST_P(Mean, OfFloatsIsTheNearestOneWhateverTheOrderAndTheMode) {
  std::mt19937 random(2);
  constexpr size_t kCount = 1500;
  std::vector<Numbers> pieces(GetParam(), Numbers(kCount));
  for (Numbers& piece : pieces) {
    for (int8_t& number : piece) number = static_cast<int8_t>(random());
  }
  Numbers means(kCount);
  Numbers again(kCount);
  {
    const StrangeRounding mode;
    mean_of_8_bit_floats(pointers(pieces), reinterpret_cast<std::byte*>(means.data()), kCount);
    std::ranges::shuffle(pieces, random);
    mean_of_8_bit_floats(pointers(pieces), reinterpret_cast<std::byte*>(again.data()), kCount);
  }
  EXPECT_EQ(means, again);
  for (size_t i = 0; i < kCount; ++i) {
    int64_t total = 0;
    for (const Numbers& piece : pieces) total += units(static_cast<uint8_t>(piece[i]));
    ASSERT_EQ(static_cast<uint8_t>(means[i]), nearest(total, static_cast<int64_t>(GetParam()))) << i;
  }
}

// Every sum of two, among them all ties; and what all workers have alike.
TEST(Mean, OfTwoFloatsIsTheNearestOne) {
  for (int a = 0; a < 256; ++a) {
    for (int b = 0; b < 256; ++b) {
      std::vector<Numbers> pieces = {{static_cast<int8_t>(a)}, {static_cast<int8_t>(b)}};
      mean_of_8_bit_floats(pointers(pieces), reinterpret_cast<std::byte*>(pieces[0].data()), 1);
      ASSERT_EQ(static_cast<uint8_t>(pieces[0][0]),
                nearest(units(static_cast<uint8_t>(a)) + units(static_cast<uint8_t>(b)), 2));
    }
  }
}

TEST(Mean, OfTheLargestFloatsOfTheMostWorkersIsThatFloat) {
  std::vector<Numbers> pieces(4096, Numbers{0x7e});
  mean_of_8_bit_floats(pointers(pieces), reinterpret_cast<std::byte*>(pieces[0].data()), 1);
  EXPECT_EQ(pieces[0][0], 0x7e);
}

}  // namespace
}  // namespace jaxhetero
