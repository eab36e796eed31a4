#include "xla_ffi/reducer/state_machine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/one_reducer.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/codec/float_code.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {
namespace {

// Two chunks of three workers can arrive in 90 orders; the total does not tell in which one.
TEST_F(ReducerTest, SumsInRankOrderWhateverArrivesFirst) {
  const OpSpec spec = f32_sum(kItemsPerChunk + 5);
  describe(spec);
  std::vector<Values> by_rank;
  for (uint32_t rank = 0; rank < 3; ++rank) by_rank.push_back(values_of(rank, spec.total_count));
  const Values total = total_of(by_rank);
  std::vector<uint32_t> arrivals = {0, 0, 1, 1, 2, 2};
  uint64_t round = 0;
  do {
    std::map<uint32_t, uint64_t> next_chunk;
    for (uint32_t rank : arrivals) {
      ASSERT_TRUE(push(rank, push_header(rank, spec, next_chunk[rank]++, round), by_rank[rank]).ok());
    }
    for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_EQ(take_results(rank, spec, round), total) << "round " << round;
    ++round;
  } while (std::ranges::next_permutation(arrivals).found);
  EXPECT_EQ(round, 90u);
  EXPECT_EQ(reducer_->completed_round_count(), 90u);
  EXPECT_TRUE(sent_.empty());
}

// The same bits whoever lends; what is lent is only read, and held until the total is there.
TEST_F(ReducerTest, SumsWhatIsLentWhereItIs) {
  const OpSpec spec = f32_sum(kItemsPerChunk);
  describe(spec);
  std::vector<Values> by_rank;
  for (uint32_t rank = 0; rank < 3; ++rank) by_rank.push_back(values_of(rank, spec.total_count));
  const Values total = total_of(by_rank);
  for (uint64_t lenders = 0; lenders < 8; ++lenders) {  // a bit for each rank
    std::vector<std::shared_ptr<Values>> contributions;
    for (const Values& values : by_rank) contributions.push_back(std::make_shared<Values>(values));
    for (uint32_t rank = 0; rank < 3; ++rank) {
      const FrameHeader header = push_header(rank, spec, 0, lenders);
      if ((lenders >> rank & 1) == 0) {
        ASSERT_TRUE(push(rank, header, by_rank[rank]).ok());
        continue;
      }
      const auto* data = reinterpret_cast<const std::byte*>(contributions[rank]->data());
      Result<bool> is_read = reducer_->take_lent(rank, header, {contributions[rank], data}, 0, sent_);
      ASSERT_TRUE(is_read.ok()) << is_read.status().message();
      EXPECT_TRUE(*is_read);
      EXPECT_EQ(contributions[rank].use_count(), rank == 2 ? 1 : 2);
    }
    for (uint32_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(take_results(rank, spec, lenders), total) << "lenders " << lenders;
      EXPECT_EQ(*contributions[rank], by_rank[rank]) << "lenders " << lenders;
      EXPECT_EQ(contributions[rank].use_count(), 1);
    }
  }
}

// The same bits whoever codes; and whoever does is answered a code, of the total in memory of its own.
TEST(CodedChunks, AreSummedAndAnswered) {
  constexpr uint32_t kItems = 1000;
  const auto bytes_of = [](const Values& values) { return std::as_bytes(std::span(values)); };
  std::vector<Values> by_rank(3, Values(kItems));
  for (uint32_t rank = 0; rank < 3; ++rank) {
    for (uint32_t i = 0; i < kItems; ++i) by_rank[rank][i] = 1.0f + static_cast<float>(i * 7 % 13 + rank) / 16;
  }
  const Values total = total_of(by_rank);
  for (uint32_t coders = 0; coders < 8; ++coders) {  // a bit for each rank
    ReducerStateMachine reducer({{"a", "b", "c"}, {3, 1, 0, kItems * sizeof(float), 2}});
    std::vector<Outgoing> sent;
    FrameHeader header;
    header.type = FrameType::kPush;
    header.op = kOp;
    header.last = true;
    header.count = kItems;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(reducer.describe_op(rank, header, {f32_sum(kItems), "op"}, sent).ok());
      std::span<const std::byte> payload = bytes_of(by_rank[rank]);
      std::vector<std::byte> code(most_coded_bytes(DType::kF32, payload.size()));
      header.is_coded = (coders >> rank & 1) != 0;
      if (header.is_coded) payload = std::span(code).first(encode(DType::kF32, payload, code));
      ASSERT_FALSE(payload.empty());
      header.payload_bytes = static_cast<uint32_t>(payload.size());
      Result<std::span<std::byte>> memory = reducer.start_push(rank, header, 0, sent);
      ASSERT_TRUE(memory.ok()) << memory.status().message();
      ASSERT_EQ(memory->size(), payload.size());
      std::ranges::copy(payload, memory->begin());
      ASSERT_TRUE(reducer.finish_push(rank, header, 0, sent).ok());
    }
    ASSERT_EQ(sent.size(), 3u);
    for (const Outgoing& frame : sent) {
      EXPECT_EQ(frame.header.is_coded, (coders >> frame.rank & 1) != 0);
      EXPECT_EQ(frame.header.payload_bytes, frame.payload.size());
      EXPECT_EQ(frame.payload.size() + frame.saved_bytes, kItems * sizeof(float));
      Values got(kItems);
      const auto out = std::as_writable_bytes(std::span(got));
      if (frame.header.is_coded) {
        ASSERT_TRUE(decode(DType::kF32, frame.payload, out));
      } else {
        std::ranges::copy(frame.payload, out.begin());
      }
      EXPECT_EQ(got, total) << "coders " << coders;
    }
  }
}

