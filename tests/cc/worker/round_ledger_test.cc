#include "xla_ffi/worker/round_ledger.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/printing.h"
#include "xla_ffi/base/counters.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/worker/callback_threads.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/timeline.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

class RoundLedgerTest : public testing::Test {
 protected:
  std::shared_ptr<WholeRound> open(size_t part_count) {
    RoundRequest request;
    request.description = "an op";
    request.spec.total_count = 100;
    request.requested_at = at(0);
    request.done = [this](const Status& status) { done_.set_value(status); };
    return ledger_->open(request, part_count);
  }
  [[nodiscard]] RoundRecord::Time at(int ms) const { return begin_ + milliseconds(ms); }
  void finish(WholeRound& round, int first_ms, int end_ms, const std::vector<RoundRecord::Part>& parts = {}) {
    ledger_->finish_part(round, {5, at(end_ms), {}, 0}, at(first_ms), parts);
  }
  [[nodiscard]] bool is_done() { return end_.wait_for(milliseconds(0)) == std::future_status::ready; }

  const RoundRecord::Time begin_ = EventLoop::Clock::now();
  std::promise<Status> done_;
  std::future<Status> end_ = done_.get_future();
  Counters counters_;
  Timeline timeline_;
  int empty_count_ = 0;
  CallbackThreads callback_threads_;
  std::optional<RoundLedger> ledger_{std::in_place, counters_, timeline_, callback_threads_,
                                     [this] { ++empty_count_; }};
};

TEST_F(RoundLedgerTest, EndsARoundWithItsLastPart) {
  const auto round = open(2);
  EXPECT_FALSE(ledger_->is_empty());
  ledger_->start_part(*round, 3, at(1));
  ledger_->start_part(*round, 3, at(2));
  finish(*round, 5, 20, {{0, 60, at(19)}, {1, 140, at(20)}});
  EXPECT_FALSE(is_done());
  EXPECT_EQ(ledger_->circumstances(), "; running: an op round 3; last completed: none");
  finish(*round, 4, 30, {{0, 200, at(30)}});
  EXPECT_TRUE(end_.get().ok());
  EXPECT_TRUE(ledger_->is_empty());
  EXPECT_EQ(empty_count_, 1);
  EXPECT_EQ(ledger_->circumstances(), "; last completed: an op round 3");
  EXPECT_EQ(counters_.round_count, 1u);
  EXPECT_EQ(counters_.bucket_bytes, 400u);
  EXPECT_EQ(counters_.busy_us, 29'000u);
  const Timeline::Entries entries = timeline_.since(0);
  ASSERT_EQ(entries.rounds.size(), 1u);
  const RoundRecord& record = entries.rounds[0].record;
  EXPECT_EQ(record.requested, at(0));
  EXPECT_EQ(record.first_push, at(1));
  EXPECT_EQ(record.first_result, at(4));
  EXPECT_EQ(record.end, at(30));
  ASSERT_EQ(entries.rounds[0].parts.size(), 2u) << "one for each reducer";
  EXPECT_EQ(entries.rounds[0].parts[0].bytes, 260u);
  EXPECT_EQ(entries.rounds[0].parts[0].end, at(30));
}

// The network may still touch the memory of the other parts.
TEST_F(RoundLedgerTest, EndsAFailedRoundOnlyWhenAllPartsAreGivenUp) {
  const auto round = open(2);
  ledger_->start_part(*round, 0, at(1));
  ledger_->give_up_part(*round, {Code::kReducerLost, "the first reason"});
  EXPECT_FALSE(is_done());
  ledger_->give_up_part(*round, {Code::kInternal, "another one"});
  EXPECT_EQ(end_.get().message(), "the first reason");
  EXPECT_EQ(counters_.round_count, 0u);
  EXPECT_TRUE(timeline_.since(0).rounds.empty());
  EXPECT_EQ(ledger_->last_completed(), "none");
}

TEST_F(RoundLedgerTest, IsBusyOnceHoweverManyRoundsRun) {
  const auto first = open(1);
  const auto second = ledger_->open_replay();
  RoundRequest request;
  const auto third = ledger_->open(request, 1);
  ledger_->start_part(*first, 0, at(0));
  ledger_->start_part(*second, 0, at(0));
  ledger_->start_part(*third, 0, at(10));
  finish(*first, 5, 20);
  finish(*third, 5, 25);
  EXPECT_FALSE(ledger_->is_empty()) << "the replay is not over";
  EXPECT_EQ(empty_count_, 0);
  finish(*second, 5, 40);
  EXPECT_EQ(empty_count_, 1);
  EXPECT_EQ(counters_.busy_us, 25'000u);
  EXPECT_EQ(counters_.round_count, 2u) << "replays are others' rounds";
}

TEST_F(RoundLedgerTest, GivesTheRecordToWhoWantsIt) {
  RoundRequest request;
  std::vector<uint64_t> numbers;
  request.recorded = [&](const RoundOutcome& outcome) {
    numbers.push_back(outcome.entry.record.number);
    ASSERT_EQ(outcome.strand_parts.size(), 1u);
    EXPECT_EQ(outcome.strand_parts[0].strand, 5u);
    EXPECT_EQ(outcome.strand_parts[0].end, at(2));
  };
  const auto round = ledger_->open(request, 1);
  ledger_->start_part(*round, 8, at(0));
  finish(*round, 1, 2);
  EXPECT_EQ(numbers, std::vector<uint64_t>{8});
  EXPECT_TRUE(timeline_.since(0).rounds.empty());
  EXPECT_EQ(counters_.round_count, 0u);
}

}  // namespace
}  // namespace jaxhetero
