#include "xla_ffi/reducer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/printing.h"
#include "xla_ffi/reduce.h"
#include "xla_ffi/wire.h"

namespace jaxhetero {
namespace {

using testing::Test;

constexpr uint32_t kChunkBytes = 64;
constexpr uint32_t kChunkCount = kChunkBytes / sizeof(float);
constexpr uint32_t kWindow = 2;
constexpr uint64_t kOp = 7;

RoundSpec f32_sum(uint64_t count) { return {Kind::kSum, DType::kF32, 0, 1, count, 99}; }

RoundSpec f32_broadcast(uint64_t count, uint32_t root) { return {Kind::kBroadcast, DType::kF32, root, 1, count, 99}; }

// The header of the `index`-th chunk of a round whose whole bucket is one shard.
FrameHeader push_header(uint32_t rank, const RoundSpec& spec, uint64_t index, uint64_t round = 0, uint64_t op = kOp) {
  const uint64_t item = item_bytes(spec.dtype);
  FrameHeader header;
  header.type = FrameType::kPush;
  header.rank = rank;
  header.op = op;
  header.round = round;
  header.spec = spec;
  header.offset = index * kChunkBytes / item;
  header.count = static_cast<uint32_t>(std::min<uint64_t>(kChunkBytes / item, spec.total_count - header.offset));
  header.last = header.offset + header.count == spec.total_count;
  const bool has_data = spec.kind == Kind::kSum || spec.root == rank;
  header.payload_bytes = has_data ? static_cast<uint32_t>(header.count * item) : 0;
  return header;
}

using Values = std::vector<float>;

// The sum of floats like these depends on the order of the additions.
Values values_of(uint32_t rank, uint64_t count, uint32_t seed = 0) {
  std::mt19937 random(1000 * seed + rank);
  Values values(count);
  for (float& value : values) value = std::ldexp(static_cast<float>(random() % 1000), static_cast<int>(random() % 40));
  return values;
}

Values total_of(const std::vector<Values>& by_rank) {
  Values total = by_rank[0];
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    for (size_t i = 0; i < total.size(); ++i) total[i] += by_rank[rank][i];
  }
  return total;
}

std::span<const std::byte> part_of(const Values& values, const FrameHeader& header) {
  return std::as_bytes(std::span(values)).subspan(header.offset * sizeof(float), header.payload_bytes);
}

class ReducerTest : public Test {
 protected:
  explicit ReducerTest(uint32_t worker_count = 3) {
    Reducer::Job job{{}, {worker_count, 1, 0, kChunkBytes, kWindow}};
    for (uint32_t rank = 0; rank < worker_count; ++rank) job.worker_hosts.push_back(std::string(1, char('a' + rank)));
    reducer_ = std::make_unique<Reducer>(std::move(job));
    for (uint32_t rank = 0; rank < worker_count; ++rank) describe(rank);
  }

  void describe(uint32_t rank, uint64_t op = kOp) {
    const std::string text = "op" + std::to_string(op) + " of " + std::to_string(rank);
    EXPECT_TRUE(reducer_->describe_op(rank, op, text).ok());
  }

  Status push(uint32_t rank, const FrameHeader& header, std::span<const std::byte> payload) {
    Result<std::span<std::byte>> memory = reducer_->begin(rank, header, now_ms_, sent_);
    if (!memory.ok()) return memory.status();
    EXPECT_EQ(memory->size(), header.payload_bytes);
    if (!memory->empty()) std::memcpy(memory->data(), payload.data(), memory->size());
    return reducer_->commit(rank, header, now_ms_, sent_);
  }
  Status push(const FrameHeader& header, const Values& values) {
    return push(header.rank, header, part_of(values, header));
  }
  // A chunk of ones.
  Status push(const FrameHeader& header) {
    const Values ones(header.payload_bytes / sizeof(float), 1.0f);
    return push(header.rank, header, std::as_bytes(std::span(ones)));
  }

  // The frames of one type for one worker; forgets them.
  std::vector<Outgoing> take(uint32_t rank, FrameType type) {
    std::vector<Outgoing> taken;
    std::erase_if(sent_, [&](const Outgoing& frame) {
      const bool matches = frame.rank == rank && frame.header.type == type;
      if (matches) taken.push_back(frame);
      return matches;
    });
    return taken;
  }