TEST_F(ReducerTest, RefusesChunksInAMalformedCode) {
  const OpSpec spec = f32_sum(kItemsPerChunk);
  describe(spec);
  FrameHeader header = push_header(0, spec, 0);
  header.is_coded = true;
  const Values values = values_of(0, kItemsPerChunk);
  const Status longer = push(0, header, std::as_bytes(std::span(values)));
  EXPECT_EQ(longer.code(), Code::kProtocol) << "a code is shorter than the elements";
  header.payload_bytes = 5;
  const std::vector<std::byte> waste(5, std::byte{0xff});
  const Status malformed = push(0, header, waste);
  EXPECT_EQ(malformed.code(), Code::kProtocol);
  EXPECT_NE(malformed.message().find("rank 0"), std::string::npos) << malformed.message();
  const OpSpec integers{Kind::kSum, DType::kI32, 0, 1, kItemsPerChunk, 99};
  describe(integers, 8);
  header.op = 8;
  EXPECT_EQ(push(0, header, waste).code(), Code::kProtocol) << "integers have no code";
  header.is_coded = false;
  header.has_numbers = true;
  EXPECT_EQ(push(0, header, waste).code(), Code::kProtocol) << "the op has no numbers of scales";
}

// The root's round is over before the others have got what is then not the root's to change.
TEST_F(ReducerTest, ReadsNoBroadcastWhereItIs) {
  const OpSpec rows = f32_rows(Kind::kGather, 3 * kItemsPerChunk);
  describe(rows, 5);
  const Values row = values_of(0, rows.total_count);
  EXPECT_FALSE(*reducer_->take_lent(0, push_header(0, rows, 0, 0, 5),
                                    {std::shared_ptr<void>(), std::as_bytes(std::span(row)).data()}, 0, sent_));
  const OpSpec spec = f32_broadcast(kItemsPerChunk, 1);
  describe(spec);
  const Values values = values_of(1, spec.total_count);
  const FrameHeader header = push_header(1, spec, 0);
  const std::shared_ptr<const std::byte> payload(std::shared_ptr<void>(), pushed_part(1, header, values).data());
  EXPECT_FALSE(*reducer_->take_lent(1, header, payload, 0, sent_));
  ASSERT_TRUE(push(1, header, values).ok());
  for (uint32_t rank : {0u, 2u}) ASSERT_TRUE(push(rank, push_header(rank, spec, 0)).ok());
  EXPECT_EQ(take_results(0, spec), values);
}

