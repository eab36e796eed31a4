// What the others learn when one of them fails.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <future>
#include <latch>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cc/fake_peers.h"
#include "tests/cc/job.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/worker/shard_plan.h"

namespace jaxhetero {
namespace {

TEST_F(FakeWorkerTest, IsNamedToAllWhenItIsKilled) {
  ASSERT_NO_FATAL_FAILURE(start());
  begin({});
  fake_->vanish();
  expect_failure(Code::kWorkerLost, {"rank 1 (host host-1) was lost"},
                 {"running: test op 1 round 0", "last completed: none"});
}

TEST_F(FakeWorkerTest, IsNamedToAllWhenItIsKilledBetweenRounds) {
  ASSERT_NO_FATAL_FAILURE(start());
  fake_->vanish();
  expect_failure(Code::kWorkerLost, {"rank 1 (host host-1) was lost"});
}

// Much is on its way in both directions at that moment; the cause must not drown in what it causes.
TEST_F(FakeWorkerTest, IsNamedToAllWhenItIsKilledInTheMiddleOfMuch) {
  ASSERT_NO_FATAL_FAILURE(start({.workers = 3, .reducers = 2, .chunk_bytes = 1 << 22, .window_chunks = 8}));
  for (uint64_t op = 0; op < 2; ++op) begin({.op = op, .leaf_counts = {6 << 20}});
  fake_->vanish();
  expect_failure(Code::kWorkerLost, {"rank 1 (host host-1) was lost"});
}

TEST_F(FakeWorkerTest, IsNamedToAllWhenItIsLate) {
  ASSERT_NO_FATAL_FAILURE(start({.workers = 3, .reducers = 2, .start_timeout = kShort, .timeout = milliseconds(1000)}));
  begin({});
  expect_failure(Code::kRoundTimeout, {"still waiting for rank 1 (host host-1)", "test op 1 round 0", "no progress"});
  std::optional<Event> event;
  while ((event = job_->workers[0]->next_event(milliseconds(0))) && event->severity != Severity::kWarning) {
  }
  ASSERT_TRUE(event.has_value());
  EXPECT_TRUE(has(event->text, "waiting for rank 1 (host host-1)")) << event->text;
}

// The shards of a round are pushed in step, so that no interface is done before the others: while the totals of one
// reducer fail to come, fewer than two windows of another's do.
TEST_F(FakeWorkerTest, IsNotRunAwayFrom) {
  const Shape shape{.workers = 3, .reducers = 2, .chunk_bytes = 1024, .window_chunks = 3};
  ASSERT_NO_FATAL_FAILURE(start(shape));
  const TestRound round{.leaf_counts = {8192}};
  begin(round);
  const std::vector<Shard> shards = ShardPlan({1, 1}).cut(round.op, 8192, 4);
  ASSERT_EQ(shards.size(), 2);
  auto push = [&, next = std::map<uint32_t, uint64_t>()](const Shard& shard) mutable {
    FrameHeader header = push_header(round);
    header.offset = shard.offset + 256 * next[shard.reducer]++;
    header.count = 256;
    header.last = header.offset + header.count == shard.offset + shard.count;
    header.payload_bytes = 1024;
    fake_->send(OutFrame::of(header, std::span(*kSomeBytes).first(1024), kSomeBytes), shard.reducer);
  };
  fake_->describe(round);
  const size_t most = 2 * shape.window_chunks;
  for (size_t chunk = 1; chunk <= most; ++chunk) {
    push(shards[0]);
    ASSERT_TRUE(fake_->wait_results(chunk, shards[0].reducer));
  }
  push(shards[0]);
  EXPECT_FALSE(fake_->wait_results(most + 1, shards[0].reducer, milliseconds(300)));
  push(shards[1]);
  EXPECT_TRUE(fake_->wait_results(most + 1, shards[0].reducer));
}

// The two others have its total, and it may not: they keep what it would need if a reducer were lost.
TEST_F(FakeWorkerTest, IsWaitedForBeforeOthersForget) {
  ASSERT_NO_FATAL_FAILURE(start({.workers = 3, .reducers = 1, .timeout = kShort, .failover = true}));
  const TestRound round{.leaf_counts = {100}};
  begin(round);
  fake_->describe(round);
  fake_->send(push_frame(push_header(round), round.bytes()));
  for (Part& part : parts_) ASSERT_TRUE(part.wait().ok());
  const auto expect_kept = [&](size_t bytes) {
    for (uint32_t rank : {0u, 2u}) EXPECT_EQ(job_->workers[rank]->metrics().kept_bytes, bytes) << "rank " << rank;
  };
  std::this_thread::sleep_for(2 * kShort);
  expect_kept(round.bytes());
  fake_->say_still(round.op, 0);
  fake_->say_still(round.op + 1, 1);
  std::this_thread::sleep_for(kShort);
  expect_kept(round.bytes());
  fake_->say_still(round.op, 1);
  const auto has_forgotten = [&](uint32_t rank) { return job_->workers[rank]->metrics().kept_bytes == 0; };
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!(has_forgotten(0) && has_forgotten(2)) && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  expect_kept(0);
}

// The job may fail while somebody is still on his way in. He shall hear why, and not be left with a closed connection.
TEST_F(FakeWorkerTest, IsToldWhatFailedBeforeItJoined) {
  ASSERT_NO_FATAL_FAILURE(start({.workers = 3, .reducers = 2}, /*fake_joins=*/false));
  begin({});
  job_->workers[2].reset();
  EXPECT_TRUE(failed_with(parts_[0].wait(), Code::kWorkerLost, {"rank 2 (host host-2)"}));
  fake_->join_all();
  EXPECT_TRUE(failed_with(fake_->wait_end(), Code::kWorkerLost, {"rank 2 (host host-2)"}));
}

TEST(FakeReducerTest, IsNamedWithTheRoundsThatItLeaves) {
  Job job({.workers = 1, .reducers = 1});
  FakeReducer reducer(job);
  Communicator& worker = job.add_worker(0);
  ASSERT_TRUE(Job::wait_ready(worker).ok());
  std::latch pushed(2);
  reducer.on_push_ = [&](Connection& connection, const FrameHeader&) {
    pushed.count_down();
    if (pushed.try_wait()) connection.close();
  };
  Part first(worker, {.op = 1, .leaf_counts = {10}}, 0);
  Part second(worker, {.op = 2, .leaf_counts = {10}}, 0);
  const Status status = first.wait();
  EXPECT_TRUE(failed_with(status, Code::kReducerLost,
                          {"reducer 0 (host reducer-host-0", "it closed the connection", "running: test op 1 round 0",
                           "running: test op 2 round 0"}));
  EXPECT_EQ(second.wait().message(), status.message());
}

TEST(FakeReducerTest, IsNamedWhenItSaysNothing) {
  Job job({.workers = 1, .reducers = 1, .start_timeout = kShort, .timeout = kShort});
  FakeReducer reducer(job);
  Communicator& worker = job.add_worker(0);
  ASSERT_TRUE(Job::wait_ready(worker).ok());
  Part part(worker, {}, 0);
  EXPECT_TRUE(failed_with(part.wait(), Code::kRoundTimeout,
                          {"rank 0 (host host-0)", "no word from reducer 0 (host reducer-host-0"}));
}

// It may be adding that up for the others, who have not failed yet: memory that is given back is empty.
TEST(FakeReducerTest, FindsWhatAWorkerLentAsItWasAfterTheWorkerFailed) {
  struct Lent {
    FrameHeader header;
    std::shared_ptr<const std::byte> payload;
  };
  Job job({.workers = 1, .reducers = 1, .chunk_bytes = 8192, .failover = true, .shared_memory = true});
  FakeReducer reducer(job);
  std::promise<Lent> lent;
  reducer.on_lent_ = [&, is_first = true](const FrameHeader& header, std::shared_ptr<const std::byte> payload) mutable {
    if (std::exchange(is_first, false)) lent.set_value({header, std::move(payload)});
  };
  // What is copied gets an answer: a worker begins to keep and lend with a round's first total.
  reducer.on_push_ = [](Connection& connection, FrameHeader header) {
    header.type = FrameType::kResult;
    connection.send(OutFrame::of(header, std::span(*kSomeBytes).first(header.payload_bytes), kSomeBytes));
  };
  Communicator& worker = job.add_worker(0);
  ASSERT_TRUE(Job::wait_ready(worker).ok());
  TestRound round{.op = 0, .leaf_counts = {1 << 16}};
  std::future<Lent> found = lent.get_future();
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  std::optional<Part> part;
  // Until memory is shared a round is copied; what its op keeps is not in the memory that comes to be.
  while (found.wait_for(milliseconds(1)) != std::future_status::ready) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    if (part.has_value() && !part->is_done()) continue;
    ++round.op;
    part.emplace(worker, round, 0);
  }
  EXPECT_EQ(worker.shutdown(milliseconds(0)).code(), Code::kNotInitialized);
  EXPECT_EQ(part->wait().code(), Code::kNotInitialized);
  job.workers.clear();
  const Lent kept = found.get();
  const Bytes input = round.input(0);
  EXPECT_TRUE(std::ranges::equal(std::span(kept.payload.get(), kept.header.payload_bytes),
                                 std::span(input).subspan(kept.header.offset * 4, kept.header.payload_bytes)));
}

TEST(Failure, OfDisagreeingWorkersIsToldToAll) {
  Job job({.workers = 3, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  job.expect_works();
  std::vector<Part> parts;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    const TestRound round{.op = 2, .dtype = rank == 1 ? DType::kBF16 : DType::kF32};
    parts.emplace_back(*job.workers[rank], round, rank);
  }
  for (Part& part : parts) {
    EXPECT_TRUE(failed_with(
        part.wait(), Code::kMismatch,
        {"op 2 round 0", "rank 1 (host host-1) sent sum of bfloat16", "sent sum of float32[1000] (test op 2)"}));
  }
  for (const auto& reducer : job.reducers) EXPECT_EQ(Job::wait_end(*reducer).code(), Code::kMismatch);
  for (const auto& worker : job.workers) EXPECT_EQ(worker->shutdown(kPatience).code(), Code::kMismatch);
}

TEST(Failure, OfAWorkerThatIsDestroyedIsToldToAll) {
  for (uint32_t reducers : {0u, 2u}) {
    Job job({.workers = 3, .reducers = reducers});
    ASSERT_NO_FATAL_FAILURE(job.start());
    job.expect_works();
    std::vector<Part> parts;
    for (uint32_t rank : {0u, 2u}) parts.emplace_back(*job.workers[rank], TestRound{}, rank);
    job.workers[1].reset();
    for (Part& part : parts) EXPECT_TRUE(failed_with(part.wait(), Code::kWorkerLost, {"rank 1 (host host-1)"}));
    for (const auto& reducer : job.reducers) EXPECT_EQ(Job::wait_end(*reducer).code(), Code::kWorkerLost);
  }
}

// Its goodbye must not be lost with its connections, nor over a fabric.
TEST(Failure, OfAWorkerThatLeavesInOrderTooEarlyIsToldToAll) {
  test_fabric_library();
  for (const std::string& fabric : {std::string("off"), test_provider()}) {
    Job job({.workers = 3, .reducers = 2, .fabric = fabric});
    ASSERT_NO_FATAL_FAILURE(job.start());
    EXPECT_TRUE(job.workers[1]->shutdown(kPatience).ok());
    std::vector<Part> parts;
    for (uint32_t rank : {0u, 2u}) parts.emplace_back(*job.workers[rank], TestRound{}, rank);
    for (Part& part : parts) {
      EXPECT_TRUE(failed_with(part.wait(), Code::kWorkerLost, {"rank 1 (host host-1) shut down", "test op 1 round 0"}));
    }
  }
}

TEST(Failure, OfAReducerIsToldToAll) {
  for (bool destroyed : {false, true}) {
    Job job({.workers = 3, .reducers = 2});
    ASSERT_NO_FATAL_FAILURE(job.start());
    const TestRound round{.leaf_counts = {100000}};
    job.expect_works(round);
    std::vector<Part> parts;  // rank 2 does not take part, so these wait
    for (uint32_t rank : {0u, 1u}) parts.emplace_back(*job.workers[rank], round, rank);
    job.reducers[1]->stop();
    EXPECT_TRUE(Job::wait_end(*job.reducers[1]).ok());
    if (destroyed) job.reducers[1].reset();
    for (Part& part : parts) {
      EXPECT_TRUE(failed_with(part.wait(), Code::kReducerLost, {"was lost", "last completed: test op 1 round 0"}));
    }
    for (const auto& worker : job.workers) EXPECT_EQ(worker->shutdown(kPatience).code(), Code::kReducerLost);
    EXPECT_EQ(Job::wait_end(*job.reducers[0]).code(), Code::kReducerLost);
  }
}

// The workers have half-sent frames on their way to the other reducers when they learn of it.
TEST(Failure, OfAReducerIsToldToAllInTheMiddleOfMuch) {
  const TestRound round{.leaf_counts = {6 << 20}};
  for (int repeat = 0; repeat < 3; ++repeat) {
    Job job({.workers = 3, .reducers = 3, .chunk_bytes = 1 << 22, .window_chunks = 8});
    ASSERT_NO_FATAL_FAILURE(job.start());
    std::vector<Part> parts;  // rank 2 does not take part, so these cannot be done before
    for (uint32_t rank : {0u, 1u}) parts.emplace_back(*job.workers[rank], round, rank);
    std::this_thread::sleep_for(milliseconds(5 * repeat));
    job.reducers[1].reset();
    for (Part& part : parts) EXPECT_TRUE(failed_with(part.wait(), Code::kReducerLost, {"was lost"}));
    EXPECT_EQ(job.workers[2]->shutdown(kPatience).code(), Code::kReducerLost);
  }
}

TEST(Failure, RefusesEveryLaterRound) {
  Job job({});
  ASSERT_NO_FATAL_FAILURE(job.start());
  job.workers[1].reset();
  Part first(*job.workers[0], {}, 0);
  EXPECT_EQ(first.wait().code(), Code::kWorkerLost);
  for (int i = 0; i < 3; ++i) {
    Part later(*job.workers[0], {}, 0);
    EXPECT_EQ(later.wait().code(), Code::kWorkerLost);
  }
}

}  // namespace
}  // namespace jaxhetero
