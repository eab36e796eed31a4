// What a reducer refuses to a worker, and what it tells all of them when the job has failed.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tests/cc/one_reducer.h"
#include "xla_ffi/reducer.h"
#include "xla_ffi/wire.h"

namespace jaxhetero {
namespace {

// What one worker does against the protocol costs it its connection; the job itself has not failed by that.
struct Misdeed {
  std::string name;
  uint32_t rank;  // the connection that it comes from
  std::function<void(FrameHeader&)> change;
  std::string word;  // of the message
};

class MisdeedTest : public ReducerTest, public testing::WithParamInterface<Misdeed> {};

TEST_P(MisdeedTest, IsRefusedForThisWorkerOnly) {
  const auto& [name, rank, change, word] = GetParam();
  const RoundSpec spec = f32_sum(4 * kChunkCount);
  for (uint32_t r = 0; r < 3; ++r) ASSERT_TRUE(push(push_header(r, f32_sum(4), 0, 0)).ok());  // round 0
  sent_.clear();
  ASSERT_TRUE(push(push_header(0, spec, 0, 1)).ok());
  FrameHeader header = push_header(1, spec, 0, 1);
  change(header);
  const Status status = push(rank, header, Bytes(header.payload_bytes));
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_NE(status.message().find("rank 1 (host b)"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  EXPECT_TRUE(reducer_->fault().ok());
  EXPECT_TRUE(sent_.empty());
}

INSTANTIATE_TEST_SUITE_P(
    All, MisdeedTest,
    testing::Values(Misdeed{"other_rank", 1, [](FrameHeader& h) { h.rank = 2; }, "as rank 2"},
                    Misdeed{"rank_that_does_not_exist", 1, [](FrameHeader& h) { h.rank = 1000; }, "as rank 1000"},
                    Misdeed{"op_never_described", 1, [](FrameHeader& h) { h.op = 8; }, "never described"},
                    Misdeed{"round_that_was", 1, [](FrameHeader& h) { h.round = 0; }, "pushed round 0"},
                    Misdeed{"round_to_come", 1, [](FrameHeader& h) { h.round = 2; }, "pushed round 2"},
                    Misdeed{"chunk_larger_than_agreed", 1,
                            [](FrameHeader& h) {
                              h.count *= 2;
                              h.payload_bytes *= 2;
                            },
                            "more than its window"}),
    [](const auto& info) { return info.param.name; });

TEST_F(ReducerTest, RefusesMoreThanTheWindow) {
  const RoundSpec spec = f32_sum(10 * kChunkCount);
  for (uint64_t chunk = 0; chunk < kWindow; ++chunk) ASSERT_TRUE(push(push_header(1, spec, chunk)).ok());
  EXPECT_EQ(push(push_header(1, spec, kWindow)).code(), Code::kProtocol);
  // The others open the window; then the next one is welcome.
  for (uint32_t rank : {0u, 2u}) ASSERT_TRUE(push(push_header(rank, spec, 0)).ok());
  EXPECT_TRUE(push(push_header(1, spec, kWindow)).ok());
  EXPECT_TRUE(reducer_->fault().ok());
}

// A window is a number of chunks, so their size is the first one's: small ones first would make room for many large
// ones.
TEST_F(ReducerTest, RefusesAChunkLargerThanTheFirst) {
  const RoundSpec spec = f32_sum(10 * kChunkCount);
  FrameHeader header = push_header(1, spec, 0);
  header.count /= 2;
  header.payload_bytes /= 2;
  ASSERT_TRUE(push(header).ok());
  header.offset = header.count;
  header.count *= 2;
  header.payload_bytes *= 2;
  const Status status = push(header);
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_NE(status.message().find("out of order"), std::string::npos) << status.message();
}

// Counted twice, a contribution would be a wrong sum that nobody notices.
TEST_F(ReducerTest, RefusesAChunkThatWasPushedBefore) {
  const RoundSpec spec = f32_sum(10 * kChunkCount);
  ASSERT_TRUE(push(push_header(0, spec, 0)).ok());
  EXPECT_EQ(push(push_header(0, spec, 0)).code(), Code::kProtocol);
  EXPECT_TRUE(reducer_->fault().ok());
}

TEST_F(ReducerTest, RefusesItAlsoWhereSomebodyElseHasSaidWhatComesNext) {
  const RoundSpec spec = f32_sum(10 * kChunkCount);
  for (uint64_t chunk : {0, 1}) ASSERT_TRUE(push(push_header(0, spec, chunk)).ok());
  ASSERT_TRUE(push(push_header(1, spec, 0)).ok());
  EXPECT_EQ(push(push_header(1, spec, 0)).code(), Code::kProtocol);
  EXPECT_TRUE(reducer_->fault().ok());
}

TEST_F(ReducerTest, RefusesAChunkThatLeavesOneOut) {
  const RoundSpec spec = f32_sum(10 * kChunkCount);
  ASSERT_TRUE(push(push_header(0, spec, 0)).ok());
  EXPECT_EQ(push(push_header(0, spec, 2)).code(), Code::kProtocol);
  EXPECT_TRUE(reducer_->fault().ok());
}

// Kept for the next round, it would be counted there.
TEST_F(ReducerTest, RefusesAChunkAfterTheLast) {
  const RoundSpec spec = f32_sum(kChunkCount);
  ASSERT_TRUE(push(push_header(0, spec, 0)).ok());
  EXPECT_EQ(push(push_header(0, spec, 0)).code(), Code::kProtocol);
  FrameHeader behind = push_header(0, spec, 0);
  behind.offset = spec.total_count;
  behind.count = 0;
  behind.payload_bytes = 0;
  EXPECT_EQ(push(behind).code(), Code::kProtocol);
  for (uint32_t rank : {1u, 2u}) ASSERT_TRUE(push(push_header(rank, spec, 0)).ok());
  EXPECT_EQ(take_results(1, spec), Values(kChunkCount, 3.0f));
  for (uint32_t rank : {1u, 2u, 0u}) ASSERT_TRUE(push(push_header(rank, spec, 0, 1), Values(kChunkCount, 5.0f)).ok());
  sent_.erase(sent_.begin(), sent_.begin() + 2);  // round 0's for ranks 0 and 2
  EXPECT_EQ(take_results(1, spec, 1), Values(kChunkCount, 15.0f));
}

TEST_F(ReducerTest, TakesABroadcastFromItsRootOnly) {
  const RoundSpec spec = f32_broadcast(8, 1);
  FrameHeader uninvited = push_header(0, spec, 0);
  uninvited.payload_bytes = 32;
  EXPECT_EQ(push(uninvited).code(), Code::kProtocol);
  FrameHeader silent = push_header(1, spec, 0);
  silent.payload_bytes = 0;
  EXPECT_EQ(push(silent).code(), Code::kProtocol);
  EXPECT_TRUE(reducer_->fault().ok());
}

TEST_F(ReducerTest, RefusesARootThatDoesNotExist) {
  EXPECT_EQ(push(push_header(2, f32_broadcast(8, 3), 0)).code(), Code::kProtocol);
  EXPECT_TRUE(reducer_->fault().ok());
}

TEST_F(ReducerTest, LimitsHowManyOpsAWorkerCanName) {
  Status status;
  uint64_t op = 1000;
  for (; status.ok() && op < 200000; ++op) status = reducer_->describe_op(1, op, "x");
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_TRUE(reducer_->describe_op(2, 1000, "known already").ok());
}

// Workers that do not agree on the round: the job fails, and each one learns who said what.
struct Disagreement {
  std::string name;
  std::function<void(FrameHeader&)> change;
  std::vector<std::string> words;
};

class DisagreementTest : public ReducerTest, public testing::WithParamInterface<Disagreement> {};

TEST_P(DisagreementTest, NamesBothSides) {
  complete_round(0);
  ASSERT_TRUE(push(push_header(2, f32_sum(8), 0, 1)).ok());
  FrameHeader header = push_header(0, f32_sum(8), 0, 1);
  GetParam().change(header);
  EXPECT_EQ(push(0, header, Bytes(header.payload_bytes)).code(), Code::kMismatch);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    const Status fault = take_fault(rank);
    EXPECT_EQ(fault.code(), Code::kMismatch);
    std::vector<std::string> words = GetParam().words;
    words.insert(words.end(), {"op 7 round 1", "rank 0 (host a)", "rank 2 (host c)"});
    for (const std::string& word : words) EXPECT_NE(fault.message().find(word), std::string::npos) << fault.message();
  }
}

const std::string kRankTwoSent = "rank 2 (host c) sent sum of float32[8] (op7 of 2)";

INSTANTIATE_TEST_SUITE_P(
    All, DisagreementTest,
    testing::Values(Disagreement{"dtype",
                                 [](FrameHeader& h) { h.spec.dtype = DType::kI32; },
                                 {kRankTwoSent, "rank 0 (host a) sent sum of int32[8] (op7 of 0)"}},
                    Disagreement{"count",
                                 [](FrameHeader& h) {
                                   h.spec.total_count = 9;
                                   h.last = false;
                                 },
                                 {kRankTwoSent, "sum of float32[9]"}},
                    Disagreement{"leaves",
                                 [](FrameHeader& h) { h.spec.leaf_count = 2; },
                                 {kRankTwoSent, "sum of float32[8] in 2 leaves"}},
                    Disagreement{"shapes", [](FrameHeader& h) { h.spec.signature = 1; }, {kRankTwoSent, "(op7 of 0)"}},
                    Disagreement{"kind",
                                 [](FrameHeader& h) { h.spec.kind = Kind::kBroadcast; },
                                 {kRankTwoSent, "broadcast of float32[8] from rank 0"}},
                    Disagreement{"chunk_bytes",
                                 [](FrameHeader& h) {
                                   h.count = 4;
                                   h.payload_bytes = 16;
                                   h.last = false;
                                 },
                                 {"cut the bucket differently"}},
                    Disagreement{"first_element",
                                 [](FrameHeader& h) {
                                   h.offset = 4;
                                   h.count = 4;
                                   h.payload_bytes = 16;
                                 },
                                 {"cut the bucket differently"}},
                    Disagreement{"last", [](FrameHeader& h) { h.last = false; }, {"cut the bucket differently"}}),
    [](const auto& info) { return info.param.name; });

TEST_F(ReducerTest, NamesBothRootsOfABroadcast) {
  ASSERT_TRUE(push(push_header(0, f32_broadcast(8, 0), 0)).ok());
  EXPECT_EQ(push(push_header(1, f32_broadcast(8, 2), 0)).code(), Code::kMismatch);
  expect_fault(2, Code::kMismatch, {"from rank 0", "from rank 2"});
}

TEST_F(ReducerTest, TellsTheOthersWhoWasLost) {
  complete_round(0);
  complete_round(1);
  ASSERT_TRUE(push(push_header(0, f32_sum(4), 0, 2)).ok());
  reducer_->leave(1, {Code::kInternal, "connection reset"}, sent_);
  for (uint32_t rank : {0u, 2u}) {
    expect_fault(rank, Code::kWorkerLost, {"rank 1 (host b)", "connection reset", "last completed: op7 of 0 round 1"});
  }
  EXPECT_TRUE(take_fault(1).ok()) << "it cannot hear us";
}

TEST_F(ReducerTest, TellsTheOthersWhoWasLostEvenBetweenRounds) {
  reducer_->leave(1, {Code::kInternal, "connection reset"}, sent_);
  expect_fault(0, Code::kWorkerLost, {"rank 1 (host b)", "last completed: none"});
}

TEST_F(ReducerTest, LetsAWorkerGoThatNobodyWaitsFor) {
  complete_round(0);
  for (uint32_t rank = 0; rank < 3; ++rank) reducer_->leave(rank, {}, sent_);
  EXPECT_TRUE(reducer_->fault().ok());
  EXPECT_TRUE(sent_.empty());
}

TEST_F(ReducerTest, ToleratesNoLeaveInTheMiddleOfARound) {
  ASSERT_TRUE(push(push_header(0, f32_sum(4), 0)).ok());
  reducer_->leave(1, {}, sent_);
  for (uint32_t rank : {0u, 2u}) {
    expect_fault(rank, Code::kWorkerLost, {"rank 1 (host b) shut down", "op7 of 0 round 0"});
  }
}

TEST_F(ReducerTest, ToleratesNoRoundWithoutAWorkerThatLeft) {
  complete_round(0);
  reducer_->leave(1, {}, sent_);
  EXPECT_EQ(push(push_header(2, f32_sum(4), 0, 1)).code(), Code::kWorkerLost);
  for (uint32_t rank : {0u, 2u}) {
    expect_fault(rank, Code::kWorkerLost, {"rank 1 (host b) shut down", "rank 2 (host c) waits", "round 1"});
  }
}

// It has pushed the chunk that the round waits for, but not the one behind.
TEST_F(ReducerTest, ToleratesNoLeaveBeforeTheLastChunk) {
  const RoundSpec spec = f32_sum(2 * kChunkCount);
  for (uint64_t chunk : {0, 1}) ASSERT_TRUE(push(push_header(0, spec, chunk)).ok());
  ASSERT_TRUE(push(push_header(1, spec, 0)).ok());
  reducer_->leave(1, {}, sent_);
  static_cast<void>(push(push_header(2, spec, 0)));
  static_cast<void>(push(push_header(2, spec, 1)));
  EXPECT_EQ(reducer_->fault().code(), Code::kWorkerLost);
  for (uint32_t rank : {0u, 2u}) expect_fault(rank, Code::kWorkerLost, {"rank 1 (host b) shut down"});
}

TEST_F(ReducerTest, FailsOnlyOnce) {
  reducer_->fail({Code::kReducerLost, "first"}, sent_);
  reducer_->fail({Code::kInternal, "second"}, sent_);
  reducer_->leave(1, {Code::kInternal, "third"}, sent_);
  reducer_->report_late(1000000, 1, sent_);
  for (uint32_t rank = 0; rank < 3; ++rank) expect_fault(rank, Code::kReducerLost, {"first"});
  EXPECT_TRUE(sent_.empty());
  EXPECT_EQ(reducer_->fault().message(), "first");
  EXPECT_EQ(push(push_header(0, f32_sum(4), 0)).message(), "first") << "and nothing runs any more";
}

// The reducer fails while a payload is still on its way to it.
TEST_F(ReducerTest, KeepsThePlaceOfAPayloadWhenItFails) {
  const FrameHeader header = push_header(0, f32_sum(kChunkCount), 0);
  Result<std::span<std::byte>> memory = reducer_->begin(0, header, 0, sent_);
  ASSERT_TRUE(memory.ok());
  reducer_->fail({Code::kInternal, "why"}, sent_);
  std::ranges::fill(*memory, std::byte{1});
  EXPECT_EQ(reducer_->commit(0, header, 0, sent_).message(), "why");
}

}  // namespace
}  // namespace jaxhetero
