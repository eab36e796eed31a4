#include "xla_ffi/membership/rate_watch.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

using Rates = std::map<uint32_t, uint32_t>;

// Two workers and four reducers, whose links carry what a test says.
class Watch {
 public:
  // Both workers report a look: by reducer, what the links carry, and what the plan has for them. Returns the rates to
  // follow; empty: none.
  Rates look(const std::vector<uint64_t>& carried, const std::vector<uint32_t>& planned = {16, 16, 16, 16}) {
    Rates rates;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      Goodput goodput{0, 1, {}};
      for (uint32_t reducer = 0; reducer < carried.size(); ++reducer) {
        goodput.links.push_back({reducer, planned[reducer], 1000 * carried[reducer], 1000});
      }
      const auto found = watch.note(rank, goodput);
      for (const NewRates::Rate& rate : found.value_or(std::vector<NewRates::Rate>())) rates[rate.reducer] = rate.rate;
    }
    return rates;
  }

  RateWatch watch{2};
};

TEST(RateWatch, FollowsWhatIsOffInFourLooks) {
  Watch watch;
  for (int look = 0; look < 3; ++look) EXPECT_EQ(watch.look({100, 50, 100, 98}), Rates());
  EXPECT_EQ(watch.look({100, 50, 100, 98}), Rates({{0, 256}, {1, 128}, {2, 256}, {3, 256}}));
  EXPECT_EQ(watch.watch.percent_of_reducer(1), 50u);
}

TEST(RateWatch, FollowsTheWayBack) {
  Watch watch;
  const std::vector<uint32_t> planned = {256, 128, 256, 256};
  for (int look = 1; look < RateWatch::kLooks; ++look) EXPECT_EQ(watch.look({100, 95, 98, 99}, planned), Rates());
  EXPECT_EQ(watch.look({100, 95, 98, 99}, planned), Rates({{0, 256}, {1, 256}, {2, 256}, {3, 256}}));
}

TEST(RateWatch, FollowsTheWayBackOfOneOfTwo) {
  Watch watch;
  for (int look = 1; look < RateWatch::kLooks; ++look) EXPECT_EQ(watch.look({100, 95}, {256, 64}), Rates());
  EXPECT_EQ(watch.look({100, 95}, {256, 64}), Rates({{0, 256}, {1, 256}}));
}

TEST(RateWatch, BeginsAnewWithTheNextPlan) {
  Watch watch;
  for (int look = 0; look < RateWatch::kLooks; ++look) watch.look({100, 50, 100, 100});
  for (int look = 0; look < 9; ++look) EXPECT_EQ(watch.look({100, 50, 100, 100}, {256, 128, 256, 256}), Rates());
}

TEST(RateWatch, LeavesThePlanForAMomentsTrouble) {
  Watch watch;
  for (int turn = 0; turn < 9; ++turn) {
    for (int look = 0; look < 3; ++look) EXPECT_EQ(watch.look({100, 50, 100, 100}), Rates());
    EXPECT_EQ(watch.look({100, 90, 100, 100}), Rates());
  }
}

TEST(RateWatch, LeavesThePlanForALittle) {
  Watch watch;
  for (int look = 0; look < 9; ++look) EXPECT_EQ(watch.look({100, 85, 90, 100}), Rates());
}

// As when a worker is slow, for which all wait.
TEST(RateWatch, LeavesThePlanWhereAllAreSlower) {
  Watch watch;
  for (int look = 0; look < 9; ++look) EXPECT_EQ(watch.look({50, 50, 49, 51}), Rates());
}

// Its links share what it carries, and one is ahead of the others.
TEST(RateWatch, LeavesThePlanWhereOneIsAheadOfAllOthers) {
  Watch watch;
  for (int look = 0; look < 9; ++look) EXPECT_EQ(watch.look({71, 70, 100, 72}), Rates());
  for (int look = 0; look < 9; ++look) EXPECT_EQ(watch.look({71, 35, 100, 72}, {16, 8, 16, 16}), Rates());
}

TEST(RateWatch, FollowsHalfOfTheReducers) {
  Watch watch;
  for (int look = 1; look < RateWatch::kLooks; ++look) EXPECT_EQ(watch.look({50, 50, 100, 100}), Rates());
  EXPECT_EQ(watch.look({50, 50, 100, 100}), Rates({{0, 128}, {1, 128}, {2, 256}, {3, 256}}));
}

TEST(RateWatch, WaitsForAllWorkers) {
  RateWatch watch(2);
  const Goodput goodput{0, 100, {{0, 16, 100, 10}, {1, 16, 10, 10}}};
  for (int look = 0; look < 9; ++look) EXPECT_FALSE(watch.note(1, goodput).has_value());
}

TEST(RateWatch, KeepsWhatThePlanHasForThoseThatAreNotOff) {
  Watch watch;
  const std::vector<uint32_t> planned = {16, 16, 16, 12};
  for (int look = 1; look < RateWatch::kLooks; ++look) watch.look({100, 50, 84, 70}, planned);
  EXPECT_EQ(watch.look({100, 50, 70, 70}, planned), Rates({{0, 256}, {1, 137}, {2, 256}, {3, 192}}));
}

}  // namespace
}  // namespace jaxhetero
