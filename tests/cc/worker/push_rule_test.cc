#include "xla_ffi/worker/push_rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/shard_plan.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr uint32_t kItemsPerChunk = 16;

// A link whose chunks go nowhere: the test answers them.
class QuietLink final : public ChunkSender {
 public:
  explicit QuietLink(const JobShape& job) : rule_(job) {}

  void start(Round& round, size_t segment) { rule_.start_segment(round, round.segments[segment], *this); }
  void push_chunks() { rule_.push_chunks(*this); }
  void end_round(const Round& round) { rule_.end_round(round); }
  void feed_starved(Round::Time now) { rule_.feed_starved(now, *this); }
  // The total of the segment's oldest chunk is back.
  void answer(Round& round, size_t segment) {
    const Range chunk = round.segments[segment].awaited_chunk();
    FrameHeader header;
    header.count = static_cast<uint32_t>(chunk.count);
    header.last = chunk.offset + chunk.count == round.segments[segment].end();
    rule_.finish_result(round, round.segments[segment], header, now_ += milliseconds(1), *this);
  }

  std::vector<FrameHeader> sent;

 private:
  Sent send_chunk(const Round& /*round*/, const FrameHeader& header) override {
    sent.push_back(header);
    return {sent.size(), now_};
  }

  PushRule rule_;
  Round::Time now_{std::chrono::seconds(1)};
};

class PushRuleTest : public testing::Test {
 protected:
  PushRuleTest() { job_.window_chunks = 2; }

  // A round with a shard of so many chunks on every link.
  Round& round_of(uint64_t number, const std::vector<uint64_t>& chunk_counts) {
    Round& round = *rounds_.emplace_back(std::make_unique<Round>());
    round.number = number;
    uint64_t offset = 0;
    for (const uint64_t chunks : chunk_counts) {
      const auto reducer = static_cast<uint32_t>(round.segments.size());
      round.segments.emplace_back(Shard{reducer, offset, chunks * kItemsPerChunk}, kItemsPerChunk);
      offset = round.segments.back().end();
    }
    round.slowest_count = round.segments.size();
    round.request.spec.total_count = offset;
    round.request.stake = stake_of(round.request.spec, 2, 0);
    return round;
  }

  // Two rounds that begin at once. The first takes the whole window.
  std::pair<Round&, Round&> start_two(QuietLink& link) {
    std::pair<Round&, Round&> rounds(round_of(0, {8}), round_of(1, {8}));
    for (Round* round : {&rounds.first, &rounds.second}) {
      round->times.started_at = Round::Time(std::chrono::seconds(1));
      link.start(*round, 0);
    }
    return rounds;
  }

  // How many chunks are under way on the only link of a round when 50 totals are back.
  static size_t under_way_after_totals(QuietLink& link, Round& round) {
    for (int answered = 0; answered < 50; ++answered) {
      const double earlier_part = round.segments[0].done_part();
      link.answer(round, 0);
      round.note_slowest(earlier_part);
      link.push_chunks();
    }
    return round.segments[0].in_flight.size();
  }

  JobShape job_;
  std::deque<std::unique_ptr<Round>> rounds_;
};

TEST_F(PushRuleTest, KeepsAWindowUnderWay) {
  Round& round = round_of(0, {5});
  QuietLink link(job_);
  link.start(round, 0);
  EXPECT_EQ(link.sent.size(), 2u);
  for (size_t answered = 1; answered <= 5; ++answered) {
    const double earlier_part = round.segments[0].done_part();
    link.answer(round, 0);
    EXPECT_TRUE(round.note_slowest(earlier_part)) << "it is alone";
    link.push_chunks();
    EXPECT_EQ(link.sent.size(), std::min<size_t>(answered + 2, 5));
  }
  EXPECT_TRUE(round.segments[0].done);
  EXPECT_TRUE(link.sent.back().last);
  EXPECT_EQ(link.sent.back().offset, 4 * kItemsPerChunk);
}

TEST_F(PushRuleTest, HeadersAloneCutARoundAsLittleAsTheyMay) {
  const auto chunk_bytes = [](bool resumes, const ShardPlan& plan) {
    Round round;
    round.request.spec = {.kind = Kind::kMeasure, .total_count = 1 << 20, .state = {.number = 1, .resumes = resumes}};
    round.cut(plan);
    return round.segments[0].items_per_chunk * sizeof(float);
  };
  EXPECT_EQ(chunk_bytes(true, ShardPlan({1})), kMostAutoChunkBytes);
  EXPECT_LT(chunk_bytes(false, ShardPlan({1})), kMostAutoChunkBytes) << "it carries gradients";
  EXPECT_EQ(chunk_bytes(true, ShardPlan({1}, {.chunk_bytes = 4096})), 4096u);
}

