// Plans that follow rates while rounds run.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/job.h"
#include "xla_ffi/membership/rate_watch.h"
#include "xla_ffi/membership/slow_watch.h"
#include "xla_ffi/membership/visit.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

uint64_t rate_changes(const Job& job) { return job.workers[0]->metrics().rate_change_count; }

// As if one reducer carried so many sixteenths of what all others do, and had the planned ones: all workers say so, for
// long enough.
void claim_slow(const Job& job, uint32_t reducer_count, uint32_t slow, uint64_t sixteenths, uint32_t planned = 16) {
  Goodput goodput;
  goodput.round_count = 1;
  for (uint32_t reducer = 0; reducer < reducer_count; ++reducer) {
    const bool is_slow = reducer == slow;
    goodput.links.push_back({reducer, is_slow ? planned : 16, 1000 * (is_slow ? sixteenths : 16), 1000});
  }
  for (int look = 0; look < RateWatch::kLooks; ++look) {
    for (const auto& worker : job.workers) worker->tell_goodput(goodput);
  }
}

// Until the plan has followed it. In a view that changes just then, nobody listens.
void make_plan_follow(const Job& job, uint32_t reducer_count, uint32_t slow, uint64_t sixteenths,
                      uint32_t planned = 16) {
  const uint64_t before = rate_changes(job);
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (rate_changes(job) == before && std::chrono::steady_clock::now() < deadline) {
    claim_slow(job, reducer_count, slow, sixteenths, planned);
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_GT(rate_changes(job), before);
}

// What each reducer has received since the last call.
class Shares {
 public:
  explicit Shares(const Job& job) : job_(job) { take(); }
  std::vector<uint64_t> take() {
    std::vector<uint64_t> now;
    for (const auto& reducer : job_.reducers) now.push_back(reducer->metrics().received_bytes);
    std::vector<uint64_t> grown;
    for (size_t i = 0; i < now.size(); ++i) grown.push_back(now[i] - (i < before_.size() ? before_[i] : 0));
    before_ = now;
    return grown;
  }

 private:
  const Job& job_;
  std::vector<uint64_t> before_;
};

TEST(Rates, GiveASlowReducerLessAndThenAsMuchAgain) {
  Job job({.workers = 3, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  const TestRound round{.leaf_counts = {400'000}};
  job.expect_works(round);
  Shares shares(job);
  make_plan_follow(job, 2, 1, 4);
  job.expect_works(round);
  // The reducers are numbered as they have come, so that either may be the slow one.
  std::vector<uint64_t> bytes = shares.take();
  std::ranges::sort(bytes);
  EXPECT_NEAR(static_cast<double>(bytes[0]) / static_cast<double>(bytes[1]), 0.25, 0.03);
  make_plan_follow(job, 2, 1, 15, 4);
  shares.take();
  job.expect_works(round);
  bytes = shares.take();
  EXPECT_NEAR(static_cast<double>(bytes[0]) / static_cast<double>(bytes[1]), 1, 0.03);
  EXPECT_EQ(job.workers[2]->metrics().view_count, 0u);
  job.expect_shutdown();
}

// All workers say that rounds are so fast, in percent of something that no real round is as fast as, and that they
// waited for this reducer.
void claim_wait(const Job& job, uint64_t percent, int32_t reducer) {
  Goodput goodput{0, 1, {}, {1'000'000 * percent, 1000, uint64_t{1} << 32, reducer}};
  const auto count = static_cast<uint32_t>(job.reducers.size());
  for (uint32_t number = 0; number < count; ++number) goodput.links.push_back({number, NewRates::kFullRate, 0, 0});
  for (const auto& worker : job.workers) worker->tell_goodput(goodput);
  std::this_thread::sleep_for(milliseconds(10));  // reducers are asked meanwhile
}

TEST(Rates, GiveTheReducerInAWorkerLessForWhichAllWait) {
  Job job({.workers = 4, .reducers = 0, .colocated = 4});
  ASSERT_NO_FATAL_FAILURE(job.start());
  const TestRound round{.leaf_counts = {400'000}};
  job.expect_works(round);
  for (int look = 0; look < 3; ++look) claim_wait(job, 100, -1);
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (rate_changes(job) == 0 && std::chrono::steady_clock::now() < deadline) claim_wait(job, 60, 2);
  EXPECT_EQ(rate_changes(job), 1u);
  std::optional<Event> event;
  while ((event = job.workers[0]->next_event(kPatience)) && !has(event->text, "have changed")) continue;
  EXPECT_TRUE(event && has(event->text, "reducer 2 (host ") && has(event->text, ") carries 60 % of what the fastest"))
      << (event ? event->text : "");
  const std::vector<Coordinator::SlowReducer> slow = job.workers[0]->slow_reducers();
  ASSERT_EQ(slow.size(), 1u);
  EXPECT_EQ(slow[0].number, 2u);
  EXPECT_NEAR(slow[0].percent, 60, 1);
  EXPECT_TRUE(job.workers[1]->slow_reducers().empty()) << "only rank 0 knows";
  Shares shares(job);
  job.expect_works(round);
  std::vector<uint64_t> bytes = shares.take();
  std::ranges::sort(bytes);
  // It has to send its own, which takes as long as all that the others do.
  EXPECT_LT(20 * bytes[0], bytes[1]);
  EXPECT_LT(bytes[3], bytes[1] + bytes[1] / 8);
  job.expect_shutdown();
}

TEST(Rates, AreNotFollowedForAMoment) {
  Job job({.workers = 2, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  Goodput goodput{0, 1, {{0, 1, 100, 10}, {1, 1, 10, 10}}};
  for (int look = 1; look < RateWatch::kLooks; ++look) {
    for (const auto& worker : job.workers) worker->tell_goodput(goodput);
  }
  for (const auto& worker : job.workers) worker->tell_goodput({0, 2, {{0, 1, 100, 10}, {1, 1, 100, 10}}});
  job.expect_works({.leaf_counts = {50000}});
  for (const auto& worker : job.workers) worker->tell_goodput(goodput);
  job.expect_works({.leaf_counts = {50000}, .seed = 1});
  EXPECT_EQ(rate_changes(job), 0u);
  job.expect_shutdown();
}

// What is no reducer of the view counts for nothing, and one of which nothing is known cannot be compared.
TEST(Rates, OfStrangersAreNotFollowed) {
  Job job({.workers = 2, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  for (uint32_t look = 0; look < 2 * RateWatch::kLooks; ++look) {
    for (const auto& worker : job.workers) worker->tell_goodput({0, 9, {{0, 1, 100, 10}, {7 + look, 1, 1000, 10}}});
  }
  job.expect_works({.leaf_counts = {50000}});
  EXPECT_EQ(rate_changes(job), 0u);
  job.expect_shutdown();
}

// All workers say that every link carried so much, in one look after the other.
void claim_pace(const Job& job, uint64_t bytes) {
  const Goodput goodput{0, 1, {{0, 16, bytes, 1000}, {1, 16, bytes, 1000}}};
  for (const auto& worker : job.workers) worker->tell_goodput(goodput);
  std::this_thread::sleep_for(milliseconds(1));  // reducers are asked meanwhile
}

// Until it is so; and the next word about a slow worker in the log.
std::string claim_until_slow(const Job& job, uint64_t bytes, int32_t rank) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (job.workers[0]->slow_rank() != rank && std::chrono::steady_clock::now() < deadline) claim_pace(job, bytes);
  EXPECT_EQ(job.workers[0]->slow_rank(), rank);
  std::optional<Event> event;
  while ((event = job.workers[0]->next_event(kPatience)) && !has(event->text, "slow")) continue;
  return event ? event->text : "";
}

uint32_t rate_percent(Job& job, int32_t rank) {
  Result<JobState> state = visit({job.address()}, bytes_of("secret"), false, kPatience);
  EXPECT_TRUE(state.ok()) << state.status().message();
  if (!state.ok()) return ~0u;
  const auto found = std::ranges::find_if(state->processes, [rank](const JobState::Process& process) {
    return process.role == Role::kWorker && process.rank == rank;
  });
  return found == state->processes.end() ? ~0u : found->rate_percent;
}

TEST(Rates, OfASlowWorkerNameIt) {
  Job job({.workers = 3, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  job.expect_works({});
  for (int look = 0; look < 2 * SlowWatch::kLooks; ++look) claim_pace(job, 1000);
  // Reducers wait for rank 2, as for what it sends slowly.
  const TestRound round{.op = 2, .leaf_counts = {50000}};
  std::vector<std::unique_ptr<Part>> parts;
  for (uint32_t rank : {0u, 1u}) parts.push_back(std::make_unique<Part>(*job.workers[rank], round, rank));
  EXPECT_EQ(claim_until_slow(job, 500, 2),
            "rank 2 (host host-2) has become slow: all rounds wait for what it sends, at 50 % of the best rate so far; "
            "no other plan helps");
  EXPECT_EQ(rate_percent(job, 2), 50u);
  EXPECT_EQ(rate_percent(job, 1), 0u);
  EXPECT_EQ(job.workers[1]->slow_rank(), -1) << "only rank 0 knows";
  parts.push_back(std::make_unique<Part>(*job.workers[2], round, 2));
  for (uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(parts[rank]->wait().ok());
    EXPECT_TRUE(parts[rank]->has(round.output(3, rank)));
  }
  EXPECT_EQ(claim_until_slow(job, 900, -1),
            "rank 2 (host host-2) is no longer slow: rounds run at 90 % of the best rate so far");
  EXPECT_EQ(rate_percent(job, 2), 0u);
  EXPECT_EQ(rate_changes(job), 0u);
  job.expect_shutdown();
}

// It comes late to rounds, which then are as fast as others.
TEST(Rates, OfALateWorkerNameNobody) {
  Job job({.workers = 3, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  job.expect_works({});
  const TestRound round{.op = 2, .leaf_counts = {50000}};
  std::vector<std::unique_ptr<Part>> parts;
  for (uint32_t rank : {0u, 1u}) parts.push_back(std::make_unique<Part>(*job.workers[rank], round, rank));
  for (int look = 0; look < 9 * SlowWatch::kLooks; ++look) claim_pace(job, 1000);
  EXPECT_EQ(rate_percent(job, 2), 0u);
  EXPECT_EQ(job.workers[0]->slow_rank(), -1);
  parts.push_back(std::make_unique<Part>(*job.workers[2], round, 2));
  for (const auto& part : parts) EXPECT_TRUE(part->wait().ok());
  job.expect_shutdown();
}

// Changes at random instants, under rounds of several ops that workers begin in orders of their own, of which one may
// be several ahead of another. All use the same plan for the same round, or a reducer would end the job. Every result
// is compared, to the bit; and with failover, reducers die meanwhile.
class ChangesTest : public testing::TestWithParam<uint32_t> {};

TEST_P(ChangesTest, ChangeNoBit) {
  std::mt19937 random(GetParam());
  constexpr uint32_t kReducers = 5;
  const bool dies = GetParam() % 2 == 1;
  const uint32_t inside = GetParam() % 8 >= 6 ? 3 : 0;
  Job job({.workers = 3,
           .reducers = kReducers,
           .colocated = inside,
           .chunk_bytes = 4096,
           .window_chunks = random() % 2 == 0 ? 0u : 3u,
           .failover = dies,
           .shared_memory = GetParam() % 4 == 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  std::atomic<bool> is_over = false;
  std::thread changer([&, seed = random()] {
    std::mt19937 chance(static_cast<uint32_t>(seed));
    uint32_t deaths = 0;
    for (uint32_t turn = 0; !is_over; ++turn) {
      claim_slow(job, kReducers + inside, chance() % (kReducers + inside), 1 + chance() % 8);
      if (dies && deaths < 3 && turn % 3 == 2) job.reducers[deaths++].reset();  // as when its process is killed
      // Until it has been followed, or for a while: deaths come at any instant of a change.
      std::this_thread::sleep_for(std::chrono::microseconds(chance() % 20'000));
    }
  });
  const std::vector<size_t> counts = {3, 15000, 50000, 5000, 30000, 10000, 8000};
  for (uint32_t step = 0; (step < 10 || rate_changes(job) < 3) && !HasFailure(); ++step) {
    std::vector<std::vector<TestRound>> rounds(counts.size());
    std::vector<std::vector<std::vector<Part>>> parts(counts.size());  // by op, rank and turn
    constexpr uint32_t kTurns = 3;
    for (uint64_t op = 0; op < counts.size(); ++op) {
      parts[op].resize(job.workers.size());
      const Kind kind = op == 3 ? Kind::kBroadcast : op == 5 ? Kind::kScatter : op == 6 ? Kind::kGather : Kind::kSum;
      for (uint32_t turn = 0; turn < kTurns; ++turn) {
        rounds[op].push_back({.op = op,
                              .kind = kind,
                              .leaf_counts = {counts[op], 1},
                              .root = 1,
                              .seed = (step * kTurns + turn) * 8 + static_cast<uint32_t>(op),
                              .in_place = op == 2,
                              .rows = has_rows(kind) ? 3u : 1u});
      }
    }
    for (uint32_t rank = 0; rank < job.workers.size(); ++rank) {
      std::vector<size_t> order = {0, 1, 2, 3, 4, 5, 6};
      std::ranges::shuffle(order, random);
      for (size_t op : order) {
        for (const TestRound& round : rounds[op]) parts[op][rank].emplace_back(*job.workers[rank], round, rank);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    }
    for (size_t op = 0; op < counts.size(); ++op) {
      for (uint32_t turn = 0; turn < kTurns; ++turn) {
        Bytes output;
        for (uint32_t rank = 0; rank < job.workers.size(); ++rank) {
          const Status status = parts[op][rank][turn].wait();
          EXPECT_TRUE(status.ok()) << "step " << step << " op " << op << " rank " << rank << ": " << status.message();
          if (rank == 0 || !rounds[op][turn].is_same_for_all()) output = rounds[op][turn].output(3, rank);
          EXPECT_TRUE(parts[op][rank][turn].has(output)) << "step " << step << " op " << op << " rank " << rank;
        }
      }
    }
  }
  is_over = true;
  changer.join();
  EXPECT_GE(rate_changes(job), 3u);
  if (!HasFailure()) {
    for (const auto& worker : job.workers) EXPECT_TRUE(worker->shutdown(kPatience).ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, ChangesTest, testing::Range(0u, 8u));

}  // namespace
}  // namespace jaxhetero
