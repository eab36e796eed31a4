// Ops of some of the workers: what is promised of all workers holds for a group, whatever the others do.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cc/job.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {
namespace {

// Disjoint groups, overlapping ones, and all workers; of four.
std::vector<TestRound> rounds_of_groups(uint32_t seed) {
  std::vector<TestRound> rounds = {
      {.op = 1, .leaf_counts = {50000, 7}, .group = {0, 1}},
      {.op = 2, .leaf_counts = {50000, 7}, .group = {2, 3}},
      {.op = 3, .dtype = DType::kBF16, .leaf_counts = {30000}, .in_place = true, .converts = true, .group = {0, 2, 3}},
      {.op = 4, .dtype = DType::kF16, .leaf_counts = {3}, .group = {1, 3}},
      {.op = 5, .kind = Kind::kBroadcast, .leaf_counts = {9001}, .root = 2, .in_place = true, .group = {1, 2}},
      {.op = 6, .kind = Kind::kMax, .dtype = DType::kI32, .leaf_counts = {4099, 1}, .group = {0, 3}},
      {.op = 7, .kind = Kind::kScatter, .leaf_counts = {10000, 3}, .rows = 2, .group = {1, 2}},
      {.op = 8, .kind = Kind::kGather, .leaf_counts = {10000, 3}, .rows = 3, .group = {0, 1, 3}},
      {.op = 9, .leaf_counts = {0}, .group = {0, 2}},
      {.op = 10, .leaf_counts = {40000}, .group = {3}},
      {.op = 11, .leaf_counts = {60000, 1}},
  };
  for (TestRound& round : rounds) round.seed = seed;
  return rounds;
}

// All rounds at once, which each worker begins in an order of its own.
void expect_all_at_once(Job& job, const std::vector<TestRound>& rounds, std::mt19937& random) {
  std::vector<std::vector<Part>> parts(rounds.size());  // by round, then by place in the group
  for (uint32_t rank = 0; rank < job.workers.size(); ++rank) {
    std::vector<size_t> order(rounds.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::ranges::shuffle(order, random);
    for (const size_t i : order) {
      if (rounds[i].spec().has_member(rank)) parts[i].emplace_back(*job.workers[rank], rounds[i], rank);
    }
  }
  for (size_t i = 0; i < rounds.size(); ++i) {
    ASSERT_NO_FATAL_FAILURE(job.expect_done(rounds[i], parts[i])) << "op " << rounds[i].op;
  }
}

class GroupsOfEveryLayout : public testing::TestWithParam<Shape> {};

// The bits of a group's result are those of its members' contributions in rank order, and nobody waits for others.
TEST_P(GroupsOfEveryLayout, GiveTheSameBits) {
  Job job(GetParam());
  ASSERT_NO_FATAL_FAILURE(job.start());
  std::mt19937 random(7);
  for (uint32_t seed = 0; seed < 3; ++seed) {
    ASSERT_NO_FATAL_FAILURE(expect_all_at_once(job, rounds_of_groups(seed), random));
  }
  EXPECT_EQ(job.workers[0]->metrics().round_count, 3u * 6);
  std::vector<std::future<Status>> ends;
  for (const auto& worker : job.workers) {
    ends.push_back(std::async(std::launch::async, [&worker] { return worker->shutdown(kPatience); }));
  }
  for (std::future<Status>& end : ends) EXPECT_TRUE(end.get().ok());
  for (const auto& reducer : job.reducers) EXPECT_TRUE(Job::wait_end(*reducer).ok());
}

INSTANTIATE_TEST_SUITE_P(
    All, GroupsOfEveryLayout,
    testing::Values(Shape{.workers = 4, .reducers = 1, .strands = 1},
                    Shape{.workers = 4, .reducers = 3, .chunk_bytes = 4096, .strands = 2},
                    Shape{.workers = 4, .reducers = 0, .strands = 1}, Shape{.workers = 4, .reducers = 0, .strands = 2},
                    Shape{.workers = 4, .reducers = 2, .colocated = 2, .checksums = true, .strands = 2},
                    Shape{.workers = 4, .reducers = 1, .colocated = 4, .chunk_bytes = 0, .window_chunks = 0},
                    Shape{.workers = 4, .reducers = 2, .colocated = 3, .measure_rates = true},
                    Shape{.workers = 4, .reducers = 2, .colocated = 1, .shared_memory = true, .strands = 1},
                    Shape{.workers = 4,
                          .reducers = 2,
                          .colocated = 1,
                          .chunk_bytes = 4096,
                          .failover = true,
                          .shared_memory = true,
                          .strands = 2}),
    [](const auto& info) { return std::to_string(info.index); });

// A worker of the group sends its bytes once and receives them once; another one has no part in it.
TEST(Groups, MoveEveryByteOnceEachWay) {
  Job job({.workers = 4, .reducers = 2, .chunk_bytes = 65536, .compress = Compress::kNever});
  ASSERT_NO_FATAL_FAILURE(job.start());
  const TestRound round{.leaf_counts = {1 << 20}, .group = {1, 2}};
  job.expect_works(round);
  for (uint32_t rank = 0; rank < 4; ++rank) {
    const Metrics metrics = job.workers[rank]->metrics();
    const double bytes = round.spec().has_member(rank) ? static_cast<double>(round.bytes()) : 0;
    EXPECT_NEAR(static_cast<double>(metrics.sent_bytes), bytes, 5e4);
    EXPECT_NEAR(static_cast<double>(metrics.received_bytes), bytes, 5e4);
    EXPECT_EQ(metrics.round_count, bytes > 0 ? 1u : 0u);
  }
}

// Nobody waits for a group that waits.
TEST(Groups, GoOnBesideOneThatWaits) {
  Job job({.workers = 4, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  const TestRound late{.op = 1, .leaf_counts = {50000}, .group = {0, 3}};
  std::vector<Part> parts;
  parts.emplace_back(*job.workers[0], late, 0);
  for (uint32_t seed = 0; seed < 5; ++seed) {
    job.expect_works({.op = 2, .leaf_counts = {50000}, .seed = seed, .group = {1, 2}});
    job.expect_works({.op = 3, .leaf_counts = {50000}, .seed = seed, .group = {0, 1}});
    job.expect_works({.op = 4, .leaf_counts = {50000}, .seed = seed});
  }
  EXPECT_FALSE(parts[0].is_done());
  parts.emplace_back(*job.workers[3], late, 3);
  job.expect_done(late, parts);
}

TEST(Groups, NameTheMemberThatIsLate) {
  Job job({.workers = 4, .reducers = 2, .start_timeout = kShort, .timeout = kShort});
  ASSERT_NO_FATAL_FAILURE(job.start());
  Part part(*job.workers[0], {.leaf_counts = {50000}, .group = {0, 3}}, 0);
  const Status status = part.wait();
  EXPECT_TRUE(failed_with(status, Code::kRoundTimeout, {"waiting for rank 3 (host host-3): no progress"}));
}

TEST(Groups, ThatDifferAreNamedOnAllWorkers) {
  Job job({.workers = 4, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  std::vector<Part> parts;
  parts.emplace_back(*job.workers[0], TestRound{.leaf_counts = {50000}, .group = {0, 1}}, 0);
  parts.emplace_back(*job.workers[1], TestRound{.leaf_counts = {50000}, .group = {1, 2}}, 1);
  for (Part& part : parts) {
    EXPECT_TRUE(failed_with(part.wait(), Code::kMismatch,
                            {"rank 0 (host host-0) sent sum of float32[50000] over ranks 0, 1",
                             "rank 1 (host host-1) sent sum of float32[50000] over ranks 1, 2"}));
  }
}

TEST(Groups, AreNotForOtherWorkers) {
  Job job({.workers = 3, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  Part part(*job.workers[2], {.group = {0, 1}}, 2);
  EXPECT_TRUE(failed_with(part.wait(), Code::kMismatch, {"rank 2 (host host-2) sent", "none of these ranks itself"}));
}

TEST(Groups, LoseAMember) {
  Job job({.workers = 4, .reducers = 2, .failover = true});
  ASSERT_NO_FATAL_FAILURE(job.start());
  const TestRound round{.group = {0, 3}};
  job.expect_works(round);
  Part part(*job.workers[0], round, 0);
  job.workers[3].reset();
  EXPECT_TRUE(failed_with(part.wait(), Code::kWorkerLost, {"rank 3 (host host-3)"}));
}

// --- Reducers die.

class GroupDeaths : public testing::TestWithParam<uint32_t> {};

// At random instants, also two at once, some of them inside workers.
TEST_P(GroupDeaths, ChangeNoBit) {
  std::mt19937 random(GetParam());
  const bool mixed = random() % 2 == 0;
  Job job({.workers = 4,
           .reducers = mixed ? 4u : 6u,
           .colocated = mixed ? 2u : 0u,
           .chunk_bytes = 4096,
           .window_chunks = random() % 2 == 0 ? 0u : 3u,
           .failover = true,
           .shared_memory = GetParam() % 2 == 1});
  ASSERT_NO_FATAL_FAILURE(job.start());
  std::atomic<uint32_t> dead_count = 0;
  std::thread killer([&, seed = random()] {
    std::mt19937 chance(static_cast<uint32_t>(seed));
    for (size_t victim = 0; victim < 4; ++victim) {
      if (victim != 2) std::this_thread::sleep_for(std::chrono::microseconds(chance() % 30000));
      job.reducers[victim].reset();
      ++dead_count;
    }
  });
  uint32_t steps_after = 0;
  for (uint32_t step = 0; steps_after < 5 && !testing::Test::HasFailure(); ++step) {
    if (dead_count == 4) ++steps_after;
    expect_all_at_once(job, rounds_of_groups(step), random);
  }
  killer.join();
}

INSTANTIATE_TEST_SUITE_P(Seeds, GroupDeaths, testing::Range(0u, 6u));

// Of a group, some members have completed a round and others have not; the other workers know nothing of it.
TEST(GroupFailover, RunsARoundAgainForTheMembersThatNeedIt) {
  for (uint32_t seed = 0; seed < 5; ++seed) {
    Job job({.workers = 4, .reducers = 3, .window_chunks = 4, .failover = true});
    ASSERT_NO_FATAL_FAILURE(job.start());
    const TestRound round{.leaf_counts = {100000, 7}, .seed = seed, .group = {1, 3}};
    std::vector<Part> parts;
    parts.emplace_back(*job.workers[1], round, 1);
    job.reducers[1].reset();
    parts.emplace_back(*job.workers[3], round, 3);
    job.expect_done(round, parts);
    job.reducers[0].reset();
    job.expect_works(round);
  }
}

// What is kept of an op is freed once its members, who alone run it, have completed the same rounds.
TEST(GroupFailover, ForgetsWhatNoMemberCanNeed) {
  Job job({.workers = 3, .reducers = 3, .timeout = kShort, .failover = true});
  ASSERT_NO_FATAL_FAILURE(job.start());
  const TestRound once{.op = 1, .leaf_counts = {50000}, .group = {0, 2}};
  job.expect_works(once);
  const auto kept = [&](uint32_t rank) { return job.workers[rank]->metrics().kept_bytes; };
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  const auto wait_until = [&](size_t bytes) {
    while ((kept(0) != bytes || kept(2) != bytes) && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    EXPECT_EQ(kept(0), bytes);
    EXPECT_EQ(kept(2), bytes);
  };
  wait_until(once.bytes());
  wait_until(0);
  job.reducers[1].reset();
  job.expect_works(once);
}

// --- The end.

// Worker 2 has a reducer inside, and a voice in every change of reducers. Others still run rounds without it.
TEST(GroupEnd, ComesForAllWorkersTogether) {
  Job job({.workers = 3, .reducers = 2, .colocated = 3, .failover = true});
  ASSERT_NO_FATAL_FAILURE(job.start());
  TestRound round{.leaf_counts = {50000}, .group = {0, 1}};
  job.expect_works(round);
  std::future<Status> end = std::async(std::launch::async, [&] { return job.workers[2]->shutdown(kPatience); });
  for (round.seed = 1; round.seed < 6; ++round.seed) {
    if (round.seed == 3) job.reducers[0].reset();
    ASSERT_NO_FATAL_FAILURE(job.expect_works(round));
  }
  EXPECT_EQ(end.wait_for(milliseconds(0)), std::future_status::timeout);
  std::future<Status> other = std::async(std::launch::async, [&] { return job.workers[1]->shutdown(kPatience); });
  EXPECT_TRUE(job.workers[0]->shutdown(kPatience).ok());
  EXPECT_TRUE(other.get().ok());
  EXPECT_TRUE(end.get().ok());
}

// The one who leaves says that there are groups, before others have run a round of theirs.
TEST(GroupEnd, WaitsForGroupsThatHaveNotBegun) {
  Job job({.workers = 4, .reducers = 0, .failover = true});
  ASSERT_NO_FATAL_FAILURE(job.start());
  job.expect_works({.op = 1, .leaf_counts = {50000}, .group = {2, 3}});
  std::vector<std::future<Status>> ends;
  for (const uint32_t rank : {2u, 3u}) {
    ends.push_back(std::async(std::launch::async, [&job, rank] { return job.workers[rank]->shutdown(kPatience); }));
  }
  job.expect_works({.op = 2, .leaf_counts = {50000}, .group = {0, 1}});
  for (std::future<Status>& end : ends) EXPECT_EQ(end.wait_for(milliseconds(0)), std::future_status::timeout);
  for (const uint32_t rank : {0u, 1u}) {
    ends.push_back(std::async(std::launch::async, [&job, rank] { return job.workers[rank]->shutdown(kPatience); }));
  }
  for (std::future<Status>& end : ends) EXPECT_TRUE(end.get().ok());
}

}  // namespace
}  // namespace jaxhetero
