#include "xla_ffi/worker/stall_watch.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/printing.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/lent_memory.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/worker/reducer_link.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/schedule.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTimeout{60'000};
constexpr milliseconds kStartTimeout{300'000};

// A worker of two reducers with one round, which has a segment at each.
class StallWatchTest : public testing::Test {
 protected:
  explicit StallWatchTest(bool accuses = true) {
    for (const uint32_t number : {0u, 1u}) {
      const View::Reducer reducer{number, "127.0.0.1", 4000, std::string(1, char('a' + number)), -1, {}};
      links_.emplace_back(reducer, *resolve(reducer.address, reducer.port), job_);
    }
    StallWatch::Accuse accuse;
    if (accuses)
      accuse = [this](const ReducerLink& link, const std::string& why) {
        accused_.push_back(std::to_string(link.number()) + ": " + why);
      };
    watch_.emplace(StallWatch::Config{"rank 3 (host x)", kTimeout, kStartTimeout}, schedule_, links_, log_, accuse);
  }

  Round& start_round() {
    RoundRequest request;
    request.description = "an op";
    Op& op = schedule_.add(std::move(request));
    Round& round = schedule_.start_next_round(op);
    for (const uint32_t reducer : {0u, 1u}) round.segments.emplace_back(Shard{reducer, 100 * reducer, 100}, 10);
    return round;
  }
  // Of a second round, so that its patience is not the start's.
  Round& start_second_round() {
    start_round();
    schedule_.finish_round(*schedule_.find(0));
    return start_round();
  }

  Status check_after(milliseconds time) { return watch_->check_rounds(StallWatch::Clock::now() + time); }
  void expect_timeout(const Status& status, const std::vector<std::string>& words) {
    EXPECT_EQ(status.code(), Code::kRoundTimeout) << status.message();
    for (const std::string& word : words) EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  }

  const JobShape job_{.worker_count = 4, .reducer_count = 2};
  Schedule schedule_{std::make_shared<LentMemory>()};
  std::vector<ReducerLink> links_;
  EventLog log_;
  std::vector<std::string> accused_;
  std::optional<StallWatch> watch_;
};

class NoFailoverTest : public StallWatchTest {
 protected:
  NoFailoverTest() : StallWatchTest(/*accuses=*/false) {}
};

TEST_F(StallWatchTest, LetsRoundsRunThatMakeProgress) {
  EXPECT_TRUE(check_after(10 * kStartTimeout).ok()) << "no round runs";
  start_second_round();
  EXPECT_TRUE(check_after(kTimeout / 2).ok());
}

TEST_F(StallWatchTest, GivesTheFirstRoundOfAnOpThePatienceOfTheStart) {
  start_round();
  EXPECT_TRUE(check_after(kStartTimeout - kTimeout).ok());
  expect_timeout(check_after(kStartTimeout), {"300000 ms in an op round 0"});
}

// All workers may compile a program again, and not equally fast.
TEST_F(StallWatchTest, GivesItToTheFirstRoundOfACallThatWasCompiledAnewAsWell) {
  start_second_round().request.is_compiled_anew = true;
  EXPECT_TRUE(check_after(kStartTimeout - kTimeout).ok());
  expect_timeout(check_after(kStartTimeout), {"300000 ms in an op round 1"});
}

TEST_F(StallWatchTest, NamesTheWorkersThatTheReducersWaitFor) {
  Round& round = start_second_round();
  watch_->note_late(round, "rank 1 (host b)", 0);
  expect_timeout(check_after(kTimeout),
                 {"rank 3 (host x): still waiting for rank 1 (host b): no progress for 60000 ms", "an op round 1"});
  EXPECT_TRUE(accused_.empty());
}

// Two workers wait for each other in one call, each over a group of its own: that is a mistake of the program.
TEST_F(StallWatchTest, TellsADisagreementFromALateWorker) {
  Round& round = start_second_round();
  watch_->note_late(round, "rank 1 (host b), which waits in an op of ranks 1, 2 instead", 0, /*disagree=*/true);
  EXPECT_TRUE(check_after(kTimeout / 2).ok());
  const Status status = check_after(kTimeout);
  EXPECT_EQ(status.code(), Code::kMismatch);
  EXPECT_NE(status.message().find("which waits in an op of ranks 1, 2 instead: no progress"), std::string::npos);
}

TEST_F(StallWatchTest, WaitsForWorkersThatAreSlow) {
  Round& round = start_second_round();
  round.times.progress_at -= 10 * kTimeout;
  watch_->note_late(round, "rank 1 (host b)", 1);
  EXPECT_TRUE(check_after(kTimeout / 2).ok());
  expect_timeout(check_after(kTimeout), {"still waiting for rank 1"});
}

TEST_F(StallWatchTest, ReportsLateWorkersOnceInAWhile) {
  Round& round = start_second_round();
  for (int i = 0; i < 3; ++i) watch_->note_late(round, "rank 1 (host b)", 1);
  const std::optional<Event> event = log_.next(milliseconds(0));
  ASSERT_TRUE(event.has_value());
  EXPECT_NE(event->text.find("waiting for rank 1 (host b)"), std::string::npos);
  EXPECT_FALSE(log_.next(milliseconds(0)).has_value());
}

TEST_F(StallWatchTest, AccusesOnceTheReducersThatAloneAreSilent) {
  Round& round = start_second_round();
  round.segments[0].done = true;
  EXPECT_TRUE(check_after(kTimeout).ok());
  EXPECT_EQ(accused_, std::vector<std::string>{"1: it has said nothing in an op round 1"});
  expect_timeout(check_after(2 * kTimeout), {"no word from reducer 1 (host b"});
  EXPECT_EQ(accused_.size(), 1u);
}

TEST_F(StallWatchTest, AccusesNoReducerWhereAllAreSilent) {
  start_second_round();
  expect_timeout(check_after(kTimeout), {"no word from reducer 0 (host a", "reducer 1 (host b"});
  EXPECT_TRUE(accused_.empty());
}

TEST_F(NoFailoverTest, AccusesNoReducer) {
  Round& round = start_second_round();
  round.segments[0].done = true;
  expect_timeout(check_after(kTimeout), {"no word from reducer 1 (host b"});
}

TEST_F(StallWatchTest, HasNoMorePatienceThanTheShutdown) {
  start_round();
  watch_->limit_patience(milliseconds(100));
  expect_timeout(check_after(milliseconds(100)), {"100 ms"});
}

TEST_F(StallWatchTest, WaitsForAViewAsLongAsTwoRounds) {
  const auto now = StallWatch::Clock::now();
  EXPECT_TRUE(watch_->check_halt(now, now - 2 * kTimeout + milliseconds(1)).ok());
  expect_timeout(watch_->check_halt(now, now - 2 * kTimeout), {"rank 3 (host x)", "no new view for 120000 ms"});
}

}  // namespace
}  // namespace jaxhetero
