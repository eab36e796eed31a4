// What a reducer refuses to a worker, and what it tells all of them when the job has failed.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tests/cc/one_reducer.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/reducer/state_machine.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {
namespace {

// What one worker does against the protocol costs it its connection; the job itself has not failed by that.
struct Misdeed {
  std::string name;
  std::function<void(FrameHeader&)> change;
  std::string word;  // of the message
};

class MisdeedTest : public ReducerTest, public testing::WithParamInterface<Misdeed> {};

TEST_P(MisdeedTest, IsRefusedForThisWorkerOnly) {
  const auto& [name, change, word] = GetParam();
  const OpSpec spec = f32_sum(kItemsPerChunk - 1);
  describe(spec);
  complete_round(0, spec);
  ASSERT_TRUE(push(0, push_header(0, spec, 0, 1)).ok());
  FrameHeader header = push_header(1, spec, 0, 1);
  change(header);
  const Status status = push(1, header, Bytes(header.payload_bytes));
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_NE(status.message().find("rank 1 (host b)"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  EXPECT_TRUE(reducer_->fault().ok());
  EXPECT_TRUE(sent_.empty());
}

INSTANTIATE_TEST_SUITE_P(
    All, MisdeedTest,
    testing::Values(
        Misdeed{"op_never_described", [](FrameHeader& h) { h.op = 8; }, "never described"},
        Misdeed{"round_that_was", [](FrameHeader& h) { h.round = 0; }, "pushed round 0"},
        Misdeed{"round_to_come", [](FrameHeader& h) { h.round = 2; }, "pushed round 2"},
        Misdeed{"offset_past_the_end", [](FrameHeader& h) { h.offset = kItemsPerChunk; }, "outside"},
        Misdeed{"offset_that_wraps", [](FrameHeader& h) { h.offset = ~uint64_t{0}; }, "outside"},
        Misdeed{"count_past_the_end", [](FrameHeader& h) { h.offset = 1; }, "outside"},
        Misdeed{"payload_too_short", [](FrameHeader& h) { h.payload_bytes -= 1; }, "pushed 59 bytes for 15 elements"},
        Misdeed{"payload_too_long", [](FrameHeader& h) { h.payload_bytes += 1; }, "pushed 61 bytes for 15 elements"},
        Misdeed{"no_payload", [](FrameHeader& h) { h.payload_bytes = 0; }, "pushed 0 bytes for 15 elements"},
        Misdeed{"no_code",
                [](FrameHeader& h) {
                  h.is_coded = true;
                  h.payload_bytes = 0;
                },
                "pushed 0 bytes for 15 elements"}),
    [](const auto& info) { return info.param.name; });

TEST_F(ReducerTest, RefusesAChunkLargerThanAgreed) {
  const OpSpec spec = f32_sum(4 * kItemsPerChunk);
  describe(spec);
  ASSERT_TRUE(push(0, push_header(0, spec, 0)).ok());
  FrameHeader header = push_header(1, spec, 0);
  header.count *= 2;
  header.payload_bytes *= 2;
  const Status status = push(1, header);
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_NE(status.message().find("more than its window"), std::string::npos) << status.message();
  EXPECT_TRUE(reducer_->fault().ok());
}

TEST_F(ReducerTest, RefusesMoreThanTheWindow) {
  const OpSpec spec = f32_sum(10 * kItemsPerChunk);
  describe(spec);
  for (uint64_t chunk = 0; chunk < kWindow; ++chunk) ASSERT_TRUE(push(1, push_header(1, spec, chunk)).ok());
  EXPECT_EQ(push(1, push_header(1, spec, kWindow)).code(), Code::kProtocol);
  // The others open the window; then the next one is welcome.
  for (uint32_t rank : {0u, 2u}) ASSERT_TRUE(push(rank, push_header(rank, spec, 0)).ok());
  EXPECT_TRUE(push(1, push_header(1, spec, kWindow)).ok());
  EXPECT_TRUE(reducer_->fault().ok());
}

// A window is a number of chunks, so their size is the first one's: small ones first would make room for many large
// ones.
TEST_F(ReducerTest, RefusesAChunkLargerThanTheFirst) {
  const OpSpec spec = f32_sum(10 * kItemsPerChunk);
  describe(spec);
  FrameHeader header = push_header(1, spec, 0);
  header.count /= 2;
  header.payload_bytes /= 2;
  ASSERT_TRUE(push(1, header).ok());
  header.offset = header.count;
  header.count *= 2;
  header.payload_bytes *= 2;
  const Status status = push(1, header);
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_NE(status.message().find("out of order"), std::string::npos) << status.message();
}

// Counted twice, a contribution would be a wrong sum that nobody notices.
TEST_F(ReducerTest, RefusesAChunkThatWasPushedBefore) {
  const OpSpec spec = f32_sum(10 * kItemsPerChunk);
  describe(spec);
  ASSERT_TRUE(push(0, push_header(0, spec, 0)).ok());
  EXPECT_EQ(push(0, push_header(0, spec, 0)).code(), Code::kProtocol);
  EXPECT_TRUE(reducer_->fault().ok());
}

TEST_F(ReducerTest, RefusesItAlsoWhereSomebodyElseHasSaidWhatComesNext) {
  const OpSpec spec = f32_sum(10 * kItemsPerChunk);
  describe(spec);
  for (uint64_t chunk : {0, 1}) ASSERT_TRUE(push(0, push_header(0, spec, chunk)).ok());
  ASSERT_TRUE(push(1, push_header(1, spec, 0)).ok());
  EXPECT_EQ(push(1, push_header(1, spec, 0)).code(), Code::kProtocol);
  EXPECT_TRUE(reducer_->fault().ok());
}

TEST_F(ReducerTest, RefusesAChunkThatLeavesOneOut) {
  const OpSpec spec = f32_sum(10 * kItemsPerChunk);
  describe(spec);
  ASSERT_TRUE(push(0, push_header(0, spec, 0)).ok());
  EXPECT_EQ(push(0, push_header(0, spec, 2)).code(), Code::kProtocol);
  EXPECT_TRUE(reducer_->fault().ok());
}

// Kept for the next round, it would be counted there.
TEST_F(ReducerTest, RefusesAChunkAfterTheLast) {
  const OpSpec spec = f32_sum(kItemsPerChunk);
  describe(spec);
  ASSERT_TRUE(push(0, push_header(0, spec, 0)).ok());
  EXPECT_EQ(push(0, push_header(0, spec, 0)).code(), Code::kProtocol);
  FrameHeader behind = push_header(0, spec, 0);
  behind.offset = spec.total_count;
  behind.count = 0;
  behind.payload_bytes = 0;
  EXPECT_EQ(push(0, behind).code(), Code::kProtocol);
  for (uint32_t rank : {1u, 2u}) ASSERT_TRUE(push(rank, push_header(rank, spec, 0)).ok());
  EXPECT_EQ(take_results(1, spec), Values(kItemsPerChunk, 3.0f));
  for (uint32_t rank : {1u, 2u, 0u})
    ASSERT_TRUE(push(rank, push_header(rank, spec, 0, 1), Values(kItemsPerChunk, 5.0f)).ok());
  sent_.erase(sent_.begin(), sent_.begin() + 2);  // round 0's for ranks 0 and 2
  EXPECT_EQ(take_results(1, spec, 1), Values(kItemsPerChunk, 15.0f));
}

TEST_F(ReducerTest, TakesABroadcastFromItsRootOnly) {
  const OpSpec spec = f32_broadcast(8, 1);
  describe(spec);
  FrameHeader uninvited = push_header(0, spec, 0);
  uninvited.payload_bytes = 32;
  EXPECT_EQ(push(0, uninvited).code(), Code::kProtocol);
  FrameHeader silent = push_header(1, spec, 0);
  silent.payload_bytes = 0;
  EXPECT_EQ(push(1, silent).code(), Code::kProtocol);
  EXPECT_TRUE(reducer_->fault().ok());
}

TEST_F(ReducerTest, TakesOfAGatherEachRanksOwnRowOnly) {
  const OpSpec spec = f32_rows(Kind::kGather, 3 * 4);  // one chunk of three rows
  describe(spec);
  for (const uint32_t bytes : {0u, 12u, 20u, 48u}) {
    FrameHeader header = push_header(1, spec, 0);
    ASSERT_EQ(header.payload_bytes, 16u);
    header.payload_bytes = bytes;
    EXPECT_EQ(push(1, header).code(), Code::kProtocol) << bytes;
  }
  EXPECT_TRUE(reducer_->fault().ok());
}

TEST_F(ReducerTest, TakesOfAScatterTheWholeBucket) {
  const OpSpec spec = f32_rows(Kind::kScatter, 3 * 4);
  describe(spec);
  FrameHeader header = push_header(1, spec, 0);
  ASSERT_EQ(header.payload_bytes, 48u);
  header.payload_bytes = 16;
  EXPECT_EQ(push(1, header).code(), Code::kProtocol);
}

TEST_F(ReducerTest, RefusesRowsThatAreNotOneForEachWorker) {
  for (const Kind kind : {Kind::kScatter, Kind::kGather}) {
    EXPECT_EQ(describe(2, f32_rows(kind, 8)).code(), Code::kProtocol);
  }
  EXPECT_TRUE(reducer_->fault().ok());
}

TEST_F(ReducerTest, RefusesARootThatDoesNotExist) {
  EXPECT_EQ(describe(2, f32_broadcast(8, 3)).code(), Code::kProtocol);
  EXPECT_TRUE(reducer_->fault().ok());
}

TEST_F(ReducerTest, LimitsHowManyOpsAWorkerCanName) {
  Status status;
  uint64_t op = 1000;
  for (; status.ok() && op < 200000; ++op) status = describe(1, f32_sum(4), op);
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_TRUE(describe(2, f32_sum(4), 1000).ok()) << "known already";
}

// What it says second could make its first chunks lie anywhere.
TEST_F(ReducerTest, RefusesASecondDescription) {
  for (const OpSpec& again : {f32_sum(4), f32_sum(1000)}) {
    const uint64_t op = again.total_count;
    describe(f32_sum(4), op);
    EXPECT_EQ(describe(1, again, op).code(), Code::kProtocol);
    EXPECT_TRUE(reducer_->fault().ok());
  }
}

// That somebody else has described it says nothing about this worker's idea of it.
TEST_F(ReducerTest, WantsADescriptionOfEveryWorker) {
  ASSERT_TRUE(describe(0, f32_sum(4)).ok());
  EXPECT_EQ(push(1, push_header(1, f32_sum(4), 0)).code(), Code::kProtocol);
  EXPECT_TRUE(reducer_->fault().ok());
}

// Workers that do not agree on the op: the job fails, and each one learns who said what.
struct Disagreement {
  std::string name;
  std::function<void(OpSpec&)> change;
  std::vector<std::string> words;
};

class DisagreementTest : public ReducerTest, public testing::WithParamInterface<Disagreement> {};

TEST_P(DisagreementTest, NamesBothSides) {
  ASSERT_TRUE(describe(2, f32_sum(8), kOp, 1).ok());
  ASSERT_TRUE(push(2, push_header(2, f32_sum(8), 0, 0)).ok());
  OpSpec spec = f32_sum(8);
  GetParam().change(spec);
  EXPECT_EQ(describe(0, spec, kOp, 1).code(), Code::kMismatch);
  std::vector<std::string> words = GetParam().words;
  words.insert(words.end(),
               {"op 7 round 1", "rank 0 (host a) sent", "rank 2 (host c) sent sum of float32[8] (op7 of 2)"});
  for (uint32_t rank = 0; rank < 3; ++rank) expect_fault(rank, Code::kMismatch, words);
}

INSTANTIATE_TEST_SUITE_P(
    All, DisagreementTest,
    testing::Values(Disagreement{"dtype", [](OpSpec& s) { s.dtype = DType::kI32; }, {"sum of int32[8] (op7 of 0)"}},
                    Disagreement{"count", [](OpSpec& s) { s.total_count = 9; }, {"sum of float32[9]"}},
                    Disagreement{"leaves", [](OpSpec& s) { s.leaf_count = 2; }, {"sum of float32[8] in 2 leaves"}},
                    Disagreement{"shapes", [](OpSpec& s) { s.signature = 1; }, {"(op7 of 0)"}},
                    Disagreement{"group",
                                 [](OpSpec& s) { s.group = {0, 1}; },
                                 {"sum of float32[8] over ranks 0, 1 (op7 of 0)", "for the same workers"}},
                    Disagreement{
                        "kind", [](OpSpec& s) { s.kind = Kind::kBroadcast; }, {"broadcast of float32[8] from rank 0"}}),
    [](const auto& info) { return info.param.name; });

class LaterDisagreementTest : public ReducerTest {
 protected:
  const OpSpec spec_ = f32_sum(8);
  const OpSpec other_ = f32_sum(4);

  void SetUp() override {
    describe(spec_);
    complete_round(0, spec_);
  }
  void expect_both_sides() {
    for (uint32_t rank = 0; rank < 3; ++rank) {
      expect_fault(
          rank, Code::kMismatch,
          {"op 7 round 1", "rank 0 (host a) sent sum of float32[4]", "rank 2 (host c) sent sum of float32[8]"});
    }
  }
};

TEST_F(LaterDisagreementTest, IsSeenWhereTheOthersHavePushed) {
  ASSERT_TRUE(push(2, push_header(2, spec_, 0, 1)).ok());
  EXPECT_EQ(describe(0, other_, kOp, 1).code(), Code::kMismatch);
  expect_both_sides();
}

TEST_F(LaterDisagreementTest, IsSeenWhereTheOthersPushLater) {
  ASSERT_TRUE(describe(0, other_, kOp, 1).ok());
  EXPECT_EQ(push(2, push_header(2, spec_, 0, 1)).code(), Code::kMismatch);
  expect_both_sides();
}

TEST_F(LaterDisagreementTest, IsSeenWhereTheOthersChangeAsWell) {
  ASSERT_TRUE(describe(0, other_, kOp, 1).ok());
  EXPECT_EQ(describe(2, f32_sum(5), kOp, 1).code(), Code::kMismatch);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    expect_fault(rank, Code::kMismatch, {"(host a) sent sum of float32[4]", "(host c) sent sum of float32[5]"});
  }
}

// Somebody else's round would be skipped.
TEST_F(LaterDisagreementTest, IsSeenInWhatADescriptionOfARunningRoundChanges) {
  ASSERT_TRUE(push(2, push_header(2, spec_, 0, 1)).ok());
  EXPECT_EQ(describe(0, other_, kOp, 2).code(), Code::kMismatch);
}

// Who agree on the op, but not on its chunks.
struct OtherCut {
  std::string name;
  std::function<void(FrameHeader&)> change;
};

class OtherCutTest : public ReducerTest, public testing::WithParamInterface<OtherCut> {};

TEST_P(OtherCutTest, NamesBothSides) {
  const OpSpec spec = f32_sum(8);
  describe(spec);
  complete_round(0, spec);
  ASSERT_TRUE(push(2, push_header(2, spec, 0, 1)).ok());
  FrameHeader header = push_header(1, spec, 0, 1);
  GetParam().change(header);
  EXPECT_EQ(push(1, header).code(), Code::kMismatch);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    expect_fault(rank, Code::kMismatch,
                 {"op 7 round 1", "rank 1 (host b)", "rank 2 (host c)", "cut the bucket differently"});
  }
}

INSTANTIATE_TEST_SUITE_P(All, OtherCutTest,
                         testing::Values(OtherCut{"chunk_bytes",
                                                  [](FrameHeader& h) {
                                                    h.count = 4;
                                                    h.payload_bytes = 16;
                                                    h.last = false;
                                                  }},
                                         OtherCut{"first_element",
                                                  [](FrameHeader& h) {
                                                    h.offset = 4;
                                                    h.count = 4;
                                                    h.payload_bytes = 16;
                                                  }},
                                         OtherCut{"last", [](FrameHeader& h) { h.last = false; }}),
                         [](const auto& info) { return info.param.name; });

TEST_F(ReducerTest, NamesBothGroups) {
  ASSERT_TRUE(describe(0, f32_sum(8, {0, 2})).ok());
  EXPECT_EQ(describe(1, f32_sum(8, {0, 1})).code(), Code::kMismatch);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    expect_fault(rank, Code::kMismatch,
                 {"rank 1 (host b) sent sum of float32[8] over ranks 0, 1 (op7 of 1)",
                  "rank 0 (host a) sent sum of float32[8] over ranks 0, 2 (op7 of 0)"});
  }
}

