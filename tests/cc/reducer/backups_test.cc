#include "xla_ffi/reducer/backups.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "tests/cc/printing.h"
#include "xla_ffi/reducer/kept_states.h"
#include "xla_ffi/wire/state_plan.h"

namespace jaxhetero {
namespace {

using Stamp = KeptState::Stamp;

TEST(KeptState, KnowsHowFarItsElementsAre) {
  KeptState state(100, 2, true);
  EXPECT_FALSE(state.runs({0, 1})[0].stamp.has_value());
  state.stamp({10, 20}, {1, 7, 0});
  state.stamp({30, 20}, {1, 7, 0});
  state.stamp({20, 5}, {2, 7, 1});
  const std::vector<KeptState::Run> runs = state.runs({5, 30});
  ASSERT_EQ(runs.size(), 4u);
  EXPECT_EQ(runs[0].range, (Range{5, 5}));
  EXPECT_FALSE(runs[0].stamp.has_value());
  EXPECT_EQ(runs[1].range, (Range{10, 10}));
  EXPECT_EQ(runs[2].range, (Range{20, 5}));
  EXPECT_EQ(runs[2].stamp, (Stamp{2, 7, 1}));
  EXPECT_EQ(runs[3].range, (Range{25, 10}));
  state.stamp({20, 5}, {1, 7, 0});
  EXPECT_EQ(state.runs({10, 40}).size(), 1u) << "runs that are equally far are one";
  state.stamp({0, 100}, {3, 7, 2});
  EXPECT_EQ(state.runs({0, 100}).size(), 1u);
}

TEST(KeptState, IsZeroWhereNothingWasWritten) {
  KeptState state(1000, 3, true);
  EXPECT_EQ(state.slot(2, {10, 5})[4], 0.0f);
  state.slot(0, {10, 1})[0] = 1;
  state.slot(1, {10, 1})[0] = 2;
  state.clear_states({0, 11});
  EXPECT_EQ(state.slot(0, {10, 1})[0], 1.0f);
  EXPECT_EQ(state.slot(1, {10, 1})[0], 0.0f);
}

constexpr uint64_t kCount = 64'000;

StatePlan plan_of(const std::vector<uint32_t>& numbers) {
  std::vector<StatePlan::Member> members;
  for (const uint32_t number : numbers) members.push_back({number, 0, "host", 4000, 1});
  return StatePlan(members);
}

// Reducer 1 of 3 has the second third; its neighbours back up a half each.
struct OneOfThree : testing::Test {
  OneOfThree() : state(*states.open(5, kCount, 2, true)) { backups.enter(plan_of({0, 1, 2}), states); }

  // Copies all that is to be copied; how many elements that were.
  uint64_t copy_all() {
    uint64_t count = 0;
    while (const std::optional<Backups::Copy> copy = backups.next_to_copy(states, 5000)) {
      EXPECT_LE(copy->part.count, 5000u);
      backups.note(*copy);
      count += copy->part.count;
    }
    return count;
  }

  KeptStates states;
  KeptState& state;
  Backups backups{1};
  Range own = {21'328, 21'328};
};

TEST_F(OneOfThree, CopiesWhatItHasToItsNeighbours) {
  EXPECT_FALSE(backups.next_to_copy(states, 5000).has_value()) << "nothing is kept yet";
  state.stamp({0, kCount}, {1, 1, 1});
  EXPECT_TRUE(backups.copied(5, state, own).empty());
  EXPECT_EQ(copy_all(), own.count);
  const std::vector<Backups::Copy> copied = backups.copied(5, state, own);
  ASSERT_EQ(copied.size(), 2u);
  EXPECT_EQ(copied[0].reducer, 0u);
  EXPECT_EQ(copied[1].reducer, 2u);
  EXPECT_EQ(copied[0].part.count + copied[1].part.count, own.count);
}

TEST_F(OneOfThree, BacksUpWhatHasBeenCopiedAndNothingElse) {
  state.stamp(own, {1, 1, 1});
  const std::optional<Backups::Copy> first = backups.next_to_copy(states, 5000);
  backups.note(*first);
  const std::vector<Backups::Copy> copied = backups.copied(5, state, own);
  ASSERT_EQ(copied.size(), 1u);
  EXPECT_EQ(copied[0].part, first->part);
  backups.note({first->reducer, 5, {first->part.offset + 6000, 100}});
  EXPECT_EQ(backups.copied(5, state, own)[0].part, first->part) << "behind a gap";
}

TEST(KeptState, UndoesItsLatestUpdate) {
  KeptState state(100, 2, true, true);
  EXPECT_TRUE(state.can_undo());
  EXPECT_FALSE(KeptState(100, 2, true).can_undo());
  state.slot(0, {10, 1})[0] = 1;
  state.slot(1, {10, 1})[0] = 2;
  ASSERT_TRUE(state.note_earlier({10, 2}));
  state.slot(0, {10, 2})[1] = state.slot(0, {10, 1})[0] = 3;
  state.slot(1, {10, 1})[0] = 4;
  state.undo({10, 2});
  EXPECT_EQ(state.slot(0, {10, 1})[0], 1.0f);
  EXPECT_EQ(state.slot(0, {10, 2})[1], 0.0f);
  EXPECT_EQ(state.slot(1, {10, 1})[0], 2.0f);
}

// A view of an elastic job has ended while a copy was under way.
TEST_F(OneOfThree, CopiesAgainWhatMayNotHaveCome) {
  state.stamp(own, {1, 1, 1});
  const std::optional<Backups::Copy> first = backups.next_to_copy(states, 5000);
  backups.note(*first);
  const std::optional<Backups::Copy> second = backups.next_to_copy(states, 5000);
  backups.note(*second);
  backups.take_back(*second);
  EXPECT_EQ(backups.copied(5, state, own)[0].part, first->part);
  EXPECT_EQ(backups.next_to_copy(states, 5000)->part, second->part);
}

TEST_F(OneOfThree, CopiesAgainToANewNeighbour) {
  state.stamp({0, kCount}, {1, 1, 1});
  copy_all();
  backups.enter(plan_of({0, 1, 2}), states);
  EXPECT_EQ(copy_all(), 0u) << "nothing has changed";
  backups.forget(2);
  backups.enter(plan_of({0, 1, 3}), states);
  const uint64_t half = own.count - backups.copied(5, state, own)[0].part.count;
  EXPECT_EQ(copy_all(), half) << "what reducer 0 has is not sent again";
}

TEST_F(OneOfThree, BacksUpNothingWhereNobodyWantsIt) {
  KeptState& other = *states.open(6, kCount, 2, false);
  other.stamp({0, kCount}, {1, 1, 1});
  EXPECT_EQ(copy_all(), 0u);
  EXPECT_TRUE(backups.assigned(6, other, own).empty());
}

}  // namespace
}  // namespace jaxhetero
