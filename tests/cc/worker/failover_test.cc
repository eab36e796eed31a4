// A reducer dies, or comes, and the rounds go on as if nothing had happened.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/job.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {
namespace {

Shape failover(Shape shape) {
  shape.failover = true;
  return shape;
}

// As when its process is killed: every socket closes at once.
void kill(std::unique_ptr<ReducerServer>& reducer) { reducer.reset(); }

TEST(Failover, FinishesTheRoundThatTheDeathInterrupts) {
  const std::vector<size_t> leaf_counts = {100000, 7};
  for (const TestRound& round :
       {TestRound{.leaf_counts = leaf_counts}, TestRound{.leaf_counts = leaf_counts, .in_place = true},
        TestRound{.leaf_counts = leaf_counts, .call_bytes = 1 << 30},
        TestRound{.kind = Kind::kScatter, .leaf_counts = {30000, 7}, .rows = 3},
        TestRound{.kind = Kind::kGather, .leaf_counts = {30000, 7}, .rows = 3},
        TestRound{.dtype = DType::kBF16, .leaf_counts = leaf_counts, .converts = true},
        TestRound{.dtype = DType::kBF16, .leaf_counts = leaf_counts, .in_place = true, .converts = true}}) {
    Shape shape{.workers = 3, .reducers = 3, .window_chunks = 4};
    if (round.call_bytes > 0) shape.chunk_bytes = 0;
    Job job(failover(shape));
    ASSERT_NO_FATAL_FAILURE(job.start());
    std::vector<Part> parts;
    for (uint32_t rank : {0u, 1u}) parts.emplace_back(*job.workers[rank], round, rank);
    kill(job.reducers[1]);
    parts.emplace_back(*job.workers[2], round, 2);  // before it came, nobody could be done
    job.expect_done(round, parts);
    job.expect_works(round);
    for (const auto& worker : job.workers) EXPECT_EQ(worker->metrics().view_count, 1u);
  }
}

// Nobody is in a round: nobody has anything to say again, and the next round goes to those who are left.
TEST(Failover, GoesOnBetweenRounds) {
  Job job(failover({.workers = 3, .reducers = 4}));
  ASSERT_NO_FATAL_FAILURE(job.start());
  for (const size_t victim : {2u, 0u, 3u}) {
    job.expect_works({.leaf_counts = {50000}, .seed = static_cast<uint32_t>(victim)});
    kill(job.reducers[victim]);
  }
  job.expect_works({.leaf_counts = {50000}, .seed = 9});
  job.expect_works({.op = 2, .kind = Kind::kBroadcast, .leaf_counts = {9000}, .root = 1});
}

// Some have the answer of a measurement then and others have not; all begin with the same plan. Several jobs at once,
// so that a worker may be late for any of it.
void expect_to_start_despite_a_death(uint64_t completed_rounds) {
  Job job(failover({.workers = 3, .reducers = 3, .colocated = 1, .chunk_bytes = 0, .measure_rates = true}));
  job.add_reducers(job.reducer_count());
  for (uint32_t rank = 3; rank > 0; --rank) job.add_worker(rank - 1);
  const auto is_due = [&] {
    const bool has_begun = job.workers[0]->metrics().received_bytes > 1 << 20;
    uint64_t rounds = 0;
    for (const auto& reducer : job.reducers) rounds = std::max(rounds, reducer->metrics().round_count);
    return completed_rounds > 0 ? rounds >= completed_rounds : has_begun;
  };
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!is_due() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  kill(job.reducers[1]);
  for (const auto& worker : job.workers) {
    const Status ready = Job::wait_ready(*worker);
    ASSERT_TRUE(ready.ok()) << ready.message();
  }
  for (uint64_t op = 0; op < 2; ++op) job.expect_works({.op = op, .leaf_counts = {100'000}});
}

TEST(Failover, GoesOnWhenTheDeathIsDuringTheStart) {
  std::vector<std::thread> jobs;
  for (uint64_t index = 0; index < 4; ++index) {
    jobs.emplace_back([index] {
      for (uint64_t i = 0; i < 5; ++i) expect_to_start_despite_a_death((index + i) % 5);
    });
  }
  for (std::thread& job : jobs) job.join();
}

TEST(Failover, ReachesTheLastReducerAndThenSaysSo) {
  Job job(failover({.workers = 2, .reducers = 2}));
  ASSERT_NO_FATAL_FAILURE(job.start());
  kill(job.reducers[0]);
  const TestRound round{.leaf_counts = {50000}};
  job.expect_works(round);
  std::vector<Part> parts;
  const uint64_t sent_bytes = job.workers[0]->metrics().sent_bytes;
  parts.emplace_back(*job.workers[0], round, 0);
  while (job.workers[0]->metrics().sent_bytes < sent_bytes + 1024) std::this_thread::yield();
  kill(job.reducers[1]);
  EXPECT_TRUE(failed_with(parts[0].wait(), Code::kReducerLost,
                          {"(host reducer-host-1", "no reducer is left", "running: test op 1 round 1"}));
  for (const auto& worker : job.workers) EXPECT_EQ(worker->shutdown(kPatience).code(), Code::kReducerLost);
}

// What is kept of an op that no longer runs would be memory for nothing, a copy of all parameters after a broadcast.
TEST(Failover, ForgetsWhatNobodyCanNeed) {
  for (const bool converts : {false, true}) {
    Job job(failover({.workers = 3, .reducers = 3, .timeout = kShort}));
    ASSERT_NO_FATAL_FAILURE(job.start());
    TestRound once{.op = 1, .dtype = converts ? DType::kBF16 : DType::kF32, .leaf_counts = {50000}};
    TestRound often{.op = 2, .leaf_counts = {7000}};
    once.converts = converts;
    job.expect_works(once);
    const auto end = std::chrono::steady_clock::now() + 3 * kShort;
    while (std::chrono::steady_clock::now() < end) job.expect_works(often);
    for (const auto& worker : job.workers) EXPECT_EQ(worker->metrics().kept_bytes, often.bytes());
    kill(job.reducers[1]);
    for (uint32_t seed : {1, 2}) {
      once.seed = often.seed = seed;
      job.expect_works(once);
      job.expect_works(often);
    }
    for (const auto& worker : job.workers) EXPECT_TRUE(worker->shutdown(kPatience).ok());
  }
}

// What the others contribute to a gather is theirs to keep.
TEST(Failover, KeepsOfAGatherTheOwnRow) {
  Job job(failover({.workers = 3, .reducers = 3}));
  ASSERT_NO_FATAL_FAILURE(job.start());
  const TestRound round{.kind = Kind::kGather, .leaf_counts = {30000, 7}, .rows = 3};
  job.expect_works(round);
  for (const auto& worker : job.workers) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (worker->metrics().kept_bytes < round.bytes() / 3 && std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
    EXPECT_EQ(worker->metrics().kept_bytes, round.bytes() / 3);
  }
}

// A number names one place in the job: who comes later has that of somebody who was lost.
TEST(Failover, GivesTheNumberOfALostReducerToTheNext) {
  Job job(failover({.workers = 2, .reducers = 3}));
  for (const int32_t number : {0, 1, 2}) {
    ReducerServerConfig config = job.reducer_config(static_cast<uint32_t>(number));
    config.number = number;
    job.add_reducer(config);
  }
  for (const uint32_t rank : {0u, 1u}) job.add_worker(rank);
  for (const auto& worker : job.workers) ASSERT_TRUE(Job::wait_ready(*worker).ok());
  for (const size_t victim : {1u, 2u}) {
    kill(job.reducers[victim]);
    job.expect_works({.leaf_counts = {50000}, .seed = static_cast<uint32_t>(victim)});
  }
  ReducerServerConfig config = job.reducer_config(2);
  config.number = 2;
  for (const auto& [wish, number] : {std::pair{2, "reducer 2"}, {-1, "reducer 1"}}) {
    config.number = wish;
    const std::optional<Event> event = job.add_reducer(config).next_event(kPatience);
    EXPECT_TRUE(event.has_value() && has(event->text, std::string(number) + " is ready")) << event->text;
  }
  job.expect_works({.leaf_counts = {50000}, .seed = 3});
}

TEST(Failover, TakesInAReducerThatComesLater) {
  Job job(failover({.workers = 2, .reducers = 2}));
  ASSERT_NO_FATAL_FAILURE(job.start());
  const TestRound round{.leaf_counts = {50000}};
  job.expect_works(round);
  kill(job.reducers[0]);
  job.expect_works(round);
  ReducerServer& newcomer = job.add_reducer(job.reducer_config(0));
  for (uint32_t seed = 1; newcomer.metrics().round_count == 0; ++seed) {
    job.expect_works({.leaf_counts = {50000}, .seed = seed});
  }
  kill(job.reducers[1]);
  job.expect_works(round);
  for (const auto& worker : job.workers) EXPECT_EQ(worker->metrics().view_count, 3u);
}

// Deaths at random instants under rounds of several ops that workers begin in orders of their own, of dedicated
// reducers and such in workers, also two at once. Every result is compared, to the bit.
class DeathsTest : public testing::TestWithParam<uint32_t> {};

TEST_P(DeathsTest, ChangeNoBit) {
  std::mt19937 random(GetParam());
  const bool mixed = random() % 2 == 0;
  Job job(failover({.workers = 3,
                    .reducers = mixed ? 4u : 6u,
                    .colocated = mixed ? 2u : 0u,
                    .chunk_bytes = 4096,
                    .window_chunks = random() % 2 == 0 ? 0u : 3u,
                    .shared_memory = GetParam() % 2 == 1}));
  ASSERT_NO_FATAL_FAILURE(job.start());
  std::atomic<uint32_t> dead_count = 0;
  std::thread killer([&, seed = random()] {
    std::mt19937 chance(static_cast<uint32_t>(seed));
    for (size_t victim = 0; victim < 4; ++victim) {
      if (victim != 2) std::this_thread::sleep_for(std::chrono::microseconds(chance() % 30000));
      kill(job.reducers[victim]);
      ++dead_count;
    }
  });
  const std::vector<size_t> counts = {3, 30000, 100000, 5000, 60000, 20000, 15000};
  uint32_t steps_after = 0;
  for (uint32_t step = 0; steps_after < 5; ++step) {
    if (dead_count == 4) ++steps_after;
    std::vector<TestRound> rounds;
    for (uint64_t op = 0; op < counts.size(); ++op) {
      const Kind kind = op == 3 ? Kind::kBroadcast : op == 5 ? Kind::kScatter : op == 6 ? Kind::kGather : Kind::kSum;
      rounds.push_back({.op = op,
                        .kind = kind,
                        .dtype = op == 4 ? DType::kBF16 : DType::kF32,
                        .leaf_counts = {counts[op], 1},
                        .root = 1,
                        .seed = step * 8 + static_cast<uint32_t>(op),
                        .in_place = op == 2 || (op == 4 && step % 2 == 0),
                        .converts = op == 4,
                        .rows = has_rows(kind) ? 3u : 1u});
    }
    std::vector<std::vector<std::optional<Part>>> parts(counts.size());
    for (auto& of_op : parts) of_op.resize(job.workers.size());
    for (uint32_t rank = 0; rank < job.workers.size(); ++rank) {
      std::vector<size_t> order = {0, 1, 2, 3, 4, 5, 6};
      std::ranges::shuffle(order, random);
      for (size_t op : order) parts[op][rank].emplace(*job.workers[rank], rounds[op], rank);
    }
    for (size_t op = 0; op < counts.size(); ++op) {
      Bytes output;
      for (uint32_t rank = 0; rank < job.workers.size(); ++rank) {
        const Status status = parts[op][rank]->wait();
        EXPECT_TRUE(status.ok()) << "step " << step << " op " << op << " rank " << rank << ": " << status.message();
        if (rank == 0 || !rounds[op].is_same_for_all()) output = rounds[op].output(3, rank);
        EXPECT_TRUE(parts[op][rank]->has(output)) << "step " << step << " op " << op << " rank " << rank;
      }
    }
    if (testing::Test::HasFailure()) break;
  }
  killer.join();
}

INSTANTIATE_TEST_SUITE_P(Seeds, DeathsTest, testing::Range(0u, 8u));

TEST(Failover, LetsAWorkerLeaveOnlyWhenNobodyNeedsWhatItKeeps) {
  Job job(failover({.workers = 2, .reducers = 2}));
  ASSERT_NO_FATAL_FAILURE(job.start());
  job.expect_works({.leaf_counts = {50000}});
  EXPECT_TRUE(job.workers[1]->shutdown(kPatience).ok());
  EXPECT_TRUE(job.workers[0]->shutdown(kPatience).ok());
  for (const auto& reducer : job.reducers) EXPECT_TRUE(Job::wait_end(*reducer).ok());
}

// Nor do the others wait for who has left, when a reducer is lost or comes after that.
TEST(Failover, EndsWithTheFirstWorkerThatLeaves) {
  Job job(failover({.workers = 3, .reducers = 3}));
  ASSERT_NO_FATAL_FAILURE(job.start());
  job.expect_works({.leaf_counts = {50000}});
  EXPECT_TRUE(job.workers[1]->shutdown(kPatience).ok());
  kill(job.reducers[2]);
  ReducerServer& late = job.add_reducer(job.reducer_config(0));
  EXPECT_TRUE(failed_with(Job::wait_end(late), Code::kInvalidArgument, {"has started already"}));
  for (uint32_t rank : {0u, 2u}) EXPECT_TRUE(job.workers[rank]->shutdown(kPatience).ok());
}

TEST(Failover, IsNotForWorkers) {
  Job job(failover({.workers = 3, .reducers = 2}));
  ASSERT_NO_FATAL_FAILURE(job.start());
  job.expect_works();
  std::vector<Part> parts;
  for (uint32_t rank : {0u, 2u}) parts.emplace_back(*job.workers[rank], TestRound{}, rank);
  job.workers[1].reset();
  for (Part& part : parts) {
    const Status end = part.wait();
    EXPECT_TRUE(failed_with(end, Code::kWorkerLost, {"rank 1 (host host-1)"}));
    EXPECT_TRUE(end.message().ends_with("; running: test op 1 round 1; last completed: test op 1 round 0"))
        << end.message();
    EXPECT_EQ(end.message().find("; running"), end.message().rfind("; running")) << end.message();
  }
}

}  // namespace
}  // namespace jaxhetero