TEST_F(ReducerTest, TakesNothingOfAWorkerOutsideOfTheGroup) {
  ASSERT_TRUE(describe(0, f32_sum(8, {0, 2})).ok());
  EXPECT_EQ(push(1, push_header(1, f32_sum(8, {0, 1}), 0)).code(), Code::kProtocol) << "it has not described the op";
  EXPECT_EQ(describe(1, f32_sum(8, {0, 2})).code(), Code::kMismatch);
  expect_fault(2, Code::kMismatch, {"rank 1 (host b) sent", "over ranks 0, 2", "is none of these ranks itself"});
}

TEST_F(ReducerTest, RefusesAGroupThatTheJobDoesNotHave) {
  EXPECT_EQ(describe(0, f32_sum(8, {0, 3})).code(), Code::kProtocol);
  EXPECT_TRUE(reducer_->fault().ok());
}

// A worker that shuts down is missed by its own groups alone.
TEST_F(ReducerTest, GoesOnInGroupsWithoutAWorkerThatHasLeft) {
  const OpSpec spec = f32_sum(4, {0, 2});
  describe(spec);
  ASSERT_TRUE(push(0, push_header(0, spec, 0)).ok());
  reducer_->leave(1, {}, sent_);
  EXPECT_TRUE(reducer_->fault().ok());
  ASSERT_TRUE(push(2, push_header(2, spec, 0)).ok());
  EXPECT_EQ(take_results(0, spec), Values(4, 2.0f));
  reducer_->leave(2, {}, sent_);
  EXPECT_EQ(push(0, push_header(0, spec, 0, 1)).code(), Code::kWorkerLost);
}

