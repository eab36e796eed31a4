#include "xla_ffi/worker/gate.h"

#include <chrono>

#include "gtest/gtest.h"

namespace jaxhetero {
namespace {

using What = Gate::Turn::What;
using std::chrono::milliseconds;

View view_of(uint32_t number, std::vector<uint32_t> ranks, std::vector<uint32_t> joining = {}) {
  View view;
  view.number = number;
  view.job.least_worker_count = 1;
  for (const uint32_t rank : ranks) view.members.push_back({rank, 0});
  view.deals = {{0, ranks}};
  view.joining = std::move(joining);
  return view;
}

std::optional<Gate::Turn> next(Gate& gate) {
  Result<std::optional<Gate::Turn>> turn = gate.wait(milliseconds(0));
  return turn.ok() ? *turn : std::nullopt;
}

bool passes(Gate& gate) {
  const std::optional<Gate::Turn> turn = next(gate);
  return turn.has_value() && turn->what == What::kPass;
}

TEST(Gate, LetsPassUnlessTheViewChanges) {
  Gate gate(0);
  EXPECT_FALSE(passes(gate));  // no view yet
  gate.enter(view_of(1, {0, 1}));
  EXPECT_TRUE(passes(gate));
  gate.halt();
  EXPECT_FALSE(passes(gate));
  EXPECT_EQ(gate.next(), 1u);
  gate.enter(view_of(2, {0}));
  EXPECT_TRUE(passes(gate));
}

TEST(Gate, DealsByTheViewFromWhichOnADealCounts) {
  Gate gate(0);
  View view = view_of(1, {0, 1});
  view.deals.push_back({1, {0}});
  gate.enter(view);
  EXPECT_EQ(next(gate)->ranks, (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(next(gate)->ranks, (std::vector<uint32_t>{0}));
}

TEST(Gate, IsPassedUpToTheMeeting) {
  Gate gate(0);
  gate.enter(view_of(1, {0, 1}));
  EXPECT_TRUE(passes(gate));
  EXPECT_EQ(gate.meet({7}), (Meeting{7, 1}));
  EXPECT_FALSE(passes(gate));
  EXPECT_EQ(gate.meet({7, 2, true}), std::nullopt);
  EXPECT_TRUE(passes(gate));
  EXPECT_EQ(next(gate)->what, What::kMeet);
  EXPECT_EQ(gate.meet(), (Meeting{7, 2, true}));
  EXPECT_FALSE(next(gate).has_value());  // said once
}

TEST(Gate, StaysClosedUntilAllHaveTheState) {
  Gate gate(0);
  gate.enter(view_of(1, {0, 1}, {1}));
  EXPECT_EQ(next(gate)->what, What::kGive);
  gate.note_given(1);
  EXPECT_FALSE(next(gate).has_value());
  gate.go({0});  // of another view
  EXPECT_FALSE(next(gate).has_value());
  gate.go({1});
  EXPECT_TRUE(passes(gate));
}

TEST(Gate, GivesOneThatComesTheStateOfTheOthers) {
  Gate gate(1);
  gate.arrive();
  View before = view_of(1, {0, 1});  // another worker has its rank still
  before.is_candidate = true;
  gate.enter(before);
  EXPECT_EQ(gate.candidacy()->view, 1u);
  View view = view_of(2, {0, 1}, {1});
  view.gate = 5;
  gate.enter(view);
  EXPECT_FALSE(gate.candidacy().has_value());
  EXPECT_EQ(next(gate)->what, What::kTake);
  EXPECT_FALSE(gate.has_state());
  EXPECT_FALSE(gate.take_state(1).has_value());  // of an earlier view
  EXPECT_EQ(gate.take_state(2)->view, 2u);
  EXPECT_FALSE(passes(gate));  // the others may not have heard
  gate.go({2});
  EXPECT_EQ(next(gate)->gate, 5u);
}

// The others give it again in the next view, as it has reported that it has none.
TEST(Gate, TakesNoStateWhileTheViewChanges) {
  Gate gate(1);
  View before = view_of(1, {0, 1});
  before.is_candidate = true;
  gate.enter(before);
  gate.enter(view_of(2, {0, 1}, {1}));
  EXPECT_EQ(next(gate)->what, What::kTake);
  gate.halt();
  EXPECT_FALSE(gate.has_state());
  EXPECT_FALSE(gate.take_state(2).has_value());
  EXPECT_FALSE(gate.has_state());
  gate.enter(view_of(3, {0, 1}, {1}));
  EXPECT_EQ(next(gate)->what, What::kTake);
  EXPECT_EQ(gate.take_state(3)->view, 3u);
  EXPECT_TRUE(gate.has_state());
}

// The coordinator is told whom the job waits for, and nobody waits without a limit.
TEST(Gate, TellsForHowLongItWaitsForOthers) {
  const auto later = [](std::chrono::seconds by) { return Gate::Clock::now() + by; };
  constexpr std::chrono::seconds kLong{3600};
  Gate gate(0);
  gate.enter(view_of(1, {0, 1}));
  gate.meet({7});
  EXPECT_FALSE(gate.delay(later(kLong)).has_value());  // the program computes
  EXPECT_FALSE(passes(gate));
  EXPECT_FALSE(gate.delay(later(kLong))->is_own);
  EXPECT_TRUE(gate.delay(later(kLong))->is_first);
  EXPECT_GE(gate.delay(later(kLong))->waited, kLong);
  gate.meet({7, 0, true});
  EXPECT_EQ(next(gate)->what, What::kMeet);
  EXPECT_FALSE(gate.delay(later(kLong)).has_value());  // its programs end
  gate.meet();
  EXPECT_FALSE(passes(gate));
  EXPECT_TRUE(gate.delay(later(kLong)).has_value());
  gate.halt();
  EXPECT_FALSE(gate.delay(later(kLong)).has_value());
}

TEST(Gate, TellsForHowLongTheProgramHasNotTakenTheState) {
  const auto later = Gate::Clock::now() + std::chrono::hours(1);
  Gate gate(1);
  View before = view_of(1, {0, 1});
  before.is_candidate = true;
  gate.enter(before);
  EXPECT_FALSE(gate.delay(later).has_value());
  gate.enter(view_of(2, {0, 1}, {1}));
  EXPECT_TRUE(gate.delay(later)->is_own);
  gate.take_state(2);
  EXPECT_FALSE(passes(gate));
  EXPECT_FALSE(gate.delay(later).has_value());  // others may still take it
}

TEST(Gate, EndsWithTheJob) {
  Gate gate(0);
  gate.enter(view_of(1, {0, 1}));
  gate.end({});
  EXPECT_EQ(next(gate)->what, What::kLeave);
  gate.end({Code::kWorkerLost, "x"});
  EXPECT_EQ(gate.wait(milliseconds(0)).status().code(), Code::kWorkerLost);
}

}  // namespace
}  // namespace jaxhetero
