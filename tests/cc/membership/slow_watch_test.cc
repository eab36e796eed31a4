#include "xla_ffi/membership/worker_watch.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace jaxhetero {
namespace {

using Awaited = std::vector<uint32_t>;
constexpr int kLooks = WorkerWatch::kLooks;

class WorkerWatchTest : public testing::Test {
 protected:
  // So many looks; returns after which of them the slow worker was another one, or none any more; 0: it was not.
  int look(double pace, const Awaited& awaited, int count = kLooks) {
    int changed = 0;
    for (int number = 1; number <= count; ++number) {
      if (watch.note(pace, awaited)) changed = number;
    }
    return changed;
  }

  void SetUp() override { EXPECT_EQ(look(100, {}), 0); }

  WorkerWatch watch;
};

using Slow = std::optional<uint32_t>;

TEST_F(WorkerWatchTest, NamesTheOneForWhichAllWait) {
  EXPECT_EQ(look(50, {1, 1, 1}, kLooks - 1), 0);
  EXPECT_EQ(watch.slow(), Slow());
  EXPECT_EQ(look(50, {1, 1, 1}, 1), 1);
  EXPECT_EQ(watch.slow(), Slow(1));
  EXPECT_EQ(watch.percent(), 50u);
  EXPECT_EQ(look(50, {1, 1}, 9), 0);
}

TEST_F(WorkerWatchTest, NamesItNoMoreOnceAllAreAsFastAsBefore) {
  look(50, {1, 1});
  EXPECT_EQ(look(95, {1, 1}, kLooks - 1), 0);
  EXPECT_EQ(look(50, {1, 1}, 1), 0);
  EXPECT_EQ(look(95, {}), kLooks);
  EXPECT_EQ(watch.slow(), Slow());
}

TEST_F(WorkerWatchTest, NamesAnotherOneInstead) {
  look(50, {1, 1});
  EXPECT_EQ(look(50, {2, 2, 1}), kLooks);
  EXPECT_EQ(watch.slow(), Slow(2));
}

TEST_F(WorkerWatchTest, NamesNobodyForAMomentsTrouble) {
  for (int turn = 0; turn < 9; ++turn) {
    EXPECT_EQ(look(50, {1, 1}, kLooks - 1), 0);
    EXPECT_EQ(look(90, {}, 1), 0);
  }
}

// Some worker is always the last one, however little.
TEST_F(WorkerWatchTest, NamesNobodyWhileRoundsAreAboutAsFast) { EXPECT_EQ(look(70, {1, 1}, 9), 0); }

// As where a reducer is slow, or the network.
TEST_F(WorkerWatchTest, NamesNobodyWhereReducersWaitForSeveral) {
  for (int turn = 0; turn < 9; ++turn) EXPECT_EQ(look(50, {1, 2}, 1) + look(50, {}, 1), 0);
  for (uint32_t turn = 0; turn < 9; ++turn) EXPECT_EQ(look(50, {turn % 3, turn % 3}, 1), 0);
}

// Between rounds, reducers wait for nobody.
TEST_F(WorkerWatchTest, LeavesOutLooksThatTellNothing) {
  for (int turn = 1; turn < kLooks; ++turn) EXPECT_EQ(look(50, {1, 1}, 1) + look(50, {}, 3), 0);
  EXPECT_EQ(look(50, {1}, 1), 1);
}

TEST_F(WorkerWatchTest, TakesNoSinglePaceForTheBest) {
  look(300, {}, 1);
  EXPECT_EQ(look(100, {1, 1}, 9), 0);
}

TEST_F(WorkerWatchTest, ComparesWithWhatAnotherPlanCanDo) {
  watch.change_plan();
  EXPECT_EQ(look(50, {1, 1}, 9), 0);
  EXPECT_EQ(look(25, {1, 1}), kLooks);
  watch.change_plan();  // it is slow still
  EXPECT_EQ(look(25, {1, 1}, 9), 0);
  EXPECT_EQ(look(50, {}), kLooks);
}

}  // namespace
}  // namespace jaxhetero