TEST_F(ReducerTest, NamesBothRootsOfABroadcast) {
  ASSERT_TRUE(describe(0, f32_broadcast(8, 0)).ok());
  EXPECT_EQ(describe(1, f32_broadcast(8, 2)).code(), Code::kMismatch);
  expect_fault(2, Code::kMismatch, {"from rank 0", "from rank 2"});
}

TEST_F(ReducerTest, TellsTheOthersWhoWasLost) {
  const OpSpec spec = f32_sum(4);
  describe(spec);
  for (uint64_t round : {0, 1}) complete_round(round, spec);
  ASSERT_TRUE(push(0, push_header(0, spec, 0, 2)).ok());
  reducer_->leave(1, {Code::kInternal, "connection reset"}, sent_);
  for (uint32_t rank : {0u, 2u}) {
    expect_fault(rank, Code::kWorkerLost, {"rank 1 (host b) was lost: connection reset"});
  }
  EXPECT_TRUE(take_fault(1).ok()) << "it cannot hear us";
}

TEST_F(ReducerTest, TellsTheOthersWhoWasLostEvenBetweenRounds) {
  reducer_->leave(1, {Code::kInternal, "connection reset"}, sent_);
  expect_fault(0, Code::kWorkerLost, {"rank 1 (host b) was lost"});
}

