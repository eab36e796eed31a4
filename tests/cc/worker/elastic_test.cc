// A worker of an elastic job is lost, and the others go on: each round counts it wholly or not at all.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/job.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {
namespace {

Shape elastic(Shape shape) {
  shape.least = std::max(shape.least, 2u);
  shape.failover = true;
  return shape;
}

// These workers' parts in a round.
std::vector<Part> begin(Job& job, const TestRound& round, const std::vector<uint32_t>& ranks) {
  std::vector<Part> parts;
  for (const uint32_t rank : ranks) parts.emplace_back(*job.workers[rank], round, rank);
  return parts;
}

TestRound among(TestRound round, std::vector<uint32_t> ranks) {
  round.group = std::move(ranks);
  return round;
}

// That all parts are done, with the bits of the round among one of these.
void expect_one_of(std::vector<Part>& parts, const std::vector<TestRound>& possible) {
  for (Part& part : parts) {
    const Status status = part.wait();
    ASSERT_TRUE(status.ok()) << status.message();
  }
  for (const TestRound& round : possible) {
    const Bytes output = round.output(0);
    if (std::ranges::all_of(parts, [&](const Part& part) { return part.has(output); })) return;
  }
  FAIL() << "the totals differ, or are those of nobody";
}

void expect_shutdown(Job& job) {
  std::vector<std::thread> leaving;
  for (const auto& worker : job.workers) {
    if (!worker) continue;
    leaving.emplace_back([&worker] {
      const Status status = worker->shutdown(kPatience);
      EXPECT_TRUE(status.ok()) << status.message();
    });
  }
  for (std::thread& thread : leaving) thread.join();
  const std::optional<Status> end = job.coordinator->wait(kPatience);
  ASSERT_TRUE(end.has_value());
  EXPECT_TRUE(end->ok()) << end->message();
}

// Of every size and kind: small ones are given at once, and large ones have parts on all strands.
std::vector<TestRound> rounds() {
  return {{.op = 1, .leaf_counts = {10}},
          {.op = 2, .leaf_counts = {60000}},
          {.op = 3, .dtype = DType::kBF16, .leaf_counts = {70000, 3}, .converts = true},
          {.op = 4, .kind = Kind::kMax, .leaf_counts = {20000}, .in_place = true},
          {.op = 5, .leaf_counts = {30000}, .in_place = true}};
}

TEST(Elastic, GoesOnWithoutAWorkerThatHasNotCome) {
  for (const uint32_t strands : {1u, 2u, 4u}) {
    Job job(elastic({.workers = 3, .reducers = 2, .strands = strands}));
    ASSERT_NO_FATAL_FAILURE(job.start());
    for (const TestRound& round : rounds()) job.expect_works(round);
    std::vector<std::vector<Part>> under_way;
    for (const TestRound& round : rounds()) under_way.push_back(begin(job, round, {0, 2}));
    job.workers[1].reset();
    for (size_t i = 0; i < under_way.size(); ++i) expect_one_of(under_way[i], {among(rounds()[i], {0, 2})});
    for (const TestRound& round : rounds()) {
      std::vector<Part> parts = begin(job, round, {0, 2});
      expect_one_of(parts, {among(round, {0, 2})});
    }
    expect_shutdown(job);
  }
}

// At any moment of rounds that all have begun: those that are left have the same, with the lost one or without.
void expect_whole_rounds(const Shape& shape, uint32_t seed) {
  Job job(elastic(shape));
  ASSERT_NO_FATAL_FAILURE(job.start());
  std::mt19937 random(seed);
  const std::vector<uint32_t> left = {0, 2, 3};
  std::vector<std::vector<Part>> under_way;
  for (const TestRound& round : rounds()) under_way.push_back(begin(job, round, left));
  std::vector<std::vector<Part>> of_lost;
  for (const TestRound& round : rounds()) of_lost.push_back(begin(job, round, {1}));
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 6000));
  job.workers[1].reset();
  for (size_t i = 0; i < under_way.size(); ++i) {
    expect_one_of(under_way[i], {among(rounds()[i], {0, 1, 2, 3}), among(rounds()[i], left)});
  }
  for (const TestRound& round : rounds()) {
    std::vector<Part> parts = begin(job, round, left);
    expect_one_of(parts, {among(round, left)});
  }
  expect_shutdown(job);
}

TEST(Elastic, CountsALostWorkerWhollyOrNotAtAll) {
  for (uint32_t seed = 0; seed < 12; ++seed) {
    expect_whole_rounds({.workers = 4, .reducers = 2, .shared_memory = seed % 2 == 0, .strands = 1 + seed % 3}, seed);
  }
}

// Reducers inside die with it.
TEST(Elastic, LosesAWorkerAndTheReducerInsideTogether) {
  for (const bool dies_first : {false, true}) {
    Job job(elastic({.workers = 4, .reducers = 0}));
    ASSERT_NO_FATAL_FAILURE(job.start());
    for (const TestRound& round : rounds()) job.expect_works(round);
    std::vector<Part> parts = begin(job, rounds()[1], {0, 2, 3});
    if (dies_first) job.reducers[1].reset();
    job.workers[1].reset();
    job.reducers[1].reset();
    expect_one_of(parts, {among(rounds()[1], {0, 2, 3})});
    job.reducers.erase(job.reducers.begin() + 1);
    expect_shutdown(job);
  }
}

