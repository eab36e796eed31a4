#include "xla_ffi/membership/wait_watch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

using Rates = std::map<uint32_t, uint32_t>;

using Awaited = std::optional<uint32_t>;

// Two workers of a job with four reducers. Rounds are as fast as a test says, and all wait for whom it says.
class WaitWatchTest : public testing::Test {
 protected:
  // Both workers report: how fast rounds are compared with the plan, in percent, and for which reducers they waited.
  // Returns whether the look is complete.
  bool tell(uint64_t pace, int32_t first, int32_t second) {
    bool is_complete = false;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      Goodput goodput{0, 1, {}, {10 * pace, 1000, planned_time, rank == 0 ? first : second}};
      for (const auto& [reducer, rate] : planned) goodput.links.push_back({reducer, rate, 0, 0});
      is_complete = watch.add(rank, goodput);
    }
    return is_complete;
  }
  // A look. Returns the rates to follow, which are the plan's from then on; empty: none.
  Rates look(uint64_t pace, Awaited awaited) {
    EXPECT_TRUE(tell(pace, -1, -1));
    Rates rates;
    const auto found = watch.end_look(awaited, is_inside);
    for (const NewRates::Rate& rate : found.value_or(std::vector<NewRates::Rate>())) rates[rate.reducer] = rate.rate;
    if (!rates.empty()) planned = rates;
    return rates;
  }
  // So many looks; returns after which of them the plan had to follow; 0: after none.
  int look(uint64_t pace, Awaited awaited, int count) {
    int changed = 0;
    for (int number = 1; number <= count; ++number) {
      if (!look(pace, awaited).empty()) changed = number;
    }
    return changed;
  }

  static constexpr int kLooks = SlowWatch::kLooks;
  bool is_inside = true;
  uint64_t planned_time = uint64_t{1} << 32;
  Rates planned = {{0, 256}, {1, 256}, {2, 256}, {3, 256}};
  WaitWatch watch{2};
};

TEST_F(WaitWatchTest, FollowsTheReducerForWhichAllWait) {
  EXPECT_EQ(look(100, {}, 9), 0);
  EXPECT_EQ(look(50, 2, kLooks - 1), 0);
  EXPECT_EQ(look(50, 2), Rates({{0, 256}, {1, 256}, {2, 128}, {3, 256}}));
  EXPECT_EQ(watch.percent_of_reducer(2), 50u);
  EXPECT_EQ(watch.percent_of_reducer(1), 0u);
}

TEST_F(WaitWatchTest, FollowsNobodyWhileRoundsAreAboutAsThePlanHasThem) {
  EXPECT_EQ(look(100, {}, 2), 0);
  for (uint32_t turn = 0; turn < 50; ++turn) EXPECT_EQ(look(70, turn % 2, 1), 0);
}

// The start has found all workers to be as slow as that one, so that rounds are as fast as ever.
TEST_F(WaitWatchTest, FindsTheOneThatWasSlowFromTheStart) {
  EXPECT_EQ(look(50, 2, WaitWatch::kFirstTrial - 1), 0);
  EXPECT_TRUE(watch.may_try_less());
  EXPECT_EQ(look(50, 2), Rates({{0, 256}, {1, 256}, {2, 128}, {3, 256}}));
  ASSERT_TRUE(watch.trial());
  EXPECT_TRUE(watch.trial()->has_less);
  EXPECT_EQ(watch.percent_of_reducer(2), 0u) << "that is not known yet";
  EXPECT_EQ(look(90, 2, kLooks), 0);
  EXPECT_FALSE(watch.trial());
  EXPECT_EQ(watch.percent_of_reducer(2), 50u);
  EXPECT_FALSE(watch.may_try_less());
  // From time to time, as of any that is slow.
  EXPECT_EQ(look(90, 2, WaitWatch::kFirstTrial), WaitWatch::kFirstTrial);
  EXPECT_FALSE(watch.trial()->has_less);
  EXPECT_EQ(look(50, 2), Rates({{0, 256}, {1, 256}, {2, 128}, {3, 256}}));
}

TEST_F(WaitWatchTest, TriesEverMoreRarelyToGiveLessWhereRoundsAreNoFaster) {
  for (int looks = WaitWatch::kFirstTrial; looks <= 4 * WaitWatch::kLastTrial; looks *= 2) {
    const int expected = std::min(looks, WaitWatch::kLastTrial);
    EXPECT_EQ(look(100, 1, expected), expected);
    EXPECT_EQ(planned[1], 128u);
    EXPECT_EQ(look(120, 1, kLooks), kLooks);
    EXPECT_EQ(planned[1], 256u);
    EXPECT_EQ(watch.percent_of_reducer(1), 0u);
  }
}

