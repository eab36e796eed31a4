#include "xla_ffi/wire/op_spec.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/cc/printing.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/reduce.h"

namespace jaxhetero {
namespace {

constexpr uint32_t kWorkers = 3;  // that take part
constexpr uint64_t kRow = 5;
constexpr uint64_t kTotal = kWorkers * kRow;

OpSpec spec_of(Kind kind) { return {kind, DType::kF32, kind == Kind::kBroadcast ? 1u : 0u, 1, kTotal, 0}; }

TEST(Overlap, IsInBoth) {
  EXPECT_EQ(overlap({2, 5}, {0, 10}), (Range{2, 5}));
  EXPECT_EQ(overlap({2, 5}, {4, 10}), (Range{4, 3}));
  EXPECT_EQ(overlap({2, 5}, {0, 4}), (Range{2, 2}));
  EXPECT_EQ(overlap({2, 5}, {3, 1}), (Range{3, 1}));
  for (const Range& other : {Range{0, 2}, Range{7, 3}, Range{4, 0}, Range{}}) {
    EXPECT_EQ(overlap({2, 5}, other), (Range{2, 0}));
  }
  EXPECT_EQ(overlap({2, 0}, {0, 10}), (Range{2, 0}));
}

class EveryKind : public testing::TestWithParam<Kind> {};

// How often each element of a chunk is pushed and answered, over all members, whatever the chunk.
void expect_to_move_what_it_must(const OpSpec& spec, uint32_t worker_count) {
  for (uint64_t offset = 0; offset <= kTotal; ++offset) {
    for (uint64_t count = 0; offset + count <= kTotal; ++count) {
      const Range chunk{offset, count};
      std::vector<uint32_t> pushed(kTotal);
      std::vector<uint32_t> has(kTotal);  // of its result, before or after the answer
      const auto add = [](std::vector<uint32_t>& to, const Range& part) {
        for (uint64_t i = 0; i < part.count; ++i) ++to[part.offset + i];
      };
      for (uint32_t place = 0; place < spec.member_count(worker_count); ++place) {
        const Stake stake = stake_of(spec, worker_count, spec.rank_at(place));
        for (const Range& part : {stake.pushed(chunk), stake.answered(chunk)}) {
          ASSERT_EQ(overlap(part, chunk), part) << "it lies in the chunk";
        }
        add(pushed, stake.pushed(chunk));
        add(has, stake.is_own(chunk) ? chunk : stake.answered(chunk));
      }
      for (uint64_t i = offset; i < offset + count; ++i) {
        ASSERT_EQ(pushed[i], passes_on(spec.kind) ? 1 : kWorkers);
        ASSERT_EQ(has[i], spec.kind == Kind::kScatter ? 1 : kWorkers);
      }
    }
  }
}

TEST_P(EveryKind, MovesWhatItMust) { expect_to_move_what_it_must(spec_of(GetParam()), kWorkers); }

TEST_P(EveryKind, MovesInAGroupWhatItMust) {
  OpSpec spec = spec_of(GetParam());
  spec.group = {1, 4, 6};
  expect_to_move_what_it_must(spec, 8);
}

INSTANTIATE_TEST_SUITE_P(All, EveryKind,
                         testing::Values(Kind::kSum, Kind::kBroadcast, Kind::kMax, Kind::kMin, Kind::kScatter,
                                         Kind::kGather),
                         [](const auto& info) { return std::to_string(static_cast<int>(info.param)); });

TEST(Stake, OfAScatterIsTheRowOfTheRank) {
  const Stake stake = stake_of(spec_of(Kind::kScatter), kWorkers, 2);
  EXPECT_EQ(stake.operands, (Range{0, kTotal}));
  EXPECT_EQ(stake.results, (Range{10, 5}));
  EXPECT_EQ(stake.answered({8, 4}), (Range{10, 2}));
  EXPECT_EQ(stake.answered({0, 10}).count, 0u);
}

// What lies in two rows comes back whole: parts of it on both sides of the own row would be two payloads.
TEST(Stake, OfAGatherNeedsNoAnswerForTheOwnRow) {
  const Stake stake = stake_of(spec_of(Kind::kGather), kWorkers, 1);
  EXPECT_EQ(stake.operands, (Range{5, 5}));
  EXPECT_EQ(stake.answered({5, 5}).count, 0u);
  EXPECT_EQ(stake.answered({6, 2}).count, 0u);
  EXPECT_EQ(stake.answered({4, 7}), (Range{4, 7}));
  EXPECT_EQ(stake.answered({0, 5}), (Range{0, 5}));
}

TEST(Check, WantsARowForEachWorker) {
  for (const Kind kind : {Kind::kScatter, Kind::kGather}) {
    EXPECT_TRUE(check(spec_of(kind), kWorkers).ok());
    EXPECT_EQ(check(spec_of(kind), 4).code(), Code::kProtocol);
  }
  EXPECT_TRUE(check(spec_of(Kind::kSum), 4).ok());
  EXPECT_EQ(check(spec_of(Kind::kBroadcast), 1).code(), Code::kProtocol) << "the root is rank 1";
}

TEST(Group, KnowsItsMembersAndTheirPlaces) {
  OpSpec spec = spec_of(Kind::kSum);
  EXPECT_EQ(spec.member_count(4), 4u);
  EXPECT_TRUE(spec.has_member(3));
  EXPECT_EQ(spec.place_of(3), 3u);
  spec.group = {1, 4, 6};
  EXPECT_EQ(spec.member_count(8), 3u);
  for (uint32_t place = 0; place < 3; ++place) EXPECT_EQ(spec.place_of(spec.rank_at(place)), place);
  for (const uint32_t rank : {0u, 2u, 3u, 5u, 7u}) EXPECT_FALSE(spec.has_member(rank));
}

TEST(Group, HasRowsForItsMembersAlone) {
  OpSpec spec = spec_of(Kind::kGather);
  spec.group = {1, 4, 6};
  EXPECT_TRUE(check(spec, 8).ok());
  EXPECT_EQ(stake_of(spec, 8, 4).operands, (Range{5, 5}));
  spec.group = {1, 4};
  EXPECT_EQ(check(spec, 8).code(), Code::kProtocol) << "15 elements in 2 rows";
}

TEST(Group, IsOneOfTheJob) {
  OpSpec spec = spec_of(Kind::kBroadcast);
  spec.group = {1, 4, 6};
  EXPECT_TRUE(check(spec, 7).ok());
  EXPECT_EQ(check(spec, 6).code(), Code::kProtocol);
  spec.group = {0, 4};
  EXPECT_EQ(check(spec, 7).code(), Code::kProtocol) << "the root is rank 1";
}

TEST(Group, IsDescribedInAFewWords) {
  OpSpec spec = spec_of(Kind::kSum);
  spec.group = {1, 4, 6};
  EXPECT_EQ(describe(spec), "sum of float32[15] over ranks 1, 4, 6");
  const std::vector<uint32_t> many(100, 7);
  EXPECT_TRUE(describe_ranks(many).ends_with("7, 7 and 84 more")) << describe_ranks(many);
}

}  // namespace
}  // namespace jaxhetero