TEST_F(ReducerTest, LetsAWorkerGoThatNobodyWaitsFor) {
  describe(f32_sum(4));
  complete_round(0, f32_sum(4));
  for (uint32_t rank = 0; rank < 3; ++rank) reducer_->leave(rank, {}, sent_);
  EXPECT_TRUE(reducer_->fault().ok());
  EXPECT_TRUE(sent_.empty());
}

TEST_F(ReducerTest, ToleratesNoLeaveInTheMiddleOfARound) {
  describe(f32_sum(4));
  ASSERT_TRUE(push(0, push_header(0, f32_sum(4), 0)).ok());
  reducer_->leave(1, {}, sent_);
  for (uint32_t rank : {0u, 2u}) {
    expect_fault(rank, Code::kWorkerLost, {"rank 1 (host b) shut down", "op7 of 0 round 0"});
  }
}

TEST_F(ReducerTest, ToleratesNoRoundWithoutAWorkerThatLeft) {
  describe(f32_sum(4));
  complete_round(0, f32_sum(4));
  reducer_->leave(1, {}, sent_);
  EXPECT_EQ(push(2, push_header(2, f32_sum(4), 0, 1)).code(), Code::kWorkerLost);
  for (uint32_t rank : {0u, 2u}) {
    expect_fault(rank, Code::kWorkerLost, {"rank 1 (host b) shut down", "rank 2 (host c) waits", "round 1"});
  }
}