TEST_F(PushRuleTest, AnUrgentRoundWaitsForAWindowAndNotForTheQueue) {
  Round& long_one = round_of(0, {8});
  Round& urgent = round_of(1, {2});
  long_one.request.priority = 2;
  urgent.request.priority = 1;
  long_one.request.op = 7;
  urgent.request.op = 8;
  QuietLink link(job_);
  link.start(long_one, 0);
  link.start(urgent, 0);
  EXPECT_EQ(link.sent.size(), 4u) << "its own window";
  link.answer(long_one, 0);
  link.answer(urgent, 0);
  link.answer(urgent, 0);
  EXPECT_TRUE(urgent.note_slowest(0)) << "it is alone";
  link.push_chunks();
  EXPECT_EQ(std::ranges::count(link.sent, 8u, &FrameHeader::op), 2);
  EXPECT_EQ(link.sent[2].op, 8u);
  EXPECT_EQ(link.sent[3].op, 8u);
  EXPECT_EQ(link.sent[4].op, 7u) << "once the urgent one has room to spare";
}

TEST_F(PushRuleTest, PushesTheEarlierRoundFirst) {
  Round& later = round_of(1, {3});
  Round& earlier = round_of(0, {3});
  QuietLink link(job_);
  link.start(later, 0);
  link.start(earlier, 0);
  ASSERT_EQ(link.sent.size(), 4u) << "a later round cannot hold up an earlier one";
  link.answer(later, 0);
  EXPECT_EQ(link.sent.size(), 4u) << "the earlier round has the whole window";
  link.answer(earlier, 0);
  EXPECT_EQ(link.sent.back().round, 0u);
}

// As a measure and an update after it: the one brings nothing, and the other one nothing but a header.
TEST_F(PushRuleTest, RoundsThatGoOneWayLeaveTheOtherWayToOthers) {
  Round& sends = round_of(0, {4});
  Round& receives = round_of(1, {4});
  Round& both = round_of(2, {4});
  sends.request.stake.results = {};
  receives.request.stake.operands = {};
  QuietLink link(job_);
  link.start(sends, 0);
  EXPECT_EQ(link.sent.size(), 2u);
  link.start(both, 0);
  EXPECT_EQ(link.sent.size(), 2u) << "there is no room for what it sends";
  link.start(receives, 0);
  ASSERT_EQ(link.sent.size(), 4u);
  EXPECT_EQ(link.sent.back().round, 1u);
}

// Here a path carries a chunk a millisecond, so two or three fill it.
TEST_F(PushRuleTest, RoundsThatGoOneWayHaveMoreUnderWay) {
  job_.window_chunks = 0;
  const auto under_way = [&](auto drop) {
    Round& round = round_of(0, {100});
    drop(round.request.stake);
    QuietLink link(job_);
    link.start(round, 0);
    return under_way_after_totals(link, round);
  };
  EXPECT_EQ(under_way([](Stake&) {}), 3u);
  EXPECT_EQ(under_way([](Stake& stake) { stake.results = {}; }), 8u);
  EXPECT_EQ(under_way([](Stake& stake) { stake.operands = {}; }), 8u);
}

// Its chunks wait behind those for small shards. But a reducer holds no more than the job's shape says.
TEST_F(PushRuleTest, ALinkThatTheOthersWaitForHasMoreUnderWay) {
  const auto under_way = [&](bool is_uneven) {
    Round& round = round_of(0, {100});
    round.is_uneven = is_uneven;
    QuietLink link(job_);
    link.start(round, 0);
    EXPECT_EQ(round.segments[0].in_flight.size(), 2u) << "before any total is back";
    return under_way_after_totals(link, round);
  };
  EXPECT_EQ(under_way(true), 2u);
  job_.window_chunks = 0;
  EXPECT_LT(under_way(false), under_way(true));
}

// As at a worker whose weights are not those that are stored.
TEST_F(PushRuleTest, ARoundOfHeadersKeepsItsOwnWindow) {
  Round& round = round_of(0, {4});
  round.request.stake.operands = round.request.stake.results = {};
  QuietLink link(job_);
  link.start(round, 0);
  EXPECT_EQ(link.sent.size(), 2u);
}

