#include "xla_ffi/wire/op_spec.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/cc/printing.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/reduce.h"

namespace jaxhetero {
namespace {

constexpr uint32_t kWorkers = 3;
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

// How often each element of a chunk is pushed and answered, over all ranks, whatever the chunk.
TEST_P(EveryKind, MovesWhatItMust) {
  const OpSpec spec = spec_of(GetParam());
  for (uint64_t offset = 0; offset <= kTotal; ++offset) {
    for (uint64_t count = 0; offset + count <= kTotal; ++count) {
      const Range chunk{offset, count};
      std::vector<uint32_t> pushed(kTotal);
      std::vector<uint32_t> has(kTotal);  // of its result, before or after the answer
      const auto add = [](std::vector<uint32_t>& to, const Range& part) {
        for (uint64_t i = 0; i < part.count; ++i) ++to[part.offset + i];
      };
      for (uint32_t rank = 0; rank < kWorkers; ++rank) {
        const Stake stake = stake_of(spec, kWorkers, rank);
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

}  // namespace
}  // namespace jaxhetero