  // What `rank` was sent of the round so far, in order and without gaps.
  Values take_results(uint32_t rank, const RoundSpec& spec, uint64_t round = 0, uint64_t op = kOp) {
    Values values;
    uint64_t end = 0;
    bool last = false;
    for (const Outgoing& frame : take(rank, FrameType::kResult)) {
      EXPECT_EQ(frame.header.op, op);
      EXPECT_EQ(frame.header.round, round);
      EXPECT_EQ(frame.header.spec, spec);
      EXPECT_EQ(frame.header.offset, end);
      EXPECT_EQ(frame.header.payload_bytes, frame.payload.size());
      EXPECT_FALSE(last) << "something came after the last chunk";
      last = frame.header.last;
      end += frame.header.count;
      const size_t before = values.size();
      values.resize(before + frame.payload.size() / sizeof(float));
      if (!frame.payload.empty()) std::memcpy(&values[before], frame.payload.data(), frame.payload.size());
    }
    EXPECT_EQ(last, end == spec.total_count);
    return values;
  }

  // The only fault that `rank` was sent, or ok.
  Status take_fault(uint32_t rank) {
    const std::vector<Outgoing> faults = take(rank, FrameType::kFault);
    EXPECT_LE(faults.size(), 1u);
    return faults.empty() ? Status() : decode_fault(faults[0].payload);
  }

  void expect_fault(uint32_t rank, Code code, const std::vector<std::string>& words) {
    const Status fault = take_fault(rank);
    EXPECT_EQ(fault.code(), code) << "rank " << rank << ": " << fault.message();
    for (const std::string& word : words) EXPECT_NE(fault.message().find(word), std::string::npos) << fault.message();
  }

  void complete_round(uint64_t round, const RoundSpec& spec = f32_sum(4)) {
    for (uint32_t rank = 0; rank < reducer_->worker_count(); ++rank) {
      ASSERT_TRUE(push(push_header(rank, spec, 0, round)).ok());
    }
    sent_.clear();
  }