// By such a plan a round takes longer, so that it seems to be on time.
TEST_F(WaitWatchTest, TakesATrialBackThatOnlySeemsToHelp) {
  EXPECT_EQ(look(100, 1, WaitWatch::kFirstTrial), WaitWatch::kFirstTrial);
  planned_time *= 2;
  EXPECT_EQ(look(100, 1, kLooks), kLooks);
  EXPECT_EQ(planned[1], 256u);
}

TEST_F(WaitWatchTest, EndsATrialInTheNextView) {
  EXPECT_EQ(look(100, 1, WaitWatch::kFirstTrial), WaitWatch::kFirstTrial);
  EXPECT_EQ(planned[1], 128u);
  watch.begin_anew();
  planned.erase(3);
  EXPECT_EQ(look(100, {}), Rates({{0, 256}, {1, 256}, {2, 256}}));
  EXPECT_EQ(watch.percent_of_reducer(1), 0u);
}

// How fast dedicated ones are, the start tells.
TEST_F(WaitWatchTest, GivesNoDedicatedReducerLessWhileRoundsAreAsFastAsEver) {
  is_inside = false;
  EXPECT_EQ(look(100, 1, 5000), 0);
}

TEST_F(WaitWatchTest, GivesNobodyLessWhereOthersWaitForAnotherNowAndThen) {
  for (uint32_t turn = 0; turn < 50; ++turn) {
    EXPECT_EQ(look(100, 1, kLooks - 1), 0);
    EXPECT_EQ(look(100, turn % 2 == 0 ? Awaited() : Awaited(2)), Rates());
  }
}

TEST_F(WaitWatchTest, FollowsNobodyWhereOthersWaitForNoneOrForAnotherEachTime) {
  EXPECT_EQ(look(100, {}, 2), 0);
  EXPECT_EQ(look(50, {}, 50), 0);
  for (uint32_t turn = 0; turn < 50; ++turn) EXPECT_EQ(look(50, turn % 2, 1), 0);
}

TEST_F(WaitWatchTest, WaitsForAWordOfEachWorker) {
  EXPECT_FALSE(watch.add(1, {0, 1, {}, {1, 1, 1, -1}}));
  EXPECT_FALSE(watch.add(1, {0, 1, {}, {1, 1, 1, -1}}));
  EXPECT_TRUE(watch.add(0, {0, 1, {}, {1, 1, 1, -1}}));
}

TEST_F(WaitWatchTest, KnowsForWhichReducerMostWorkersWait) {
  EXPECT_TRUE(tell(50, 2, 2));
  EXPECT_EQ(watch.awaited_reducer(), Awaited(2));
  EXPECT_TRUE(tell(50, 2, 3));
  EXPECT_EQ(watch.awaited_reducer(), Awaited());
  EXPECT_TRUE(tell(50, 2, -1));
  EXPECT_EQ(watch.awaited_reducer(), Awaited());
  EXPECT_TRUE(tell(50, 9, 9));
  EXPECT_EQ(watch.awaited_reducer(), Awaited()) << "no reducer of the view";
}

TEST_F(WaitWatchTest, FollowsFurtherWhereTheFirstWordWasTooHigh) {
  EXPECT_EQ(look(100, {}, 2), 0);
  EXPECT_EQ(look(40, 2, kLooks), kLooks);
  EXPECT_EQ(look(60, 2, kLooks), kLooks);
  EXPECT_EQ(planned, Rates({{0, 256}, {1, 256}, {2, 61}, {3, 256}}));
}

// Some reducer is always the last one. A program that sends in another way may be slower, and no plan helps there.
TEST_F(WaitWatchTest, TakesBackWhatDoesNotHelp) {
  EXPECT_EQ(look(100, {}, 2), 0);
  EXPECT_EQ(look(60, 2, kLooks), kLooks);
  EXPECT_EQ(look(62, 2, kLooks - 1), 0);
  EXPECT_EQ(look(62, 2), Rates({{0, 256}, {1, 256}, {2, 256}, {3, 256}}));
  EXPECT_EQ(watch.percent_of_reducer(2), 0u);
  EXPECT_EQ(look(60, {}, 50), 0) << "that is the pace now";
  EXPECT_EQ(look(30, 1, kLooks), kLooks);
  EXPECT_EQ(planned, Rates({{0, 256}, {1, 128}, {2, 256}, {3, 256}}));
}