TEST_F(ReducerTest, AnswersEachChunkAsSoonAsItIsComplete) {
  const OpSpec spec = f32_sum(3 * kItemsPerChunk);
  describe(spec);
  for (uint64_t chunk = 0; chunk < 3; ++chunk) {
    for (uint32_t rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(sent_.empty());
      ASSERT_TRUE(push(rank, push_header(rank, spec, chunk)).ok());
    }
    for (uint32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(take(rank, FrameType::kResult).size(), 1u);
  }
}

// Three reducers that all began with one worker would fill its port of the switch.
TEST(Answers, BeginWithAnotherWorkerOfEachReducer) {
  for (uint32_t number = 0; number < 3; ++number) {
    ReducerStateMachine reducer({{"a", "b", "c"}, {3, 3, 0, kChunkBytes, kWindow}, {}, number});
    std::vector<Outgoing> sent;
    FrameHeader header;
    header.type = FrameType::kPush;
    header.op = kOp;
    header.last = true;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(reducer.describe_op(rank, header, {f32_sum(0), {}}, sent).ok());
      ASSERT_TRUE(reducer.start_push(rank, header, 0, sent).ok());
      ASSERT_TRUE(reducer.finish_push(rank, header, 0, sent).ok());
    }
    ASSERT_EQ(sent.size(), 3u);
    for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(sent[i].rank, (number + i) % 3);
  }
}