TEST(Elastic, GoesOnInAGroup) {
  Job job(elastic({.workers = 4, .reducers = 2}));
  ASSERT_NO_FATAL_FAILURE(job.start());
  const TestRound round{.op = 9, .leaf_counts = {40000}, .group = {0, 1, 3}};
  job.expect_works(round);
  std::vector<Part> parts = begin(job, round, {0, 3});
  job.workers[1].reset();
  expect_one_of(parts, {among(round, {0, 3})});
  job.workers[3].reset();
  parts = begin(job, round, {0});
  expect_one_of(parts, {among(round, {0})});
  expect_shutdown(job);
}

TEST(Elastic, GoesOnWhileTheCoordinatorIsAway) {
  for (const bool dies : {false, true}) {
    Job job(elastic({.workers = 4, .reducers = 2, .lost_after = kShort}));
    ASSERT_NO_FATAL_FAILURE(job.start());
    job.coordinator.reset();
    for (const TestRound& round : rounds()) job.expect_works(round);
    std::vector<uint32_t> left = {0, 1, 2, 3};
    std::vector<Part> parts = begin(job, rounds()[1], {0, 2, 3});
    if (dies) {
      job.workers[1].reset();
      left = {0, 2, 3};
    } else {
      parts.emplace_back(*job.workers[1], rounds()[1], 1);
    }
    job.start_coordinator();
    expect_one_of(parts, {among(rounds()[1], left)});
    for (const TestRound& round : rounds()) {
      parts = begin(job, round, left);
      expect_one_of(parts, {among(round, left)});
    }
    expect_shutdown(job);
  }
}

TEST(Elastic, EndsWithLessThanTheLeast) {
  Job job(elastic({.workers = 3, .reducers = 1, .least = 3}));
  ASSERT_NO_FATAL_FAILURE(job.start());
  std::vector<Part> parts = begin(job, rounds()[1], {0, 2});
  job.workers[1].reset();
  for (Part& part : parts) {
    EXPECT_TRUE(failed_with(part.wait(), Code::kWorkerLost, {"rank 1", "2 workers are left", "at least 3"}));
  }
  EXPECT_EQ(job.coordinator->wait(kPatience)->code(), Code::kWorkerLost);
}

// The last steps survive a death, too.
TEST(Elastic, LosesAWorkerWhileOthersLeave) {
  Job job(elastic({.workers = 4, .reducers = 2}));
  ASSERT_NO_FATAL_FAILURE(job.start());
  for (const TestRound& round : rounds()) job.expect_works(round);
  std::thread first([&] { EXPECT_TRUE(job.workers[0]->shutdown(kPatience).ok()); });
  std::this_thread::sleep_for(milliseconds(50));
  job.workers[1].reset();
  std::vector<Part> parts = begin(job, among({.op = 9, .leaf_counts = {40000}}, {2, 3}), {2, 3});
  expect_one_of(parts, {among({.op = 9, .leaf_counts = {40000}}, {2, 3})});
  std::thread second([&] { EXPECT_TRUE(job.workers[2]->shutdown(kPatience).ok()); });
  EXPECT_TRUE(job.workers[3]->shutdown(kPatience).ok());
  first.join();
  second.join();
  EXPECT_TRUE(job.coordinator->wait(kPatience)->ok());
}

// It is done, and others are not.
TEST(Elastic, GoesOnWithoutAWorkerThatHasLeft) {
  Job job(elastic({.workers = 3, .reducers = 0, .least = 3}));
  ASSERT_NO_FATAL_FAILURE(job.start());
  for (const TestRound& round : rounds()) job.expect_works(round);
  std::thread first([&] { EXPECT_TRUE(job.workers[0]->shutdown(kPatience).ok()); });
  std::vector<Part> parts = begin(job, rounds()[1], {1, 2});
  expect_one_of(parts, {among(rounds()[1], {1, 2})});
  first.join();
  job.workers[0].reset();
  expect_shutdown(job);
}

// It is alive, but all others wait for it.
TEST(Elastic, GoesOnWithoutAWorkerThatIsStuck) {
  Job job(elastic({.workers = 4, .reducers = 2, .start_timeout = kShort, .timeout = kShort}));
  ASSERT_NO_FATAL_FAILURE(job.start());
  for (const TestRound& round : rounds()) job.expect_works(round);
  std::vector<Part> parts = begin(job, rounds()[1], {0, 1, 3});
  expect_one_of(parts, {among(rounds()[1], {0, 1, 3})});
  const Status why = job.workers[2]->shutdown(kPatience);
  job.workers[2].reset();
  EXPECT_TRUE(why.ok() || why.code() == Code::kWorkerLost);
  expect_shutdown(job);
}

}  // namespace
}  // namespace jaxhetero
