#include "xla_ffi/wire/state_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "tests/cc/printing.h"
#include "xla_ffi/base/status.h"

namespace jaxhetero {
namespace {

using Member = StatePlan::Member;

std::vector<Member> members_of(uint32_t count) {
  std::vector<Member> members;
  for (uint32_t number = 0; number < count; ++number) members.push_back({number, 0, "host", 4000, 1});
  return members;
}

// Of every so many elements of a bucket: who keeps it, and who backs it up. Shares begin at multiples of 16.
constexpr uint64_t kStep = 16;
struct Keepers {
  std::vector<uint32_t> owner;
  std::vector<std::vector<uint32_t>> backups;
};

Keepers keepers(const StatePlan& plan, uint64_t number, uint64_t count) {
  const uint64_t samples = (count + kStep - 1) / kStep;
  Keepers found{std::vector<uint32_t>(samples), std::vector<std::vector<uint32_t>>(samples)};
  const auto for_each_sample = [](const Range& part, const auto& visit) {
    for (uint64_t i = (part.offset + kStep - 1) / kStep; i * kStep < part.offset + part.count; ++i) visit(i);
  };
  uint64_t covered = 0;
  std::map<uint32_t, int> parts;
  std::optional<uint64_t> end;
  for (const StateShare& share : plan.cut(number, count)) {
    EXPECT_EQ(share.part.offset, end.value_or(share.part.offset) % count) << "shares follow each other in the ring";
    EXPECT_EQ(++parts[share.reducer], 1) << "a reducer has one part";
    end = share.part.offset + share.part.count;
    covered += share.part.count;
    const std::vector<Range> ranges = unwrapped(share.part, count);
    for (const Range& range : ranges) for_each_sample(range, [&](uint64_t i) { found.owner[i] = share.reducer; });
    for (const StateShare::Backup& backup : share.backups) {
      EXPECT_NE(backup.reducer, share.reducer);
      EXPECT_TRUE(std::ranges::any_of(ranges, [&](const Range& r) { return overlap(backup.part, r) == backup.part; }));
      for_each_sample(backup.part, [&](uint64_t i) { found.backups[i].push_back(backup.reducer); });
    }
  }
  EXPECT_EQ(covered, count);
  return found;
}

constexpr uint64_t kCounts[] = {1, 15, 5000, 16'384, 50'003};

TEST(StatePlan, EveryElementHasAnOwnerAndABackup) {
  for (uint32_t reducers = 1; reducers < 9; ++reducers) {
    const StatePlan plan(members_of(reducers));
    for (const uint64_t count : kCounts) {
      for (const std::vector<uint32_t>& backups : keepers(plan, count, count).backups) {
        ASSERT_EQ(backups.size(), reducers > 1 ? 1u : 0u);
      }
    }
  }
}

// Reducers compute the same part of their shares at one time. Whichever that is, each backs up one share.
TEST(StatePlan, EveryReducerBacksUpOneShareAtATime) {
  for (const uint32_t reducers : {2, 3, 8}) {
    constexpr uint64_t kShare = 1024;  // samples
    const Keepers found = keepers(StatePlan(members_of(reducers)), 1, kShare * kStep * reducers);
    // 3 reducers' shares differ by a sample.
    for (uint64_t sample = 1; sample + 1 < kShare; ++sample) {
      if (sample / 2 * 2 == kShare / 2) continue;
      std::vector<int> backed_up(reducers);
      for (uint32_t reducer = 0; reducer < reducers; ++reducer) {
        ++backed_up[found.backups[reducer * kShare + sample][0]];
      }
      EXPECT_EQ(backed_up, std::vector<int>(reducers, 1)) << sample;
    }
  }
}

TEST(StatePlan, SharesAreAsUnequalAsItIsTold) {
  std::vector<Member> members = members_of(3);
  members[1].share = 2;
  members[2].share = 0;
  const std::vector<StateShare> shares = StatePlan(members).cut(1, 96'000);
  ASSERT_EQ(shares.size(), 2u);
  EXPECT_EQ(shares[0].part, (Range{0, 31'984}));
  EXPECT_EQ(shares[1].reducer, 1u);
}

// Whoever is lost, in whatever order: what it had goes to who backs it up.
TEST(StatePlan, WhatIsLostIsWithItsBackups) {
  std::mt19937 random(1);
  for (int run = 0; run < 30; ++run) {
    std::vector<Member> members = members_of(2 + random() % 7);
    StatePlan plan(members);
    uint32_t view = 0;
    while (members.size() > 1) {
      std::map<uint64_t, Keepers> before;
      for (const uint64_t count : kCounts) before[count] = keepers(plan, count, count);
      const size_t victim = random() % members.size();
      const uint32_t lost = members[victim].number;
      members.erase(members.begin() + static_cast<ptrdiff_t>(victim));
      plan.enter(members, false);
      ++view;
      for (const uint64_t count : kCounts) {
        const Keepers after = keepers(plan, count, count);
        for (uint64_t i = 0; i < after.owner.size(); ++i) {
          const uint32_t owner = before[count].owner[i];
          ASSERT_EQ(after.owner[i], owner == lost ? before[count].backups[i][0] : owner) << "element " << i;
        }
      }
    }
  }
}

// It backs up what it will have, and has it once it is settled; then the shares are as even as they were.
TEST(StatePlan, AReducerThatJoinsGetsAShare) {
  for (uint32_t lost = 0; lost < 4; ++lost) {
    std::vector<Member> members = members_of(4);
    StatePlan plan(members);
    std::erase_if(members, [lost](const Member& member) { return member.number == lost; });
    plan.enter(members, false);
    const Member comer{lost, 2, "elsewhere", 5000};
    members.push_back(comer);
    plan.enter(members, false);
    ASSERT_EQ(plan.candidates().size(), 1u);
    EXPECT_EQ(plan.find(lost)->port, 5000);
    for (const uint64_t count : kCounts) {
      const Keepers before = keepers(plan, count, count);
      StatePlan settled = plan;
      settled.enter(members, true);
      EXPECT_TRUE(settled.candidates().empty());
      const Keepers after = keepers(settled, count, count);
      uint64_t moved = 0;
      for (uint64_t i = 0; i < after.owner.size(); ++i) {
        if (after.owner[i] == before.owner[i]) continue;
        ASSERT_EQ(after.owner[i], lost);
        ASSERT_TRUE(std::ranges::count(before.backups[i], lost)) << "it had it already";
        ++moved;
      }
      if (count > 50'000) {
        EXPECT_NEAR(static_cast<double>(moved) / static_cast<double>(after.owner.size()), 0.25, 0.09);
      }
    }
  }
}

// Losses and joins in any order; nobody is ever to keep what it had not got. But what an owner alone had is lost.
TEST(StatePlan, NothingMovesToWhoLacksIt) {
  std::mt19937 random(3);
  for (int run = 0; run < 60; ++run) {
    std::vector<Member> members = members_of(2 + random() % 4);
    for (Member& member : members) member.share = 1 + random() % 5;
    StatePlan plan(members);
    for (uint32_t view = 1; view < 12; ++view) {
      std::map<uint64_t, Keepers> before;
      for (const uint64_t count : {5000, 20'000}) before[count] = keepers(plan, count, count);
      const bool settled = random() % 2 == 0;
      std::optional<uint32_t> lost;
      if (members.size() > 2 && random() % 2 == 0) {
        const size_t victim = random() % members.size();
        lost = members[victim].number;
        members.erase(members.begin() + static_cast<ptrdiff_t>(victim));
      } else if (members.size() < 7) {
        members.push_back({100 + view, view, "host", 4000});
      }
      const bool was_alone = plan.owners().size() == 1;
      plan.enter(members, settled);
      EXPECT_TRUE(decode_state_plan(encode(plan)).ok()) << "shares without gaps";
      for (const auto& [count, old] : before) {
        const Keepers now = keepers(plan, count, count);
        for (uint64_t i = 0; i < now.owner.size(); ++i) {
          const bool had_it = now.owner[i] == old.owner[i] || std::ranges::count(old.backups[i], now.owner[i]) > 0;
          ASSERT_TRUE(had_it || (lost.has_value() && was_alone)) << "element " << i << " of " << count;
        }
      }
    }
  }
}

// Those that had something are all gone.
TEST(StatePlan, BeginsAnewWithOthers) {
  StatePlan plan(members_of(1));
  const std::vector<Member> others = {{7, 3, "host", 4000}, {8, 4, "host", 4000}};
  plan.enter(others, false);
  EXPECT_EQ(plan.owners().size(), 2u);
}

// Reducers that have no share at the start, as those inside workers may, get none because another one is lost.
TEST(StatePlan, WhoHasNothingAtTheStartGetsNothing) {
  std::vector<Member> members = members_of(3);
  members[2].share = 0;
  StatePlan plan(members);
  members.erase(members.begin());
  plan.enter(members, false);
  EXPECT_TRUE(plan.candidates().empty());
}

// One that takes a lost one's number is not that one.
TEST(StatePlan, ANumberIsNoReducer) {
  std::vector<Member> members = members_of(3);
  StatePlan plan(members);
  members[1].since = 2;
  plan.enter(members, false);
  EXPECT_EQ(plan.owners().size(), 2u);
  ASSERT_EQ(plan.candidates().size(), 1u);
  EXPECT_EQ(plan.candidates()[0].member.since, 2u);
}

TEST(StatePlan, ACandidateThatIsLostChangesNothing) {
  std::vector<Member> members = members_of(3);
  StatePlan plan(members);
  const StatePlan before = plan;
  members.push_back({3, 1, "host", 4000});
  plan.enter(members, false);
  members.pop_back();
  plan.enter(members, true);
  EXPECT_EQ(plan, before);
}

TEST(StatePlan, ComesBackAsItWas) {
  std::vector<Member> members = members_of(3);
  StatePlan plan(members);
  members.push_back({3, 1, "host", 4000});
  plan.enter(members, false);
  const Bytes bytes = encode(plan);
  Result<StatePlan> again = decode_state_plan(bytes);
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(encode(*again), bytes);
  EXPECT_EQ(again->cut(1, 100'000).size(), plan.cut(1, 100'000).size());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(decode_state_plan(std::span(bytes).first(size)).status().code(), Code::kProtocol) << size;
  }
  std::mt19937 random(2);
  for (int run = 0; run < 3000; ++run) {
    Bytes damaged = bytes;
    damaged[random() % damaged.size()] = static_cast<std::byte>(random());
    Result<StatePlan> plan_of_damaged = decode_state_plan(damaged);
    if (plan_of_damaged.ok()) {
      for (const StateShare& share : plan_of_damaged->cut(random(), 100'000)) {
        ASSERT_LE(share.part.offset, 100'000u);
        ASSERT_LE(share.part.count, 100'000u);
        for (const StateShare::Backup& backup : share.backups) {
          ASSERT_EQ(overlap(backup.part, {0, 100'000}), backup.part);
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxhetero
