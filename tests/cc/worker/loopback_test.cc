// What a job is for, and how it ends.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <latch>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/cc/job.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {
namespace {

class EveryShape : public testing::TestWithParam<std::tuple<uint32_t, uint32_t>> {};

TEST_P(EveryShape, ReducesAllThatIsAskedFor) {
  const auto [workers, reducers] = GetParam();
  Shape shape;
  shape.workers = workers;
  shape.reducers = reducers;
  Job job(shape);
  ASSERT_NO_FATAL_FAILURE(job.start());

  // Beyond a window at every reducer, below the size that is cut at all, and nothing.
  const size_t large = 10 * job.reducer_count() * shape.window_chunks * shape.chunk_bytes / 4 + 7;
  std::vector<TestRound> rounds = {
      {.op = 1, .dtype = DType::kF32, .leaf_counts = {large}},
      {.op = 2, .dtype = DType::kBF16, .leaf_counts = {3, 0, 20011, 1, 1023}, .in_place = true},
      {.op = 3, .dtype = DType::kI8, .leaf_counts = {0}},
      {.op = 4, .dtype = DType::kF64, .leaf_counts = {1}},
      {.op = 5, .dtype = DType::kU16, .leaf_counts = {0, 7, 0}},
      {.op = 6, .dtype = DType::kF16, .leaf_counts = std::vector<size_t>(300, 5)},
      {.op = 7, .kind = Kind::kBroadcast, .dtype = DType::kI32, .leaf_counts = {9001, 2}, .root = workers - 1},
      {.op = 8, .kind = Kind::kBroadcast, .dtype = DType::kI64, .leaf_counts = {0}},
      {.op = 9, .kind = Kind::kBroadcast, .dtype = DType::kU8, .leaf_counts = {5}, .in_place = true},
      {.op = 10, .kind = Kind::kMax, .dtype = DType::kBF16, .leaf_counts = {5003}},
      {.op = 11, .kind = Kind::kMin, .dtype = DType::kI64, .leaf_counts = {4099, 1}, .in_place = true},
      {.op = 12, .dtype = DType::kBF16, .leaf_counts = {3, 0, 20011, 1, 1023}, .in_place = true, .converts = true},
      {.op = 13, .dtype = DType::kF16, .leaf_counts = {large, 1}, .converts = true},
      {.op = 14, .kind = Kind::kScatter, .dtype = DType::kF32, .leaf_counts = {large, 0, 3, 5}, .rows = workers},
      {.op = 15, .kind = Kind::kScatter, .dtype = DType::kBF16, .leaf_counts = {1, 1000}, .rows = workers},
      {.op = 16, .kind = Kind::kScatter, .dtype = DType::kI16, .leaf_counts = {0}, .rows = workers},
      {.op = 17, .kind = Kind::kGather, .dtype = DType::kF64, .leaf_counts = {large / 2, 0, 3}, .rows = workers},
      {.op = 18, .kind = Kind::kGather, .dtype = DType::kU8, .leaf_counts = {1}, .rows = workers},
      {.op = 19, .kind = Kind::kGather, .dtype = DType::kF16, .leaf_counts = {0, 0}, .rows = workers},
  };
  // All at once, twice in flight, and on each worker in another order.
  for (uint32_t repeat = 0; repeat < 3; ++repeat) {
    std::map<std::pair<size_t, uint32_t>, std::vector<Part>> parts;  // by round and repetition, then by rank
    for (uint32_t rank = 0; rank < workers; ++rank) {
      std::vector<size_t> order(rounds.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::ranges::shuffle(order, std::mt19937(rank + 10 * repeat));
      for (uint32_t twice : {0u, 1u}) {
        for (size_t i : order) {
          TestRound round = rounds[i];
          round.seed = 2 * repeat + twice;
          parts[{i, twice}].emplace_back(*job.workers[rank], round, rank);
        }
      }
    }
    for (auto& [key, of_round] : parts) {
      TestRound round = rounds[key.first];
      round.seed = 2 * repeat + key.second;
      ASSERT_NO_FATAL_FAILURE(job.expect_done(round, of_round)) << "op " << round.op;
    }
  }
  for (const auto& worker : job.workers) EXPECT_EQ(worker->metrics().round_count, 6 * rounds.size());
  job.expect_shutdown();
}

INSTANTIATE_TEST_SUITE_P(Dedicated, EveryShape, testing::Combine(testing::Range(1u, 5u), testing::Range(1u, 5u)),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) + "_workers_" +
                                  std::to_string(std::get<1>(info.param)) + "_reducers";
                         });