TEST_F(PushRuleTest, NoLinkGetsMoreThanAWindowAhead) {
  Round& round = round_of(0, {64, 64});
  std::deque<QuietLink> links;
  for (size_t i = 0; i < 2; ++i) links.emplace_back(job_).start(round, i);
  while (round.segments[0].in_flight_bytes > 0) {
    const double earlier_part = round.segments[0].done_part();
    links[0].answer(round, 0);
    EXPECT_FALSE(round.note_slowest(earlier_part)) << "the other link has no total";
  }
  EXPECT_EQ(links[0].sent.size(), 4u);
  EXPECT_EQ(links[1].sent.size(), 2u);
  links[1].answer(round, 1);
  EXPECT_TRUE(round.note_slowest(0));
  links[0].push_chunks();
  EXPECT_EQ(links[0].sent.size(), 5u);
}

// Also not by beginning later rounds, where shards are said to be unequal.
TEST_F(PushRuleTest, NoLinkGetsMoreThanAWindowAheadInSeveralRounds) {
  Round& first = round_of(0, {4, 4});
  Round& second = round_of(1, {4, 4});
  first.is_uneven = true;
  QuietLink fast(job_);
  QuietLink slow(job_);
  for (Round* round : {&first, &second}) {
    fast.start(*round, 0);
    slow.start(*round, 1);
  }
  const auto answer = [&](QuietLink& link, size_t segment) {
    const double earlier_part = first.segments[segment].done_part();
    link.answer(first, segment);
    if (first.note_slowest(earlier_part)) fast.push_chunks();
  };
  for (int i = 0; i < 3; ++i) answer(fast, 0);
  EXPECT_EQ(fast.sent.size(), 5u) << "three of the first round, which is ahead, and two of the second";
  answer(slow, 1);
  EXPECT_EQ(fast.sent.size(), 6u);
  answer(fast, 0);
  EXPECT_TRUE(first.segments[0].done);
  fast.answer(second, 0);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(fast.sent.size(), 6u);
    answer(slow, 1);
  }
  EXPECT_EQ(fast.sent.size(), 7u) << "a window";
  answer(slow, 1);
  fast.end_round(first);
  slow.end_round(first);
}

TEST_F(PushRuleTest, FeedsARoundThatGetsNoTurn) {
  QuietLink link(job_);
  const Round& first = start_two(link).first;
  ASSERT_EQ(link.sent.size(), 2u);
  link.feed_starved(first.times.started_at + milliseconds(1));
  EXPECT_EQ(link.sent.size(), 2u) << "it does not stall yet";
  link.feed_starved(first.times.started_at + milliseconds(100));
  ASSERT_EQ(link.sent.size(), 3u);
  EXPECT_EQ(link.sent.back().round, 1u);
}

// As after a moment in which the network carried nothing: no round may outgrow the window that it shares.
TEST_F(PushRuleTest, ARoundThatWasFedGoesOnInItsTurn) {
  QuietLink link(job_);
  const auto [first, second] = start_two(link);
  link.feed_starved(first.times.started_at + milliseconds(100));
  ASSERT_EQ(link.sent.back().round, 1u);
  link.answer(first, 0);
  const size_t sent = link.sent.size();
  link.answer(second, 0);
  EXPECT_EQ(link.sent.size(), sent);
}

// The other worker is at the third round, and begins no other before that is over.
TEST_F(PushRuleTest, ARoundThatWasFedGoesOnToItsEnd) {
  QuietLink link(job_);
  std::vector<Round*> rounds;
  for (uint64_t number = 0; number < 4; ++number) {
    rounds.push_back(&round_of(number, {8}));
    rounds.back()->times.started_at = Round::Time(std::chrono::seconds(1));
    link.start(*rounds.back(), 0);
  }
  Round& wanted = *rounds[2];
  for (auto now = wanted.times.started_at; wanted.segments[0].in_flight.empty(); now += milliseconds(30)) {
    ASSERT_LT(now, wanted.times.started_at + milliseconds(200));
    link.feed_starved(now);
  }
  while (!wanted.segments[0].done) {
    ASSERT_FALSE(wanted.segments[0].in_flight.empty());
    const double earlier_part = wanted.segments[0].done_part();
    link.answer(wanted, 0);
    wanted.note_slowest(earlier_part);
    link.push_chunks();
    EXPECT_LE(wanted.segments[0].in_flight.size(), 2u) << "a window";
  }
  EXPECT_EQ(rounds[0]->segments[0].in_flight.size(), 2u);
  EXPECT_EQ(rounds[1]->segments[0].in_flight.size(), 1u);
}

}  // namespace
}  // namespace jaxhetero