// It has pushed the chunk that the round waits for, but not the one behind.
TEST_F(ReducerTest, ToleratesNoLeaveBeforeTheLastChunk) {
  const OpSpec spec = f32_sum(2 * kItemsPerChunk);
  describe(spec);
  for (uint64_t chunk : {0, 1}) ASSERT_TRUE(push(0, push_header(0, spec, chunk)).ok());
  ASSERT_TRUE(push(1, push_header(1, spec, 0)).ok());
  reducer_->leave(1, {}, sent_);
  static_cast<void>(push(2, push_header(2, spec, 0)));
  static_cast<void>(push(2, push_header(2, spec, 1)));
  EXPECT_EQ(reducer_->fault().code(), Code::kWorkerLost);
  for (uint32_t rank : {0u, 2u}) expect_fault(rank, Code::kWorkerLost, {"rank 1 (host b) shut down"});
}

TEST_F(ReducerTest, FailsOnlyOnce) {
  describe(f32_sum(4));
  reducer_->fail({Code::kReducerLost, "first"}, sent_);
  reducer_->fail({Code::kInternal, "second"}, sent_);
  reducer_->leave(1, {Code::kInternal, "third"}, sent_);
  reducer_->report_late(1000000, 1, sent_);
  for (uint32_t rank = 0; rank < 3; ++rank) expect_fault(rank, Code::kReducerLost, {"first"});
  EXPECT_TRUE(sent_.empty());
  EXPECT_EQ(reducer_->fault().message(), "first");
  EXPECT_EQ(push(0, push_header(0, f32_sum(4), 0)).message(), "first") << "and nothing runs any more";
}

// The reducer fails while a payload is still on its way to it.
TEST_F(ReducerTest, KeepsThePlaceOfAPayloadWhenItFails) {
  describe(f32_sum(kItemsPerChunk));
  const FrameHeader header = push_header(0, f32_sum(kItemsPerChunk), 0);
  Result<std::span<std::byte>> memory = reducer_->start_push(0, header, 0, sent_);
  ASSERT_TRUE(memory.ok());
  reducer_->fail({Code::kInternal, "why"}, sent_);
  std::ranges::fill(*memory, std::byte{1});
  EXPECT_EQ(reducer_->finish_push(0, header, 0, sent_).message(), "why");
}

}  // namespace
}  // namespace jaxhetero