INSTANTIATE_TEST_SUITE_P(Colocated, EveryShape, testing::Combine(testing::Range(2u, 5u), testing::Values(0u)),
                         [](const auto& info) { return std::to_string(std::get<0>(info.param)) + "_workers"; });

// What the interfaces carry is measured first, over the same ways; the program's rounds go on from there.
class Measured : public testing::TestWithParam<Shape> {};

TEST_P(Measured, StartsAndReduces) {
  Shape shape = GetParam();
  shape.measure_rates = true;
  Job job(shape);
  ASSERT_NO_FATAL_FAILURE(job.start());
  for (uint64_t op = 0; op < 3; ++op) job.expect_works({.op = op, .leaf_counts = {300'000, 17}});
  for (const auto& worker : job.workers) {
    EXPECT_EQ(worker->metrics().round_count, 3u);
    EXPECT_EQ(worker->timeline().since(0).rounds.size(), 3u);
  }
  job.expect_shutdown();
}

INSTANTIATE_TEST_SUITE_P(
    All, Measured,
    testing::Values(Shape{.workers = 3, .reducers = 2, .chunk_bytes = 0, .window_chunks = 0},
                    Shape{.workers = 3, .reducers = 0, .chunk_bytes = 0, .window_chunks = 0},
                    Shape{.workers = 3, .reducers = 2, .colocated = 3, .chunk_bytes = 0, .window_chunks = 0},
                    Shape{.workers = 2, .reducers = 1, .chunk_bytes = 1 << 20, .window_chunks = 0},
                    Shape{.workers = 3, .reducers = 3, .chunk_bytes = 0, .window_chunks = 0, .shared_memory = true},
                    Shape{.workers = 1, .reducers = 1, .failover = true}),
    [](const auto& info) {
      const Shape& shape = info.param;
      return std::to_string(shape.workers) + "_workers_" + std::to_string(shape.reducers) + "_and_" +
             std::to_string(shape.colocated) + "_reducers_chunks_" + std::to_string(shape.chunk_bytes);
    });

TEST(Loopback, RunsManyRoundsOfManyOps) {
  Job job({.workers = 3, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  constexpr uint32_t kRounds = 100;
  std::map<std::pair<uint64_t, uint32_t>, std::vector<Part>> parts;
  for (uint32_t seed = 0; seed < kRounds; ++seed) {
    for (uint64_t op : {1, 2, 3}) {
      parts[{op, seed}] = job.begin({.op = op, .leaf_counts = {100 * op}, .seed = seed});
    }
  }
  for (auto& [key, of_round] : parts) {
    const TestRound round{.op = key.first, .leaf_counts = {100 * key.first}, .seed = key.second};
    ASSERT_NO_FATAL_FAILURE(job.expect_done(round, of_round)) << "op " << key.first << " round " << key.second;
  }
  job.expect_shutdown();
}

// Reducers hear it each time that an op changes: with bfloat16 for float16 the sums would be wrong, and nobody would
// know.
TEST(Loopback, TakesAnOpThatChangesFromRoundToRound) {
  Job job({.workers = 2, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  const DType dtypes[] = {DType::kF16, DType::kBF16, DType::kBF16, DType::kF16};
  for (uint32_t seed = 0; const DType dtype : dtypes) {
    ASSERT_NO_FATAL_FAILURE(
        job.expect_works({.dtype = dtype, .leaf_counts = {1000 + 50'000 * (seed % 2)}, .seed = seed}));
    ++seed;
  }
  job.expect_shutdown();
}

// The bits of a sum depend on neither the reducers nor the way the bucket was cut.
class EveryLayout : public testing::TestWithParam<Kind> {};

TEST_P(EveryLayout, GivesTheSameBits) {
  TestRound round{.kind = GetParam(), .dtype = DType::kF16, .leaf_counts = {100000}};
  if (has_rows(round.kind)) round.leaf_counts = {24000, 1000}, round.rows = 4;
  const Shape shapes[] = {
      {.workers = 4, .reducers = 1},
      {.workers = 4, .reducers = 3, .chunk_bytes = 4096},
      {.workers = 4, .reducers = 1, .colocated = 2, .checksums = true},
      {.workers = 4, .reducers = 2, .colocated = 3},
      {.workers = 4, .reducers = 0, .window_chunks = 1},
      {.workers = 4, .reducers = 1, .colocated = 4, .chunk_bytes = 0, .window_chunks = 0},
      {.workers = 4, .reducers = 2, .colocated = 1, .shared_memory = true},
      {.workers = 4, .reducers = 2, .colocated = 1, .chunk_bytes = 4096, .failover = true, .shared_memory = true},
      {.workers = 4, .reducers = 2, .chunk_bytes = 0, .window_chunks = 0, .checksums = true, .shared_memory = true}};
  for (const Shape& shape : shapes) {
    Job job(shape);
    ASSERT_NO_FATAL_FAILURE(job.start());
    for (round.seed = 0; round.seed < 3; ++round.seed) {
      ASSERT_NO_FATAL_FAILURE(job.expect_works(round));  // against one and the same sum
    }
    for (const auto& worker : job.workers) {
      const size_t connection_count = job.strands() * job.reducers.size();
      EXPECT_EQ(worker->metrics().shared_connection_count, shape.shared_memory ? connection_count : 0);
      EXPECT_EQ(worker->metrics().lent_bytes > 0, shape.shared_memory && shape.failover) << "it lends what it keeps";
    }
    job.expect_shutdown();
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryLayout, testing::Values(Kind::kSum, Kind::kScatter, Kind::kGather),
                         [](const auto& info) { return std::to_string(static_cast<int>(info.param)); });

// A round has a part on every strand, and counts once everywhere.
TEST(Loopback, CountsARoundOnceWhateverTheStrands) {
  for (const uint32_t strands : {1u, 2u, 5u}) {
    Job job({.workers = 2, .reducers = 2, .strands = strands});
    ASSERT_NO_FATAL_FAILURE(job.start());
    for (uint64_t op = 0; op < 3; ++op) job.expect_works({.op = op, .leaf_counts = {100'000}});
    for (const auto& worker : job.workers) {
      EXPECT_EQ(worker->metrics().round_count, 3u);
      EXPECT_EQ(worker->metrics().bucket_bytes, 3u * 400'000);
      const Timeline::Entries rounds = worker->timeline().since(0);
      ASSERT_EQ(rounds.rounds.size(), 3u);
      uint64_t bytes = 0;
      for (const RoundRecord::Part& part : rounds.rounds[0].parts) bytes += part.bytes;
      EXPECT_EQ(rounds.rounds[0].parts.size(), 2u) << "one for each reducer";
      EXPECT_EQ(bytes, 400'000u);
    }
    for (const auto& reducer : job.reducers) EXPECT_EQ(reducer->metrics().round_count, 3u);
    job.expect_shutdown();
    for (const auto& reducer : job.reducers) EXPECT_EQ(reducer->metrics().joined_count, 2u);
  }
}

// The reducer in the only worker has all shares, and the other one none.
TEST(Loopback, ReducesAloneBesideADedicatedReducer) {
  for (const bool measure_rates : {false, true}) {
    Job job({.workers = 1, .reducers = 1, .colocated = 1, .measure_rates = measure_rates});
    ASSERT_NO_FATAL_FAILURE(job.start());
    job.expect_works({.leaf_counts = {100'000}});
    job.expect_shutdown();
  }
}

// The point of two hops: a worker sends its bytes once and receives them once, whatever the number of workers.
TEST(Loopback, MovesEveryByteOnceEachWay) {
  Job job({.workers = 4, .reducers = 2, .chunk_bytes = 65536, .compress = Compress::kNever});
  ASSERT_NO_FATAL_FAILURE(job.start());
  const TestRound round{.leaf_counts = {1 << 20}};
  job.expect_works(round);
  for (const auto& worker : job.workers) {
    const Metrics metrics = worker->metrics();
    EXPECT_GE(metrics.sent_bytes, round.bytes());
    EXPECT_LE(metrics.sent_bytes, round.bytes() + round.bytes() / 100);
    EXPECT_GE(metrics.received_bytes, round.bytes());
    EXPECT_LE(metrics.received_bytes, round.bytes() + round.bytes() / 100);
    EXPECT_EQ(metrics.round_count, 1u);
    EXPECT_GT(metrics.busy_us, 0u);
  }
  for (const auto& reducer : job.reducers) {
    const Metrics metrics = reducer->metrics();
    EXPECT_NEAR(static_cast<double>(metrics.received_bytes), 2.0 * static_cast<double>(round.bytes()), 1e5);
    EXPECT_NEAR(static_cast<double>(metrics.sent_bytes), 2.0 * static_cast<double>(round.bytes()), 1e5);
    EXPECT_EQ(metrics.round_count, 1u);
  }
  job.expect_shutdown();
}

// Floats in shorter codes: fewer bytes each way, and the same bits. What has no shorter code goes as it is.
TEST(Loopback, MovesCodesOfFloats) {
  const std::vector<TestRound> rounds = {
      {.op = 1, .leaf_counts = {1 << 18}, .like_gradients = true},
      {.op = 2, .leaf_counts = {1 << 17, 0, 3, 1 << 17}, .in_place = true, .like_gradients = true},
      {.op = 3, .dtype = DType::kBF16, .leaf_counts = {1 << 18}, .like_gradients = true},
      {.op = 4, .dtype = DType::kBF16, .leaf_counts = {5, 1 << 18}, .converts = true, .like_gradients = true},
      {.op = 5, .kind = Kind::kBroadcast, .leaf_counts = {1 << 18}, .root = 1, .like_gradients = true},
      {.op = 6, .kind = Kind::kMax, .leaf_counts = {1 << 18}, .like_gradients = true},
      {.op = 7, .kind = Kind::kScatter, .leaf_counts = {1 << 16}, .like_gradients = true, .rows = 3},
      {.op = 8, .kind = Kind::kGather, .leaf_counts = {1 << 16, 9}, .like_gradients = true, .rows = 3},
  };
  for (const bool failover : {false, true}) {
    Job job({.workers = 3, .reducers = 2, .chunk_bytes = 16384, .failover = failover, .compress = Compress::kAlways});
    ASSERT_NO_FATAL_FAILURE(job.start());
    for (const TestRound& round : rounds) {
      const Metrics before = job.workers[1]->metrics();
      ASSERT_NO_FATAL_FAILURE(job.expect_works(round));
      const Metrics after = job.workers[1]->metrics();
      const uint64_t sent = after.sent_bytes - before.sent_bytes;
      const uint64_t pushed =
          round.kind == Kind::kGather ? round.bytes() / 3 : round.bytes() / (round.converts ? 2 : 1);
      EXPECT_LT(sent, pushed * 8 / 10) << "op " << round.op;
      EXPECT_NEAR(static_cast<double>(sent + after.saved_bytes - before.saved_bytes), static_cast<double>(pushed),
                  0.02 * static_cast<double>(pushed))
          << "op " << round.op;
    }
    for (const auto& reducer : job.reducers) EXPECT_GT(reducer->metrics().saved_bytes, 1'000'000u);
    const uint64_t saved = job.workers[0]->metrics().saved_bytes;
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kI32}) {
      job.expect_works({.op = 10 + uint64_t(dtype), .dtype = dtype, .leaf_counts = {100'000}, .like_gradients = false});
    }
    EXPECT_EQ(job.workers[0]->metrics().saved_bytes, saved) << "random bits have no shorter code";
    job.expect_shutdown();
  }
}

// A worker sends or receives its own row alone, and of a gather not even its own row comes back to it.
TEST(Loopback, MovesRowsOnce) {
  constexpr uint32_t kWorkers = 4;
  for (const Kind kind : {Kind::kScatter, Kind::kGather}) {
    Job job({.workers = kWorkers, .reducers = kWorkers, .chunk_bytes = 65536, .compress = Compress::kNever});
    ASSERT_NO_FATAL_FAILURE(job.start());
    const TestRound round{.kind = kind, .leaf_counts = {1 << 18}, .rows = kWorkers};
    job.expect_works(round);
    const auto bytes = static_cast<double>(round.bytes());
    for (const auto& worker : job.workers) {
      const Metrics metrics = worker->metrics();
      const double sent = kind == Kind::kScatter ? bytes : bytes / kWorkers;
      const double received = kind == Kind::kScatter ? bytes / kWorkers : bytes * (kWorkers - 1) / kWorkers;
      EXPECT_NEAR(static_cast<double>(metrics.sent_bytes), sent, 0.01 * sent);
      EXPECT_NEAR(static_cast<double>(metrics.received_bytes), received, 0.01 * received);
    }
    job.expect_shutdown();
  }
}

// The program goes on in the callback: it may start the next round there, and may take its time.
TEST(Loopback, LetsTheProgramGoOnInTheCallback) {
  constexpr int kRounds = 20;
  Job job({.workers = 2, .reducers = 1});
  ASSERT_NO_FATAL_FAILURE(job.start());
  std::latch finished(2);
  std::vector<std::vector<float>> values(2, std::vector<float>(500, 1.0f));
  std::function<void(uint32_t, int)> run = [&](uint32_t rank, int left) {
    if (left == 0) return finished.count_down();
    RoundRequest request;
    request.op = 3;
    request.spec = {Kind::kSum, DType::kF32, 0, 1, values[rank].size(), 0};
    request.inputs.append(values[rank].data(), values[rank].size() * sizeof(float));
    request.outputs = request.inputs;
    request.done = [&, rank, left](const Status& status) {
      EXPECT_TRUE(status.ok()) << status.message();
      std::this_thread::sleep_for(milliseconds(1));
      run(rank, left - 1);
    };
    job.workers[rank]->start_round(std::move(request));
  };
  for (uint32_t rank : {0u, 1u}) run(rank, kRounds);
  finished.wait();
  EXPECT_EQ(values[0], std::vector<float>(500, static_cast<float>(1 << kRounds)));
  EXPECT_EQ(values[1], values[0]);
  job.expect_shutdown();
}

// --- The end.

TEST(End, FinishesTheRoundsThatRun) {
  Job job({.workers = 2, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  const TestRound round{.leaf_counts = {200000}};
  std::vector<Part> parts;
  for (int i = 0; i < 3; ++i) parts.emplace_back(*job.workers[0], round, 0);
  std::future<Status> ended = std::async(std::launch::async, [&] { return job.workers[0]->shutdown(kPatience); });
  std::this_thread::sleep_for(milliseconds(50));
  for (int i = 0; i < 3; ++i) parts.emplace_back(*job.workers[1], round, 1);
  for (Part& part : parts) {
    const Status status = part.wait();
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(part.has(round.output(2)));
  }
  EXPECT_TRUE(ended.get().ok());
  EXPECT_TRUE(job.workers[1]->shutdown(kPatience).ok());
  for (const auto& reducer : job.reducers) EXPECT_TRUE(Job::wait_end(*reducer).ok());
}

TEST(End, WaitsForALimitedTime) {
  Job job({});
  ASSERT_NO_FATAL_FAILURE(job.start());
  Part part(*job.workers[0], {}, 0);
  EXPECT_EQ(job.workers[0]->shutdown(milliseconds(100)).code(), Code::kRoundTimeout);
  EXPECT_EQ(part.wait().code(), Code::kRoundTimeout);
}

TEST(End, RefusesRoundsFromThenOn) {
  Job job({});
  ASSERT_NO_FATAL_FAILURE(job.start());
  job.expect_shutdown();
  Part part(*job.workers[0], {}, 0);
  EXPECT_TRUE(failed_with(part.wait(), Code::kNotInitialized, {"shut down"}));
  EXPECT_TRUE(job.workers[0]->shutdown(kPatience).ok()) << "twice does no harm";
}

// From several threads, while the communicator goes away: each round ends, one way or the other.
TEST(End, LeavesNoRoundWithoutAnAnswer) {
  for (bool in_order : {true, false}) {
    Job job({});
    ASSERT_NO_FATAL_FAILURE(job.start());
    std::atomic<int> open = 0;
    std::atomic<bool> stop = false;
    std::vector<float> values(10);
    {
      std::vector<std::jthread> callers;
      for (uint64_t op : {1, 2, 3}) {
        callers.emplace_back([&, op] {
          while (!stop) {
            RoundRequest request;
            request.op = op;
            request.spec = {Kind::kSum, DType::kF32, 0, 1, 0, 0};
            request.done = [&](const Status&) { --open; };
            ++open;
            job.workers[0]->start_round(std::move(request));
            std::this_thread::sleep_for(milliseconds(1));
          }
        });
      }
      std::this_thread::sleep_for(milliseconds(20));
      if (in_order) {
        static_cast<void>(job.workers[0]->shutdown(milliseconds(20)));
      } else {
        job.reducers.clear();
      }
      std::this_thread::sleep_for(milliseconds(20));
      stop = true;
    }
    job.workers.clear();
    EXPECT_EQ(open, 0);
  }
}

TEST(End, AnswersTheRoundsOfADestroyedCommunicator) {
  Job job({});
  ASSERT_NO_FATAL_FAILURE(job.start());
  std::vector<Part> parts;
  for (uint64_t op : {1, 1, 1, 2}) parts.emplace_back(*job.workers[0], TestRound{.op = op}, 0);
  job.workers[0].reset();
  for (Part& part : parts) {
    EXPECT_TRUE(part.is_done());
    EXPECT_TRUE(failed_with(part.wait(), Code::kNotInitialized, {"destroyed"}));
  }
}

// The callback may hold the last reference, as a program does that outlives the shutdown.
TEST(End, MayComeFromACallback) {
  Job job({.workers = 1, .reducers = 1});
  job.add_reducers(1);
  auto worker = std::make_shared<Communicator>(job.worker_config(0));
  ASSERT_TRUE(worker->start().ok());
  ASSERT_TRUE(Job::wait_ready(*worker).ok());
  std::promise<void> destroyed;
  std::latch released(1);
  RoundRequest request;
  request.spec = {Kind::kSum, DType::kF32, 0, 1, 0, 0};
  request.done = [&, last = worker](const Status& status) mutable {
    EXPECT_TRUE(status.ok()) << status.message();
    released.wait();
    last.reset();
    destroyed.set_value();
  };
  worker->start_round(std::move(request));
  worker.reset();
  released.count_down();
  EXPECT_EQ(destroyed.get_future().wait_for(kPatience), std::future_status::ready);
}

}  // namespace
}  // namespace jaxhetero
