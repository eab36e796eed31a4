// The mean of small whole numbers: exact, and rounded once.
#include "xla_ffi/sum/mean.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
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

}  // namespace
}  // namespace jaxhetero