// The plan does not wait for it, so that a trial has to tell.
TEST_F(WaitWatchTest, TriesWhetherItIsAsFastAsBefore) {
  EXPECT_EQ(look(100, {}, 2), 0);
  EXPECT_EQ(look(50, 2, kLooks), kLooks);
  EXPECT_EQ(look(100, {}, WaitWatch::kFirstTrial - 1), 0);
  EXPECT_EQ(look(100, {}), Rates({{0, 256}, {1, 256}, {2, 256}, {3, 256}}));
  EXPECT_EQ(look(100, {}, 5000), 0);
  EXPECT_EQ(watch.percent_of_reducer(2), 0u);
  EXPECT_EQ(look(50, 2, kLooks), kLooks) << "and then it is slow again";
  EXPECT_EQ(look(100, {}, WaitWatch::kFirstTrial), WaitWatch::kFirstTrial);
}

// As where its worker was slower than all others in any plan.
TEST_F(WaitWatchTest, TriesAtOnceWhenRoundsAreFasterThanByThePlan) {
  EXPECT_EQ(look(100, {}, 2), 0);
  EXPECT_EQ(look(25, 2, kLooks), kLooks);
  EXPECT_EQ(look(100, {}, 2), 0);
  EXPECT_TRUE(tell(100, -1, -1));
  const double usual = watch.pace();
  watch.end_look({}, false);
  EXPECT_TRUE(tell(240, -1, -1));
  EXPECT_EQ(watch.pace(), usual) << "or later rounds would seem slow, for good";
  EXPECT_TRUE(watch.end_look({}, false).has_value());
  planned[2] = 256;
  EXPECT_EQ(look(90, {}, 50), 0) << "as fast as the first plan was";
  EXPECT_EQ(watch.percent_of_reducer(2), 0u);
}

TEST_F(WaitWatchTest, TakesATrialBackAtOnceAndTriesEverMoreRarely) {
  EXPECT_EQ(look(100, {}, 2), 0);
  EXPECT_EQ(look(50, 2, kLooks), kLooks);
  for (int looks = WaitWatch::kFirstTrial; looks <= 4 * WaitWatch::kLastTrial; looks *= 2) {
    const int expected = std::min(looks, WaitWatch::kLastTrial);
    EXPECT_EQ(look(100, {}, expected), expected);
    EXPECT_EQ(look(50, {}), Rates({{0, 256}, {1, 256}, {2, 128}, {3, 256}}));
  }
}

TEST_F(WaitWatchTest, TriesOneAfterTheOther) {
  EXPECT_EQ(look(100, {}, 2), 0);
  EXPECT_EQ(look(50, 2, kLooks), kLooks);
  EXPECT_EQ(look(100, {}, 1), 0);
  EXPECT_EQ(look(50, 1, kLooks), kLooks);
  EXPECT_EQ(planned, Rates({{0, 256}, {1, 128}, {2, 128}, {3, 256}}));
  EXPECT_EQ(look(100, {}, WaitWatch::kFirstTrial), WaitWatch::kFirstTrial);
  EXPECT_EQ(planned, Rates({{0, 256}, {1, 256}, {2, 128}, {3, 256}}));
  EXPECT_EQ(look(50, 1), Rates({{0, 256}, {1, 128}, {2, 128}, {3, 256}}));
  EXPECT_EQ(look(100, {}, 2 * WaitWatch::kFirstTrial), 2 * WaitWatch::kFirstTrial);
  EXPECT_EQ(planned, Rates({{0, 256}, {1, 128}, {2, 256}, {3, 256}}));
}

// The plan of a view begins with the rates that were followed before.
TEST_F(WaitWatchTest, KnowsWhoIsSlowInTheNextView) {
  EXPECT_EQ(look(100, {}, 2), 0);
  EXPECT_EQ(look(50, 2, kLooks), kLooks);
  watch.begin_anew();
  planned.erase(3);
  EXPECT_EQ(look(90, {}, WaitWatch::kFirstTrial - 1), 0);
  EXPECT_EQ(look(90, {}), Rates({{0, 256}, {1, 256}, {2, 256}}));
}

}  // namespace
}  // namespace jaxhetero