// The program calls with another shape each time. A smaller bucket may go through other reducers alone.
TEST_F(ReducerTest, TakesRoundsOfAnotherSpec) {
  uint64_t round = 0;
  for (const uint64_t count : {uint64_t{4}, uint64_t{3 * kItemsPerChunk}, uint64_t{5}, uint64_t{5}}) {
    const OpSpec spec = count == 5 ? f32_rows(Kind::kMax, count) : f32_sum(count);
    describe(spec, kOp, round);
    const Values values = values_of(1, count);
    for (uint64_t chunk = 0; chunk * kItemsPerChunk < count; ++chunk) {
      for (uint32_t rank = 0; rank < 3; ++rank) {
        ASSERT_TRUE(push(rank, push_header(rank, spec, chunk, round), values).ok());
      }
    }
    const Values total = count == 5 ? values : total_of({values, values, values});
    for (uint32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(take_results(rank, spec, round), total) << round;
    round += 2;  // the rounds between go elsewhere
  }
  EXPECT_EQ(reducer_->completed_round_count(), 4u);
}

TEST_F(ReducerTest, CompletesAnEmptyRound) {
  const OpSpec spec = f32_sum(0);
  describe(spec);
  for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(push(rank, push_header(rank, spec, 0)).ok());
  for (uint32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(take_results(rank, spec), Values{});
  EXPECT_EQ(reducer_->completed_round_count(), 1u);
}

TEST_F(ReducerTest, GivesTheRootsValuesToTheOthers) {
  constexpr uint32_t kRoot = 1;
  const OpSpec spec = f32_broadcast(kItemsPerChunk + 3, kRoot);
  describe(spec);
  const Values values = values_of(kRoot, spec.total_count);
  for (uint32_t rank : {2u, 1u, 0u}) {
    for (uint64_t chunk : {0, 1}) ASSERT_TRUE(push(rank, push_header(rank, spec, chunk), values).ok());
  }
  for (uint32_t rank : {0u, 2u}) EXPECT_EQ(take_results(rank, spec), values);
  EXPECT_EQ(take_results(kRoot, spec), Values{}) << "the root has them already";
}

// Rows of other sizes than chunks, so that some chunks lie in two rows.
constexpr uint64_t kRowCount = 2 * kItemsPerChunk + 5;

TEST_F(ReducerTest, GivesEachRankItsRowOfTheSum) {
  const OpSpec spec = f32_rows(Kind::kScatter, 3 * kRowCount);
  describe(spec);
  std::vector<Values> by_rank;
  for (uint32_t rank = 0; rank < 3; ++rank) by_rank.push_back(values_of(rank, spec.total_count));
  const Values total = total_of(by_rank);
  for (uint64_t chunk = 0; chunk * kItemsPerChunk < spec.total_count; ++chunk) {
    for (uint32_t rank : {1u, 2u, 0u}) ASSERT_TRUE(push(rank, push_header(rank, spec, chunk), by_rank[rank]).ok());
  }
  for (uint32_t rank = 0; rank < 3; ++rank) {
    const auto row = std::span(total).subspan(rank * kRowCount, kRowCount);
    EXPECT_EQ(take_results(rank, spec), Values(row.begin(), row.end())) << rank;
  }
}

TEST_F(ReducerTest, GivesTheRowsOfAllToEachRank) {
  const OpSpec spec = f32_rows(Kind::kGather, 3 * kRowCount);
  describe(spec);
  const Values values = values_of(0, spec.total_count);
  uint64_t pushed_bytes = 0;
  for (uint64_t chunk = 0; chunk * kItemsPerChunk < spec.total_count; ++chunk) {
    for (uint32_t rank : {2u, 0u, 1u}) {
      const FrameHeader header = push_header(rank, spec, chunk);
      pushed_bytes += header.payload_bytes;
      ASSERT_TRUE(push(rank, header, values).ok());
    }
  }
  EXPECT_EQ(pushed_bytes, spec.total_count * sizeof(float));
  for (uint32_t rank = 0; rank < 3; ++rank) {
    uint64_t end = 0;
    for (const Outgoing& frame : take(rank, FrameType::kResult)) {
      EXPECT_EQ(frame.header.offset, end);
      end += frame.header.count;
      const bool is_own = frame.header.offset >= rank * kRowCount && end <= (rank + 1) * kRowCount;
      EXPECT_EQ(frame.payload.size(), is_own ? 0 : frame.header.count * sizeof(float));
      EXPECT_TRUE(std::ranges::equal(frame.payload, answered_part(rank, frame.header, values)));
    }
    EXPECT_EQ(end, spec.total_count);
  }
}

TEST_F(ReducerTest, CopiesNoChunkOfOneRow) {
  const OpSpec spec = f32_rows(Kind::kGather, 3 * kItemsPerChunk);
  describe(spec);
  const Values values = values_of(0, spec.total_count);
  for (uint32_t chunk = 0; chunk < 3; ++chunk) {
    std::span<const std::byte> pushed;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      const FrameHeader header = push_header(rank, spec, chunk);
      Result<std::span<std::byte>> memory = reducer_->start_push(rank, header, 0, sent_);
      ASSERT_TRUE(memory.ok());
      if (rank == chunk) pushed = *memory;
      ASSERT_TRUE(reducer_->finish_push(rank, header, 0, sent_).ok());
    }
    for (uint32_t rank = 0; rank < 3; ++rank) {
      const std::vector<Outgoing> frames = take(rank, FrameType::kResult);
      ASSERT_EQ(frames.size(), 1u);
      EXPECT_EQ(frames[0].payload.data(), pushed.data());
      EXPECT_EQ(frames[0].payload.size(), rank == chunk ? 0 : pushed.size());
    }
  }
}

// Results may still be on their way while later rounds run, and even when the reducer is gone.
TEST_F(ReducerTest, LeavesTheMemoryOfAResultAlone) {
  const OpSpec spec = f32_sum(kItemsPerChunk);
  describe(spec);
  std::vector<Outgoing> kept;
  for (uint64_t round = 0; round < 20; ++round) {
    for (uint32_t rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(
          push(rank, push_header(rank, spec, 0, round), Values(kItemsPerChunk, static_cast<float>(round))).ok());
    }
    kept.push_back(take(0, FrameType::kResult).at(0));
  }
  reducer_.reset();
  for (size_t round = 0; round < kept.size(); ++round) {
    const Values expected(kItemsPerChunk, 3.0f * static_cast<float>(round));
    EXPECT_TRUE(std::ranges::equal(kept[round].payload, std::as_bytes(std::span(expected))));
  }
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
  const OpSpec spec = f32_sum(4);
  describe(spec);
  now_ms_ = 1000;
  ASSERT_TRUE(push(1, push_header(1, spec, 0)).ok());
  now_ms_ += kPatience - 1;
  EXPECT_EQ(report(1), "");
  now_ms_ += 1;
  EXPECT_EQ(report(1), "rank 0 (host a), rank 2 (host c)");
  ASSERT_TRUE(push(0, push_header(0, spec, 0)).ok());
  EXPECT_EQ(report(0), "rank 2 (host c)");
  EXPECT_EQ(report(2), "") << "who is late himself need not be told";
  ASSERT_TRUE(push(2, push_header(2, spec, 0)).ok());
  now_ms_ += 10 * kPatience;
  EXPECT_EQ(report(0), "") << "nobody waits between rounds";
}

TEST_F(LateTest, CountsFromTheLastProgress) {
  const OpSpec spec = f32_sum(3 * kItemsPerChunk);
  describe(spec);
  for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(push(rank, push_header(rank, spec, 0)).ok());
  now_ms_ += kPatience;
  for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(push(rank, push_header(rank, spec, 1)).ok());
  ASSERT_TRUE(push(0, push_header(0, spec, 2)).ok());
  now_ms_ += kPatience - 1;
  EXPECT_EQ(report(0), "");
  now_ms_ += 1;
  EXPECT_EQ(report(0), "rank 1 (host b), rank 2 (host c)");
}

TEST_F(LateTest, TellsTheSlowFromTheStuck) {
  const OpSpec spec = f32_sum(4);
  describe(spec);
  ASSERT_TRUE(push(1, push_header(1, spec, 0)).ok());
  now_ms_ += kPatience;
  const auto moving_count = [&](const std::vector<bool>& moving) {
    reducer_->report_late(now_ms_, kPatience, sent_, moving);
    const std::vector<Outgoing> frames = take(1, FrameType::kLate);
    sent_.clear();
    return frames.empty() ? -1 : static_cast<int>(decode_late(frames[0].header)->moving_count);
  };
  EXPECT_EQ(moving_count({false, true, false}), 0) << "it does not wait for itself";
  EXPECT_EQ(moving_count({true, false, false}), 1);
  EXPECT_EQ(moving_count({true, false, true}), 2);
}

// Two groups at once, which share a worker; the others hear nothing of them.
TEST_F(ReducerTest, SumsOverTheGroupAlone) {
  const OpSpec first = f32_sum(kItemsPerChunk + 5, {0, 2});
  const OpSpec second = f32_sum(kItemsPerChunk + 5, {1, 2});
  describe(first, 1);
  describe(second, 2);
  for (const auto& [op, rank] : {std::pair(1u, 2u), {2u, 1u}, {1u, 0u}, {2u, 2u}}) {
    for (const uint64_t chunk : {0, 1}) {
      const OpSpec& spec = op == 1 ? first : second;
      ASSERT_TRUE(push(rank, push_header(rank, spec, chunk, 0, op), values_of(rank, spec.total_count)).ok());
    }
  }
  const auto total = [&](uint32_t a, uint32_t b) {
    return total_of({values_of(a, first.total_count), values_of(b, first.total_count)});
  };
  for (const auto& [op, ranks] : {std::pair(1u, std::pair(0u, 2u)), {2u, {1u, 2u}}}) {
    std::vector<Outgoing> of_other_op;
    std::erase_if(sent_, [&](const Outgoing& frame) {
      if (frame.header.op != op) of_other_op.push_back(frame);
      return frame.header.op != op;
    });
    for (const uint32_t rank : {ranks.first, ranks.second}) {
      EXPECT_EQ(take_results(rank, first, 0, op), total(ranks.first, ranks.second)) << "op " << op << " rank " << rank;
    }
    EXPECT_TRUE(sent_.empty()) << "op " << op;
    sent_ = of_other_op;
  }
}

TEST_F(LateTest, NamesMembersOfTheGroupAlone) {
  const OpSpec spec = f32_sum(4, {1, 2});
  describe(spec);
  ASSERT_TRUE(push(2, push_header(2, spec, 0)).ok());
  now_ms_ += kPatience;
  EXPECT_EQ(report(2), "rank 1 (host b)");
  EXPECT_EQ(report(0), "");
  ASSERT_EQ(reducer_->late_workers(now_ms_).size(), 1u);
  EXPECT_EQ(reducer_->late_workers(now_ms_)[0].rank, 1u);
}

// They run different programs: each waits in a round that the other one does not come to, maybe at another reducer.
TEST_F(LateTest, TellsInWhichRoundTheMissingWaitThemselves) {
  const OpSpec spec = f32_sum(4);
  describe(spec);
  ASSERT_TRUE(push(0, push_header(0, spec, 0)).ok());
  ASSERT_TRUE(push(2, push_header(2, spec, 0)).ok());
  now_ms_ += kPatience;
  reducer_->note_waiting(1, "an evaluation round 3", now_ms_);
  EXPECT_EQ(report(0), "rank 1 (host b), which waits in an evaluation round 3 instead");
  now_ms_ += kPatience;
  EXPECT_EQ(report(0), "rank 1 (host b)") << "it has not said so again";
  reducer_->note_waiting(1, "op7 of 0 round 0", now_ms_);
  EXPECT_EQ(report(0), "rank 1 (host b)") << "it is in the same round, on another strand";
}

// Both have come to the same call, each with other workers, and neither will come to the other's.
TEST_F(LateTest, TellsWhoWaitsInAnotherGroup) {
  OpSpec spec = f32_sum(4, {0, 1});
  OpSpec other = f32_sum(4, {0, 1, 2});
  spec.site = other.site = 5;
  for (const uint64_t site : {6, 5}) {
    other.site = site;
    const uint64_t op = site;
    ASSERT_TRUE(describe(1, other, op).ok());
    ASSERT_TRUE(push(1, push_header(1, other, 0, 0, op)).ok());
  }
  ASSERT_TRUE(describe(0, spec).ok());
  ASSERT_TRUE(push(0, push_header(0, spec, 0)).ok());
  now_ms_ += kPatience;
  reducer_->report_late(now_ms_, kPatience, sent_);
  std::vector<Outgoing> frames = take(0, FrameType::kLate);
  ASSERT_EQ(frames.size(), 1u);
  EXPECT_EQ(decode_text(frames[0].payload), "rank 1 (host b), which waits in op5 of 1 instead");
  EXPECT_TRUE(decode_late(frames[0].header)->disagree);
  // It comes: it was only late.
  ASSERT_TRUE(describe(1, spec).ok());
  sent_.clear();
  reducer_->report_late(now_ms_, kPatience, sent_);
  frames = take(0, FrameType::kLate);
  ASSERT_EQ(frames.size(), 1u);
  EXPECT_EQ(decode_text(frames[0].payload), "rank 1 (host b)");
  EXPECT_FALSE(decode_late(frames[0].header)->disagree);
}

// A worker at its window's edge in every round: memory comes from a bounded set of buffers.
TEST_F(ReducerTest, TakesNoMoreMemoryThanTheWindows) {
  std::set<const std::byte*> buffers;
  const OpSpec spec = f32_sum(6 * kItemsPerChunk);
  describe(spec);
  for (uint64_t round = 0; round < 50; ++round) {
    for (uint64_t chunk = 0; chunk < 6 + kWindow; ++chunk) {
      for (uint32_t rank = 0; rank < 3; ++rank) {
        // Rank 0 runs ahead by a window, the others follow.
        const uint64_t own = rank == 0 ? chunk : chunk - (kWindow - 1);
        if (own >= 6) continue;
        const FrameHeader header = push_header(rank, spec, own, round);
        Result<std::span<std::byte>> memory = reducer_->start_push(rank, header, 0, sent_);
        ASSERT_TRUE(memory.ok()) << memory.status().message();
        buffers.insert(memory->data());
        ASSERT_TRUE(reducer_->finish_push(rank, header, 0, sent_).ok());
      }
      sent_.clear();  // as when the socket has taken them
    }
  }
  EXPECT_EQ(reducer_->completed_round_count(), 50u);
  EXPECT_LE(buffers.size(), 3 * kWindow);
}

// Workers and groups of any number, any ops, rounds, sizes and kinds, in a random order of what may happen next. The
// model: per op, workers push or lend chunks in order, at most a window ahead of the results they have; a round's total
// is a plain loop.
class Interleaving : public ReducerTest, public testing::WithParamInterface<uint32_t> {
 protected:
  static constexpr uint64_t kOps = 3;
  static constexpr uint64_t kRounds = 4;

  Interleaving() : ReducerTest(GetParam() % 5 + 1), random_(GetParam()) {}

  struct Model {                 // of a round
    std::vector<Values> inputs;  // by place in the group
    Values total;
  };
  struct Worker {  // at one op
    uint64_t round = 0;
    uint64_t pushed = 0;   // chunks of this round
    uint64_t results = 0;  // elements of this round
    bool pushed_last = false;
  };

  OpSpec make_spec() {
    const std::vector<uint32_t> group = make_group();
    const uint64_t count = random_() % 4 == 0 ? 0 : random_() % (5 * kItemsPerChunk);
    const uint32_t workers = group.empty() ? reducer_->worker_count() : static_cast<uint32_t>(group.size());
    OpSpec spec = make_spec(count, workers);
    spec.group = group;
    if (spec.kind == Kind::kBroadcast) spec.root = spec.rank_at(spec.root);
    return spec;
  }

  // In half of the cases, all workers.
  std::vector<uint32_t> make_group() {
    std::vector<uint32_t> group;
    if (random_() % 2 == 0) return group;
    for (uint32_t rank = 0; rank < reducer_->worker_count(); ++rank) {
      if (random_() % 2 == 0) group.push_back(rank);
    }
    return group;
  }

  OpSpec make_spec(uint64_t count, uint32_t workers) {
    switch (random_() % 6) {
      case 0:
      case 1:
        return f32_broadcast(count, random_() % workers);
      case 2:
        return f32_rows(Kind::kScatter, count / workers * workers);
      case 3:
        return f32_rows(Kind::kGather, count / workers * workers);
      default:
        return f32_sum(count);
    }
  }

  Model make_model(const OpSpec& spec, uint64_t op, uint64_t round) {
    Model model;
    for (const uint32_t rank : members(spec)) {
      model.inputs.push_back(values_of(rank, spec.total_count, static_cast<uint32_t>(op * kRounds + round)));
    }
    model.total = total_of(model.inputs);
    if (spec.kind == Kind::kBroadcast) model.total = model.inputs[spec.place_of(spec.root)];
    if (spec.kind == Kind::kGather) {
      const uint64_t row = spec.total_count / model.inputs.size();
      for (uint64_t i = 0; i < spec.total_count; ++i) model.total[i] = model.inputs[i / row][i];
    }
    return model;
  }

  std::mt19937 random_;
};

TEST_P(Interleaving, GivesWhatThePlainLoopGives) {
  const uint32_t worker_count = reducer_->worker_count();
  std::vector<OpSpec> specs;  // by op
  std::map<std::pair<uint64_t, uint64_t>, Model> models;
  std::map<std::pair<uint64_t, uint32_t>, Worker> workers;
  uint64_t due = 0;
  for (uint64_t op = 0; op < kOps; ++op) {
    specs.push_back(make_spec());
    describe(specs[op], op);
    due += members(specs[op]).size() * kRounds;
    for (uint64_t round = 0; round < kRounds; ++round) models[{op, round}] = make_model(specs[op], op, round);
  }
  std::vector<std::deque<Outgoing>> on_the_way(worker_count);
  for (uint64_t done = 0; done < due;) {
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
      ASSERT_EQ(frame.payload.size(), header.payload_bytes);
      ASSERT_TRUE(std::ranges::equal(frame.payload, answered_part(rank, header, model.total)));
      worker.results += header.count;
      if (!header.last) continue;
      ASSERT_EQ(worker.results, specs[header.op].total_count);
      worker = {worker.round + 1};
      ++done;
      continue;
    }
    const uint64_t op = random_() % kOps;
    if (!specs[op].has_member(rank)) continue;
    Worker& worker = workers[{op, rank}];
    if (worker.round == kRounds || worker.pushed_last) continue;
    if (worker.pushed - worker.results / kItemsPerChunk >= kWindow) continue;
    const Model& model = models[{op, worker.round}];
    const FrameHeader header = push_header(rank, specs[op], worker.pushed++, worker.round, op);
    worker.pushed_last = header.last;
    const bool is_lent = random_() % 2 == 0 && header.payload_bytes > 0;
    const Values& input = model.inputs[specs[op].place_of(rank)];
    ASSERT_TRUE((is_lent ? lend(rank, header, input) : push(rank, header, input)).ok());
    for (const Outgoing& frame : sent_) on_the_way[frame.rank].push_back(frame);
    sent_.clear();
  }
  EXPECT_EQ(reducer_->completed_round_count(), kOps * kRounds);
  EXPECT_TRUE(std::ranges::all_of(on_the_way, &std::deque<Outgoing>::empty));
}

INSTANTIATE_TEST_SUITE_P(Seeds, Interleaving, testing::Range(0u, 200u));

}  // namespace
}  // namespace jaxhetero
