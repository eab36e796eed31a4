#include "xla_ffi/membership/slow_watch.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace jaxhetero {
namespace {

using Awaited = std::optional<uint32_t>;
constexpr int kLooks = SlowWatch::kLooks;

class SlowWatchTest : public testing::Test {
 protected:
  // So many looks; returns after which of them the slow worker was another one, or none any more; 0: it was not.
  int look(double pace, Awaited awaited, int count = kLooks) {
    int changed = 0;
    for (int number = 1; number <= count; ++number) {
      if (watch.note(pace, awaited)) changed = number;
    }
    return changed;
  }

  void SetUp() override { EXPECT_EQ(look(100, {}), 0); }

  SlowWatch watch;
};

TEST(MostAwaited, IsTheOneForWhichMoreThanHalfWait) {
  EXPECT_EQ(most_awaited({2, 2, 1}, 3), Awaited(2));
  EXPECT_EQ(most_awaited({1, 2}, 2), Awaited());
  EXPECT_EQ(most_awaited({1, 1, 2, 2}, 4), Awaited());
  EXPECT_EQ(most_awaited({7}, 2), Awaited()) << "the other one waits for nobody, or for several";
  EXPECT_EQ(most_awaited({}, 0), Awaited());
}

using Slow = std::optional<uint32_t>;

TEST_F(SlowWatchTest, NamesTheOneForWhichAllWait) {
  EXPECT_EQ(look(50, 1, kLooks - 1), 0);
  EXPECT_EQ(watch.slow(), Slow());
  EXPECT_EQ(look(50, 1, 1), 1);
  EXPECT_EQ(watch.slow(), Slow(1));
  EXPECT_EQ(watch.percent(), 50u);
  EXPECT_EQ(look(50, 1, 9), 0);
}

TEST_F(SlowWatchTest, NamesItNoMoreOnceAllAreAsFastAsBefore) {
  look(50, 1);
  EXPECT_EQ(look(95, 1, kLooks - 1), 0);
  EXPECT_EQ(look(50, 1, 1), 0);
  EXPECT_EQ(look(95, {}), kLooks);
  EXPECT_EQ(watch.slow(), Slow());
}

TEST_F(SlowWatchTest, NamesAnotherOneInstead) {
  look(50, 1);
  EXPECT_EQ(look(50, 2), kLooks);
  EXPECT_EQ(watch.slow(), Slow(2));
}

TEST_F(SlowWatchTest, NamesNobodyForAMomentsTrouble) {
  for (int turn = 0; turn < 9; ++turn) {
    EXPECT_EQ(look(50, 1, kLooks - 1), 0);
    EXPECT_EQ(look(90, {}, 1), 0);
  }
}

// Some worker is always the last one, however little.
TEST_F(SlowWatchTest, NamesNobodyWhileRoundsAreAboutAsFast) { EXPECT_EQ(look(70, 1, 9), 0); }

// As where a reducer is slow, or the network.
TEST_F(SlowWatchTest, NamesNobodyWhereReducersWaitForSeveral) {
  EXPECT_EQ(look(50, {}, 9), 0);
  for (uint32_t turn = 0; turn < 9; ++turn) EXPECT_EQ(look(50, turn % 3, 1), 0);
}

// Between rounds, reducers wait for nobody.
TEST_F(SlowWatchTest, LeavesOutLooksThatTellNothing) {
  for (int turn = 1; turn < kLooks; ++turn) EXPECT_EQ(look(50, 1, 1) + look(50, {}, 3), 0);
  EXPECT_EQ(look(50, 1, 1), 1);
}

TEST_F(SlowWatchTest, TakesNoSinglePaceForTheBest) {
  look(300, {}, 1);
  EXPECT_EQ(look(100, 1, 9), 0);
}

TEST_F(SlowWatchTest, ComparesWithWhatAnotherPlanCanDo) {
  watch.change_plan();
  EXPECT_EQ(look(50, 1, 9), 0);
  EXPECT_EQ(look(25, 1), kLooks);
  watch.change_plan();  // it is slow still
  EXPECT_EQ(look(25, 1, 9), 0);
  EXPECT_EQ(look(50, {}), kLooks);
}

}  // namespace
}  // namespace jaxhetero