  std::unique_ptr<Reducer> reducer_;
  std::vector<Outgoing> sent_;
  int64_t now_ms_ = 0;
};

// Two chunks of three workers can arrive in 90 orders; the total does not tell in which one.
TEST_F(ReducerTest, SumsInRankOrderWhateverArrivesFirst) {
  const RoundSpec spec = f32_sum(kChunkCount + 5);
  std::vector<Values> by_rank;
  for (uint32_t rank = 0; rank < 3; ++rank) by_rank.push_back(values_of(rank, spec.total_count));
  const Values total = total_of(by_rank);
  std::vector<uint32_t> arrivals = {0, 0, 1, 1, 2, 2};
  uint64_t round = 0;
  do {
    std::map<uint32_t, uint64_t> next_chunk;
    for (uint32_t rank : arrivals) {
      ASSERT_TRUE(push(push_header(rank, spec, next_chunk[rank]++, round), by_rank[rank]).ok());
    }
    for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_EQ(take_results(rank, spec, round), total) << "round " << round;
    ++round;
  } while (std::ranges::next_permutation(arrivals).found);
  EXPECT_EQ(round, 90u);
  EXPECT_EQ(reducer_->completed_round_count(), 90u);
  EXPECT_TRUE(sent_.empty());
}

TEST_F(ReducerTest, AnswersEachChunkAsSoonAsItIsComplete) {
  const RoundSpec spec = f32_sum(3 * kChunkCount);
  for (uint64_t chunk = 0; chunk < 3; ++chunk) {
    for (uint32_t rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(sent_.empty());
      ASSERT_TRUE(push(push_header(rank, spec, chunk)).ok());
    }
    for (uint32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(take(rank, FrameType::kResult).size(), 1u);
  }
}

TEST_F(ReducerTest, CompletesAnEmptyRound) {
  const RoundSpec spec = f32_sum(0);
  for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(push(push_header(rank, spec, 0)).ok());
  for (uint32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(take_results(rank, spec), Values{});
  EXPECT_EQ(reducer_->completed_round_count(), 1u);
}

TEST_F(ReducerTest, GivesTheRootsValuesToTheOthers) {
  constexpr uint32_t kRoot = 1;
  const RoundSpec spec = f32_broadcast(kChunkCount + 3, kRoot);
  const Values values = values_of(kRoot, spec.total_count);
  for (uint32_t rank : {2u, 1u, 0u}) {
    for (uint64_t chunk : {0, 1}) ASSERT_TRUE(push(push_header(rank, spec, chunk), values).ok());
  }
  for (uint32_t rank : {0u, 2u}) EXPECT_EQ(take_results(rank, spec), values);
  EXPECT_EQ(take_results(kRoot, spec), Values{}) << "the root has them already";
}

// Results may still be on their way while later rounds run, and even when the reducer is gone.
TEST_F(ReducerTest, LeavesTheMemoryOfAResultAlone) {
  const RoundSpec spec = f32_sum(kChunkCount);
  std::vector<Outgoing> kept;
  for (uint64_t round = 0; round < 20; ++round) {
    for (uint32_t rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(push(push_header(rank, spec, 0, round), Values(kChunkCount, static_cast<float>(round))).ok());
    }
    kept.push_back(take(0, FrameType::kResult).at(0));
  }
  reducer_.reset();
  for (size_t round = 0; round < kept.size(); ++round) {
    const Values expected(kChunkCount, 3.0f * static_cast<float>(round));
    EXPECT_TRUE(std::ranges::equal(kept[round].payload, std::as_bytes(std::span(expected))));
  }
}

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

class LateTest : public ReducerTest {
 protected:
  static constexpr int64_t kPatience = 100;

  std::string report(uint32_t rank) {
    reducer_->report_late(now_ms_, kPatience, sent_);
    const std::vector<Outgoing> frames = take(rank, FrameType::kLate);
    EXPECT_LE(frames.size(), 1u);
    for (const Outgoing& frame : frames) EXPECT_EQ(frame.header.op, kOp);
    sent_.clear();
    return frames.empty() ? "" : decode_text(frames[0].payload);
  }
};

TEST_F(LateTest, NamesExactlyTheMissing) {
  now_ms_ = 1000;
  ASSERT_TRUE(push(push_header(1, f32_sum(4), 0)).ok());
  now_ms_ += kPatience - 1;
  EXPECT_EQ(report(1), "");
  now_ms_ += 1;
  EXPECT_EQ(report(1), "rank 0 (host a), rank 2 (host c)");
  ASSERT_TRUE(push(push_header(0, f32_sum(4), 0)).ok());
  EXPECT_EQ(report(0), "rank 2 (host c)");
  EXPECT_EQ(report(2), "") << "who is late himself need not be told";
  ASSERT_TRUE(push(push_header(2, f32_sum(4), 0)).ok());
  now_ms_ += 10 * kPatience;
  EXPECT_EQ(report(0), "") << "nobody waits between rounds";
}

TEST_F(LateTest, CountsFromTheLastProgress) {
  const RoundSpec spec = f32_sum(3 * kChunkCount);
  for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(push(push_header(rank, spec, 0)).ok());
  now_ms_ += kPatience;
  for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(push(push_header(rank, spec, 1)).ok());
  ASSERT_TRUE(push(push_header(0, spec, 2)).ok());
  now_ms_ += kPatience - 1;
  EXPECT_EQ(report(0), "");
  now_ms_ += 1;
  EXPECT_EQ(report(0), "rank 1 (host b), rank 2 (host c)");
}

TEST_F(LateTest, TellsTheSlowFromTheStuck) {
  ASSERT_TRUE(push(push_header(1, f32_sum(4), 0)).ok());
  now_ms_ += kPatience;
  const auto moving_count = [&](const std::vector<bool>& moving) {
    reducer_->report_late(now_ms_, kPatience, sent_, moving);
    const std::vector<Outgoing> frames = take(1, FrameType::kLate);
    sent_.clear();
    return frames.empty() ? -1 : static_cast<int>(frames[0].header.count);
  };
  EXPECT_EQ(moving_count({false, true, false}), 0) << "it does not wait for itself";
  EXPECT_EQ(moving_count({true, false, false}), 1);
  EXPECT_EQ(moving_count({true, false, true}), 2);
}

// A worker at its window's edge in every round: memory comes from a bounded set of buffers.
TEST_F(ReducerTest, TakesNoMoreMemoryThanTheWindows) {
  std::set<const std::byte*> buffers;
  const RoundSpec spec = f32_sum(6 * kChunkCount);
  for (uint64_t round = 0; round < 50; ++round) {
    for (uint64_t chunk = 0; chunk < 6 + kWindow; ++chunk) {
      for (uint32_t rank = 0; rank < 3; ++rank) {
        // Rank 0 runs ahead by a window, the others follow.
        const uint64_t own = rank == 0 ? chunk : chunk - (kWindow - 1);
        if (own >= 6) continue;
        const FrameHeader header = push_header(rank, spec, own, round);
        Result<std::span<std::byte>> memory = reducer_->begin(rank, header, 0, sent_);
        ASSERT_TRUE(memory.ok()) << memory.status().message();
        buffers.insert(memory->data());
        ASSERT_TRUE(reducer_->commit(rank, header, 0, sent_).ok());
      }
      sent_.clear();  // as when the socket has taken them
    }
  }
  EXPECT_EQ(reducer_->completed_round_count(), 50u);
  EXPECT_LE(buffers.size(), 3 * kWindow);
}

TEST_F(ReducerTest, LimitsHowManyOpsAWorkerCanName) {
  Status status;
  uint64_t op = 1000;
  for (; status.ok() && op < 200000; ++op) status = reducer_->describe_op(1, op, "x");
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_TRUE(reducer_->describe_op(2, 1000, "known already").ok());
}

// Any number of workers, ops, rounds, sizes and kinds, in a random order of what may happen next. The model: per op,
// workers push chunks in order, at most a window ahead of the results they have; a round's total is a plain loop.
class Interleaving : public ReducerTest, public testing::WithParamInterface<uint32_t> {
 protected:
  static constexpr uint64_t kOps = 3;
  static constexpr uint64_t kRounds = 4;

  Interleaving() : ReducerTest(GetParam() % 5 + 1), random_(GetParam()) {}

  struct Model {
    RoundSpec spec;
    std::vector<Values> inputs;  // by rank
    Values total;
  };
  struct Worker {  // at one op
    uint64_t round = 0;
    uint64_t pushed = 0;   // chunks of this round
    uint64_t results = 0;  // elements of this round
    bool pushed_last = false;
  };

  Model make_model(uint64_t op, uint64_t round) {
    const uint32_t workers = reducer_->worker_count();
    const uint64_t count = random_() % 4 == 0 ? 0 : random_() % (5 * kChunkCount);
    Model model;
    model.spec = random_() % 3 == 0 ? f32_broadcast(count, random_() % workers) : f32_sum(count);
    for (uint32_t rank = 0; rank < workers; ++rank) {
      model.inputs.push_back(values_of(rank, count, static_cast<uint32_t>(op * kRounds + round)));
    }
    model.total = model.spec.kind == Kind::kSum ? total_of(model.inputs) : model.inputs[model.spec.root];
    return model;
  }

  std::mt19937 random_;
};

TEST_P(Interleaving, GivesWhatThePlainLoopGives) {
  const uint32_t worker_count = reducer_->worker_count();
  std::map<std::pair<uint64_t, uint64_t>, Model> models;
  std::map<std::pair<uint64_t, uint32_t>, Worker> workers;
  for (uint64_t op = 0; op < kOps; ++op) {
    for (uint32_t rank = 0; rank < worker_count; ++rank) describe(rank, op);
    for (uint64_t round = 0; round < kRounds; ++round) models[{op, round}] = make_model(op, round);
  }
  std::vector<std::deque<Outgoing>> on_the_way(worker_count);
  for (uint64_t done = 0; done < kOps * worker_count * kRounds;) {
    const auto rank = static_cast<uint32_t>(random_() % worker_count);
    if (random_() % 2 == 0 && !on_the_way[rank].empty()) {  // a result arrives
      const Outgoing frame = on_the_way[rank].front();
      on_the_way[rank].pop_front();
      const FrameHeader& header = frame.header;
      Worker& worker = workers[{header.op, rank}];
      const Model& model = models[{header.op, header.round}];
      ASSERT_EQ(header.type, FrameType::kResult);
      ASSERT_EQ(header.round, worker.round);
      ASSERT_EQ(header.offset, worker.results);
      const bool root = model.spec.kind == Kind::kBroadcast && model.spec.root == rank;
      ASSERT_EQ(frame.payload.size(), root ? 0 : header.count * sizeof(float));
      ASSERT_TRUE(std::ranges::equal(frame.payload, part_of(model.total, header)));
      worker.results += header.count;
      if (!header.last) continue;
      ASSERT_EQ(worker.results, model.spec.total_count);
      worker = {worker.round + 1};
      ++done;
      continue;
    }
    const uint64_t op = random_() % kOps;
    Worker& worker = workers[{op, rank}];
    if (worker.round == kRounds || worker.pushed_last) continue;
    if (worker.pushed - worker.results / kChunkCount >= kWindow) continue;
    const Model& model = models[{op, worker.round}];
    const FrameHeader header = push_header(rank, model.spec, worker.pushed++, worker.round, op);
    worker.pushed_last = header.last;
    ASSERT_TRUE(push(header, model.inputs[rank]).ok());
    for (const Outgoing& frame : sent_) on_the_way[frame.rank].push_back(frame);
    sent_.clear();
  }
  EXPECT_EQ(reducer_->completed_round_count(), kOps * kRounds);
  EXPECT_TRUE(std::ranges::all_of(on_the_way, &std::deque<Outgoing>::empty));
}

INSTANTIATE_TEST_SUITE_P(Seeds, Interleaving, testing::Range(0u, 200u));

}  // namespace
}  // namespace jaxhetero
