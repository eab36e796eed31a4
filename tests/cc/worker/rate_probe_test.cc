#include "xla_ffi/worker/rate_probe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

namespace jaxhetero {
namespace {

constexpr uint32_t kWorkers = 4;

// Plays the other workers and the network: a round takes what a test says, whatever was pushed.
class RateProbeTest : public testing::Test {
 protected:
  // Dedicated reducers with such times for a MiB each, and so many inside workers with that one.
  void start(const std::vector<int64_t>& dedicated_us, size_t colocated_count = 0, int64_t colocated_us = 0,
             const std::vector<int64_t>& rails_us = {0}) {
    std::vector<ReducerPlace> places(dedicated_us.size());
    places.resize(places.size() + colocated_count, {.colocated = true});
    us_per_mib_ = dedicated_us;
    us_per_mib_.resize(places.size(), colocated_us);
    probe_.emplace(kWorkers, places, ShardPlan::Pace(), rails_us.size());
    us_per_mib_.insert(us_per_mib_.end(), rails_us.begin(), rails_us.end());
  }

  // Runs the next round; false when there is none.
  bool run_round(bool undisturbed = true, int64_t answer_count = kWorkers,
                 const std::vector<RateProbe::ShardTime>& times = {}) {
    const std::optional<RoundRequest> request = probe_->next();
    if (!request.has_value()) return false;
    EXPECT_TRUE(request->is_internal);
    if (request->plan) {
      pushed_bytes_ = request->inputs.bytes();
      shard_count_ = request->plan->owner_count();
      chunk_bytes_ = sizeof(float) * request->plan->items_per_chunk(pushed_bytes_ / sizeof(float), sizeof(float));
    } else {
      std::vector<int64_t> totals{answer_count};
      const int64_t speed = chunk_bytes_ >= 65536 ? speed_of_large_chunks_ : 1;
      const int64_t percent = probe_->pushing_strand_count() == 1 ? percent_of_one_strand_ : 100;
      for (const int64_t us : us_per_mib_) {
        totals.push_back(kWorkers * us * percent / 100 / speed * static_cast<int64_t>(pushed_bytes_ / shard_count_) >>
                         20);
      }
      const auto messages = static_cast<int64_t>(2 * (pushed_bytes_ / chunk_bytes_));
      const auto bytes_ps = static_cast<int64_t>(2 * pushed_bytes_) * ps_per_byte_;
      totals.push_back(kWorkers * (messages * ns_per_message_ + bytes_ps / 1000));
      totals.push_back(kWorkers * messages);
      std::vector<iovec> into;
      request->outputs.slice(0, request->outputs.bytes(), into);
      std::memcpy(into[0].iov_base, totals.data(), into[0].iov_len);
    }
    probe_->finish(undisturbed, {times, {}});
    return true;
  }
  void run() {
    for (int round = 0; run_round(); ++round) ASSERT_LT(round, 30) << "it does not end";
  }

  std::optional<RateProbe> probe_;
  std::vector<int64_t> us_per_mib_;
  // What the cores take.
  int64_t ns_per_message_ = 0;
  int64_t ps_per_byte_ = 0;
  int64_t speed_of_large_chunks_ = 1;    // how many times as fast the network carries them
  int64_t percent_of_one_strand_ = 100;  // how long one takes
  size_t pushed_bytes_ = 0;
  size_t shard_count_ = 1;
  size_t chunk_bytes_ = 1;
};

using Rates = std::vector<uint32_t>;

TEST_F(RateProbeTest, TakesWhatIsNearlyEqualForEqual) {
  start({40'000, 42'000, 41'000});
  run();
  EXPECT_EQ(probe_->rates(), Rates(3, RateProbe::kFullRate));
  // Every worker pushed a MiB there in that time.
  EXPECT_NEAR(static_cast<double>(probe_->bytes_per_s()), kWorkers * (1 << 20) / 0.04, 1e6);
  EXPECT_NEAR(static_cast<double>(probe_->window_bytes()), (1 << 20) * 7.0 / 40, 100);
}

TEST_F(RateProbeTest, FindsTheSlowOnes) {
  start({40'000, 80'000, 160'000, 40'000});
  run();
  EXPECT_EQ(probe_->rates(), Rates({16, 8, 4, 16}));
}

// A worker of four with a reducer in each sends 6 / 4 of a bucket, a dedicated one of two 4 / 2 of it: equal times for
// equal shards are interfaces of 3 : 4.
TEST_F(RateProbeTest, ComparesWorkersWithDedicatedReducers) {
  start({40'000, 40'000}, 4, 40'000);
  run();
  EXPECT_EQ(probe_->rates(), Rates({16, 16, 24, 24, 24, 24}));
  for (const int64_t nearly_equal_us : {50'000, 60'000, 80'000}) {
    start({40'000, 40'000}, 4, nearly_equal_us);
    run();
    EXPECT_EQ(probe_->rates(), Rates(6, 16));
  }
}

TEST_F(RateProbeTest, WorksWithoutDedicatedReducers) {
  start({}, 4, 60'000);
  run();
  EXPECT_EQ(probe_->rates(), Rates(4, 16));
  EXPECT_GT(probe_->bytes_per_s(), 0u);
}

TEST_F(RateProbeTest, ComparesTheRailsOfHosts) {
  start({40'000, 40'000}, 0, 0, {40'000, 42'000, 80'000});
  run();
  EXPECT_EQ(probe_->rates(), Rates({16, 16}));
  EXPECT_EQ(probe_->rail_rates(), Rates({16, 16, 8}));
}

// On a slow network the first probe may be too small to be cut for all strands.
TEST_F(RateProbeTest, TakesRailsThatCarriedNothingForEqual) {
  start({40'000, 40'000}, 0, 0, {40'000, 0});
  run();
  EXPECT_EQ(probe_->rail_rates(), Rates({16, 16}));
}

TEST_F(RateProbeTest, PushesMoreUntilItTakesLongEnough) {
  start({400});
  run();
  EXPECT_GE(pushed_bytes_, 16u << 20);
  EXPECT_LE(pushed_bytes_, 64u << 20);
}

// Of a few chunks, the order in which they go out would tell more than the rates.
TEST_F(RateProbeTest, PushesManyChunksFromTheBeginning) {
  start({1'000'000, 1'000'000});
  ASSERT_TRUE(run_round());
  ASSERT_TRUE(run_round());
  const ShardPlan plan({1, 1}, ShardPlan::Pace());
  const uint64_t count = pushed_bytes_ / sizeof(float);
  EXPECT_GE(count / 2, 16 * plan.items_per_chunk(count, sizeof(float)));
}

TEST_F(RateProbeTest, GivesNoAnswerWhereOneWorkerWasDisturbed) {
  start({40'000, 80'000});
  ASSERT_TRUE(run_round());
  ASSERT_TRUE(run_round());
  ASSERT_TRUE(run_round(true, kWorkers - 1));
  EXPECT_FALSE(run_round());
  EXPECT_TRUE(probe_->rates().empty());
}

TEST_F(RateProbeTest, SaysThatItWasDisturbed) {
  start({40'000, 80'000});
  ASSERT_TRUE(run_round());
  ASSERT_TRUE(run_round(false));
  const std::optional<RoundRequest> request = probe_->next();
  ASSERT_TRUE(request.has_value());
  std::vector<iovec> operands;
  request->inputs.slice(0, sizeof(int64_t), operands);
  int64_t valid = -1;
  std::memcpy(&valid, operands[0].iov_base, sizeof valid);
  EXPECT_EQ(valid, 0);
}

// Pushes, has the shards of two reducers and the rails take so long here, and returns what this worker tells the others
// of all of them.
std::vector<int64_t> own_times(RateProbe& probe, int64_t first_us, int64_t second_us, std::vector<int64_t> rails_us) {
  EXPECT_TRUE(probe.next()->plan != nullptr);
  probe.finish(true, {{{0, first_us}, {1, second_us}}, std::move(rails_us)});
  const std::optional<RoundRequest> agree = probe.next();
  std::vector<int64_t> own(agree->inputs.bytes() / sizeof(int64_t));
  std::vector<iovec> operands;
  agree->inputs.slice(0, agree->inputs.bytes(), operands);
  std::memcpy(own.data(), operands[0].iov_base, operands[0].iov_len);
  return {own.begin() + 1, own.end() - 2};  // without the time on cores and the number of messages
}

// Two sizes of chunks, and what cores take for each.
TEST_F(RateProbeTest, FindsWhatAMessageAndAByteCost) {
  ns_per_message_ = 5'000;
  ps_per_byte_ = 300;
  start({2'000, 2'000});
  run();
  EXPECT_EQ(chunk_bytes_, 65536u);
  EXPECT_NEAR(static_cast<double>(probe_->costs().message_ps), 5e6, 5e3);
  EXPECT_NEAR(static_cast<double>(probe_->costs().byte_fs), 3e5, 3e2);
}

TEST_F(RateProbeTest, AsksNothingMoreOfCoresThatHaveLittleToDo) {
  ns_per_message_ = 5'000;
  ps_per_byte_ = 300;
  start({80'000, 80'000});
  run();
  EXPECT_LT(chunk_bytes_, 65536u);
  EXPECT_EQ(probe_->costs().message_ps, 0u);
}

// In small chunks, the rate is that of the cores.
TEST_F(RateProbeTest, TakesTheRateOfLargeChunksWhereCoresAreTheLimitOfSmallOnes) {
  ns_per_message_ = 5'000;
  ps_per_byte_ = 300;
  speed_of_large_chunks_ = 2;
  for (const int64_t us_per_mib : {2'000, 8'000}) {  // for each of two reducers; their cores take 5.4 ms
    start({us_per_mib, us_per_mib});
    run();
    const double rate = kWorkers * (1 << 20) * 1e6 / static_cast<double>(us_per_mib);
    const bool is_bound = us_per_mib == 2'000;
    EXPECT_NEAR(static_cast<double>(probe_->bytes_per_s()), is_bound ? 2 * rate : rate, 0.01 * rate);
    EXPECT_NEAR(static_cast<double>(probe_->most_bytes_per_s()), 2 * rate, 0.02 * rate);
  }
}

// Of one reducer for four workers: its cores are busy for as long as those of all of them, and so they are the limit.
TEST_F(RateProbeTest, TakesTheRateOfLargeChunksWhereTheCoresOfReducersAreTheLimit) {
  ns_per_message_ = 5'000;
  ps_per_byte_ = 300;
  speed_of_large_chunks_ = 2;
  constexpr int64_t kUsPerMib = 6'000;  // a worker's core takes 1.3 ms
  start({kUsPerMib});
  run();
  EXPECT_NEAR(static_cast<double>(probe_->bytes_per_s()), 2 * kWorkers * (1 << 20) * 1e6 / kUsPerMib, 1e7);
  EXPECT_NEAR(static_cast<double>(probe_->costs().message_ps), 5e6, 5e3);
}

// Of two strands and one, with such a time of the latter over that of the former.
class ChoiceOfStrandsTest : public RateProbeTest {
 protected:
  uint32_t best_strand_count(int64_t percent, int64_t us_per_mib = 8'000, bool chooses_strands = true) {
    percent_of_one_strand_ = percent;
    start({us_per_mib, us_per_mib});
    probe_.emplace(kWorkers, std::vector<ReducerPlace>(2), ShardPlan::Pace(), 1, 2, chooses_strands);
    run();
    EXPECT_EQ(probe_->rates(), Rates({16, 16}));
    return probe_->best_strand_count();
  }
};

TEST_F(ChoiceOfStrandsTest, TakesTwoWhereTheyAreFaster) { EXPECT_EQ(best_strand_count(125), 2u); }

TEST_F(ChoiceOfStrandsTest, TakesOneWhereTwoAreHardlyFaster) {
  EXPECT_EQ(best_strand_count(110), 1u);
  EXPECT_EQ(best_strand_count(100), 1u);
}

TEST_F(ChoiceOfStrandsTest, TakesOneWhereTwoAreSlower) {
  EXPECT_EQ(best_strand_count(80), 1u);
  EXPECT_NEAR(static_cast<double>(probe_->most_bytes_per_s()), kWorkers * (1 << 20) / 0.008 / 0.8, 1e7);
}

TEST_F(ChoiceOfStrandsTest, TakesOneWhereTheNetworkIsSlow) { EXPECT_EQ(best_strand_count(125, 80'000), 1u); }

TEST_F(ChoiceOfStrandsTest, AsksAfterTheCostsOfMessages) {
  ns_per_message_ = 5'000;
  ps_per_byte_ = 300;
  EXPECT_EQ(best_strand_count(125), 2u);
  EXPECT_EQ(best_strand_count(80), 1u);
  EXPECT_NEAR(static_cast<double>(probe_->costs().message_ps), 5e6, 5e3);
}

TEST_F(ChoiceOfStrandsTest, TakesAllWhereTheNetworkNeedsThem) { EXPECT_EQ(best_strand_count(80, 2'000), 2u); }

TEST_F(ChoiceOfStrandsTest, LeavesANumberThatIsSet) { EXPECT_EQ(best_strand_count(80, 8'000, false), 2u); }

// A host that was busy once does not look slow.
TEST_F(RateProbeTest, TakesTheShortestOfSeveralTimes) {
  constexpr int64_t kLongUs = 400'000;
  start({kLongUs, kLongUs});
  ASSERT_TRUE(run_round());
  std::vector<int64_t> times;
  for (const int64_t second_us : {90'000, 3'000, 80'000}) {
    times = own_times(*probe_, 5'000, second_us, {second_us});
    pushed_bytes_ = size_t{2} << 20;
    shard_count_ = 2;
    ASSERT_TRUE(run_round());
  }
  EXPECT_EQ(times, std::vector<int64_t>({5'000, 3'000, 3'000}));
}

// Only pushes tell of the interfaces.
TEST_F(RateProbeTest, TellsNothingOfARailThatCarriedNothing) {
  start({1, 1}, 0, 0, {0, 0});
  ASSERT_TRUE(run_round());
  EXPECT_EQ(own_times(*probe_, 50, 60, {60, 0}), std::vector<int64_t>({50, 60, 60, 0}));
}

TEST_F(RateProbeTest, TakesNoTimesOfItsAgreements) {
  start({1, 1});
  ASSERT_TRUE(run_round(true, kWorkers, {{0, 7}, {1, 7}}));
  EXPECT_EQ(own_times(*probe_, 50, 60, {70}), std::vector<int64_t>({50, 60, 70}));
}

}  // namespace
}  // namespace jaxhetero
