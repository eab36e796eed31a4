#include "xla_ffi/worker/shard_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "xla_ffi/wire/frame.h"

namespace jaxhetero {
namespace {

constexpr uint64_t kLeastShardBytes = 4096;
constexpr uint64_t kLineBytes = 64;

ShardPlan equal(uint32_t reducer_count) { return ShardPlan(std::vector<uint32_t>(reducer_count, 1)); }

class Cut : public testing::TestWithParam<std::tuple<uint32_t, uint64_t, uint64_t>> {};

TEST_P(Cut, CoversTheBucketInEqualShares) {
  const auto [reducer_count, count, item] = GetParam();
  const uint64_t align = kLineBytes / item;
  for (uint64_t op : {uint64_t{0}, uint64_t{1}, uint64_t{12345}, ~uint64_t{0}}) {
    const std::vector<Shard> shards = equal(reducer_count).cut(op, count, item);
    ASSERT_FALSE(shards.empty());
    std::set<uint32_t> reducers;
    uint64_t end = 0;
    for (const Shard& shard : shards) {
      EXPECT_EQ(shard.offset, end) << "a gap, an overlap or disorder";
      EXPECT_EQ(shard.offset % align, 0u);
      EXPECT_TRUE(shard.count > 0 || count == 0);
      EXPECT_LT(shard.reducer, reducer_count);
      EXPECT_TRUE(reducers.insert(shard.reducer).second) << "two shards at one reducer";
      end = shard.offset + shard.count;
    }
    EXPECT_EQ(end, count);

    // A small bucket goes to as few reducers as its bytes are worth messages.
    const uint64_t worth = std::max<uint64_t>(1, (count * item + kLeastShardBytes - 1) / kLeastShardBytes);
    const uint64_t owners = std::min<uint64_t>(reducer_count, worth);
    // Ends are rounded down to a line, so a share is off by less than one at either end.
    const uint64_t share = count / owners;
    for (const Shard& shard : shards) {
      EXPECT_LE(shard.count, share + 2 * align);
      EXPECT_GE(shard.count + 2 * align, share);
    }
    EXPECT_EQ(shards.size(), owners);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Cut,
                         testing::Combine(testing::Values(1, 2, 3, 4, 7, 64, 4096),
                                          testing::Values(0, 1, 7, 1023, 4096, 4097, 32768, 32769, 100003, 1000000,
                                                          20000000, uint64_t{1} << 40, (uint64_t{1} << 59) - 1,
                                                          uint64_t{1} << 59),
                                          testing::Values(1, 2, 4, 8)),
                         [](const auto& info) {
                           return std::to_string(std::get<1>(info.param)) + "_of_" +
                                  std::to_string(std::get<2>(info.param)) + "_bytes_on_" +
                                  std::to_string(std::get<0>(info.param));
                         });

TEST(ShardPlan, IsTheSameForTheSameQuestion) { EXPECT_EQ(equal(5).cut(42, 1000000, 4), equal(5).cut(42, 1000000, 4)); }

TEST(ShardPlan, DiffersInItsDigestFromAnother) {
  const std::vector<std::vector<uint32_t>> plans{{1}, {1, 1}, {2, 1}, {1, 2}, {1, 1, 1}, {1, 1, 0}, {0, 1, 1}};
  std::set<uint64_t> digests;
  for (const auto& shares : plans) digests.insert(ShardPlan(shares).digest());
  EXPECT_EQ(digests.size(), plans.size());
  EXPECT_EQ(ShardPlan({2, 1}).digest(), ShardPlan({2, 1}).digest());
}

// Small buckets and first shards go to one reducer each; over many ops, even with consecutive numbers, to all alike.
class Spread : public testing::TestWithParam<uint64_t> {};

TEST_P(Spread, IsEvenOverOps) {
  constexpr uint32_t kReducers = 4;
  constexpr int kOps = 4000;
  std::vector<int> ops(kReducers);
  for (uint64_t op = 0; op < kOps; ++op) ++ops[equal(kReducers).cut(op, GetParam(), 4).front().reducer];
  for (int of_reducer : ops) EXPECT_NEAR(of_reducer, kOps / kReducers, kOps / 20);
}

INSTANTIATE_TEST_SUITE_P(SmallAndLarge, Spread, testing::Values(10, 1000000));

// So that a reducer inside a worker has that worker's row.
TEST(ShardPlan, CutsRowsInTheOrderOfTheReducers) {
  for (uint64_t op = 0; op < 20; ++op) {
    const std::vector<Shard> shards = equal(4).cut(op, 4'000'000, 4, /*has_rows=*/true);
    ASSERT_EQ(shards.size(), 4u);
    for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(shards[i], (Shard{i, i * 1'000'000, 1'000'000}));
  }
}

TEST(ShardPlan, SpreadsSmallBucketsOfRows) {
  std::set<uint32_t> reducers;
  for (uint64_t op = 0; op < 100; ++op) {
    for (const Shard& shard : equal(4).cut(op, 10, 4, /*has_rows=*/true)) reducers.insert(shard.reducer);
  }
  EXPECT_EQ(reducers.size(), 4u);
}

// n workers, k dedicated reducers, c inside workers.
class Balance : public testing::TestWithParam<std::tuple<uint32_t, uint32_t, uint32_t>> {};

TEST_P(Balance, LoadsNoInterfaceMoreThanItMust) {
  const auto [n, k, c] = GetParam();
  if (c > n || k + c == 0) return;
  std::vector<ReducerPlace> reducers(k);
  reducers.resize(k + c, {.colocated = true});
  constexpr uint64_t kCount = 100'000'000;
  double dedicated = 0;
  double inside = 0;
  for (const Shard& shard : ShardPlan(balanced_shares(n, reducers)).cut(7, kCount, 4)) {
    double& largest = reducers[shard.reducer].colocated ? inside : dedicated;
    largest = std::max(largest, static_cast<double>(shard.count) / kCount);
  }
  const double load = std::max({1.0, n * dedicated, 1 + inside * (n - 2.0)});
  // The best of all splits between the two sorts, by trying.
  double best = 1e9;
  for (int i = 0; i <= 10000; ++i) {
    const double part = i / 10000.0;  // of the bytes, for the dedicated ones
    if ((k == 0 && i > 0) || (c == 0 && i < 10000)) continue;
    const double of_dedicated = k > 0 ? n * part / k : 0;
    const double of_worker = c > 0 ? 1 + (1 - part) / c * (n - 2.0) : 1;
    best = std::min(best, std::max({1.0, of_dedicated, of_worker}));
  }
  EXPECT_LE(load, best * 1.001);
  if (c == n && k <= n) {
    EXPECT_NEAR(load, 2.0 * n * (n - 1) / (n * n + k * n - 2.0 * k), 1e-4);
  }
}

// Where interfaces are of unequal rates, all that have anything to carry take the same time.
TEST(Rates, GiveToEachWhatItCarries) {
  constexpr double kWorkerRate = 12;
  constexpr uint64_t kCount = 100'000'000;
  for (const uint32_t n : {2u, 3u, 8u}) {
    for (const uint32_t c : {0u, n - 1, n}) {
      std::vector<ReducerPlace> reducers{{.rate = 1}, {.rate = 2}, {.rate = 3}};
      reducers.resize(reducers.size() + c, {.colocated = true, .rate = static_cast<uint32_t>(kWorkerRate)});
      const std::vector<Shard> shards = ShardPlan(balanced_shares(n, reducers)).cut(0, kCount, 4);
      ASSERT_EQ(shards.size(), reducers.size());
      double dedicated_time = 0;
      for (const Shard& shard : shards) {
        const ReducerPlace& place = reducers[shard.reducer];
        const double share = static_cast<double>(shard.count) / kCount;
        const double time = place.colocated ? (1 + share * (n - 2)) / kWorkerRate : n * share / place.rate;
        if (dedicated_time == 0 && !place.colocated) dedicated_time = time;
        EXPECT_NEAR(time, place.colocated && c == 0 ? time : dedicated_time, 1e-4 * time);
      }
    }
  }
}

TEST(Rates, MakeNoDifferenceWhereTheyAreEqual) {
  for (const uint32_t rate : {1u, 16u}) {
    const std::vector<ReducerPlace> reducers{{.rate = rate}, {.rate = rate}, {.colocated = true, .rate = rate}};
    EXPECT_EQ(balanced_shares(4, reducers), (std::vector<uint32_t>{3, 3, 2}));
  }
}

TEST(Rates, LeaveOutWorkersWhereTheDedicatedCarryAll) {
  const std::vector<uint32_t> shares =
      balanced_shares(2, {{.rate = 5}, {.rate = 3}, {.colocated = true, .rate = 4}, {.colocated = true, .rate = 4}});
  EXPECT_EQ(shares[2], 0u);
  EXPECT_EQ(shares[0] * 3, shares[1] * 5);
}

// A worker alone has everything at its own reducer, however fast the others are.
TEST(Rates, LetAWorkerAloneReduceByItself) {
  for (const uint32_t dedicated_rate : {1u, 16u, 32u}) {
    const std::vector<ReducerPlace> reducers{{.rate = dedicated_rate}, {.colocated = true, .rate = 16}};
    EXPECT_EQ(balanced_shares(1, reducers), (std::vector<uint32_t>{0, 1}));
  }
}

// The largest load over rate of all interfaces, by the shares that balanced_shares() gives.
double s_per_byte_of_shares(uint32_t worker_count, uint32_t worker_rate, const std::vector<ReducerPlace>& reducers) {
  const std::vector<uint32_t> shares = balanced_shares(worker_count, reducers);
  const double whole = std::accumulate(shares.begin(), shares.end(), 0.0);
  EXPECT_LE(whole, 1 << 26) << "products with it have to fit 64 bits";
  double time = 1.0 / worker_rate;
  for (size_t i = 0; i < shares.size(); ++i) {
    const double share = shares[i] / whole;
    const double load = reducers[i].colocated ? 1 + share * (worker_count - 2.0) : share * worker_count;
    time = std::max(time, load / reducers[i].rate);
  }
  return time;
}

TEST(BestTime, IsThatOfBalancedShares) {
  for (const uint32_t n : {2u, 3u, 4u, 8u, 16u, 100u}) {
    for (const uint32_t c : {0u, 1u, 2u, n - 1, n}) {
      for (const uint32_t worker_rate : {1u, 12u, 16u, 24u}) {
        for (const std::vector<uint32_t>& rates :
             {std::vector<uint32_t>{}, {16}, {1, 2, 3}, {16, 16, 8, 5}, std::vector<uint32_t>(20, 16)}) {
          if (rates.empty() && c == 0) continue;
          std::vector<ReducerPlace> reducers;
          for (const uint32_t rate : rates) reducers.push_back({.rate = rate});
          reducers.resize(reducers.size() + c, {.colocated = true, .rate = worker_rate});
          const double best =
              best_s_per_byte(std::vector<double>(n, worker_rate), std::vector<double>(rates.begin(), rates.end()), c);
          EXPECT_NEAR(s_per_byte_of_shares(n, worker_rate, reducers), best, 1e-12 * best)
              << n << " workers of rate " << worker_rate << ", " << c << " co-located, " << rates.size()
              << " dedicated";
        }
      }
    }
  }
}

TEST(BestTime, IsThatOfBalancedSharesOfUnequalWorkers) {
  std::mt19937 random(1);
  for (int turn = 0; turn < 1000; ++turn) {
    const uint32_t n = 3 + static_cast<uint32_t>(random() % 14);
    const uint32_t c = 1 + static_cast<uint32_t>(random() % n);
    std::vector<ReducerPlace> reducers;
    std::vector<double> dedicated;
    for (size_t k = random() % 5; k > 0; --k) {
      reducers.push_back({.rate = 1 + static_cast<uint32_t>(random() % 1024)});
      dedicated.push_back(reducers.back().rate);
    }
    std::vector<double> workers;
    for (uint32_t rank = 0; rank < c; ++rank) {
      reducers.push_back({.colocated = true, .rate = 1 + static_cast<uint32_t>(random() % 256)});
      workers.push_back(reducers.back().rate);
    }
    workers.resize(n, std::ranges::max(workers));
    const auto slowest = static_cast<uint32_t>(std::ranges::min(workers));
    const double best = best_s_per_byte(workers, dedicated, c);
    EXPECT_NEAR(s_per_byte_of_shares(n, slowest, reducers), best, 1e-4 * best) << "turn " << turn;
  }
}

TEST(BestTime, OfEightWorkersOfWhichOneHasHalfTheRate) {
  std::vector<ReducerPlace> reducers(8, {.colocated = true, .rate = 2});
  reducers[3].rate = 1;
  EXPECT_NEAR(s_per_byte_of_shares(8, 1, reducers), 1, 1e-6) << "as long as the slow one takes for its own alone";
  EXPECT_EQ(balanced_shares(8, reducers)[3], 0u);
}

TEST(BalancedShares, FitWhatIsMultipliedWithThem) {
  std::vector<ReducerPlace> reducers(500, {.colocated = true, .rate = 256});
  for (uint32_t k = 0; k < 100; ++k) reducers.push_back({.rate = 64 * 256 - k});
  s_per_byte_of_shares(500, 256, reducers);
}

TEST(BestTime, IsTheKnownOneForEqualRates) {
  constexpr double kRate = 25e6;
  for (const uint32_t n : {2u, 3u, 4u, 8u, 16u}) {
    for (uint32_t k = 0; k <= n; ++k) {
      const double known = 2.0 * n * (n - 1) / (n * n + k * n - 2.0 * k) / kRate;
      EXPECT_NEAR(best_s_per_byte(std::vector<double>(n, kRate), std::vector<double>(k, kRate), n), known,
                  1e-12 * known);
    }
  }
}

// In that time all of a bucket can be reduced, and in less time either not, or the slowest worker cannot send its own.
TEST(BestTime, IsEnoughAndNoMoreForUnequalWorkers) {
  const std::vector<double> workers{3, 1, 2, 5, 4};
  for (const std::vector<double>& reducers : {std::vector<double>{}, {1}, {2, 7}, {9, 9, 9}}) {
    for (uint32_t c = reducers.empty() ? 1 : 0; c <= workers.size(); ++c) {
      const auto reduced_part = [&](double time) {
        double part = 0;
        for (const double rate : reducers) part += time * rate / 5;
        for (uint32_t rank = 0; rank < c; ++rank) part += (time * workers[rank] - 1) / 3;
        return part;
      };
      const double best = best_s_per_byte(workers, reducers, c);
      EXPECT_GE(reduced_part(best), 1 - 1e-12);
      EXPECT_GE(best, 1);  // the slowest worker's
      if (best > 1) {
        EXPECT_LT(reduced_part(best * 0.999), 1);
      }
    }
  }
}

TEST(BestTime, IsDefinedAtTheEdges) {
  const std::vector<double> none;
  EXPECT_EQ(best_s_per_byte(std::vector<double>{5}, none, 0), 0);
  EXPECT_EQ(best_s_per_byte(std::vector<double>{5}, std::vector<double>{5}, 1), 0);
  EXPECT_EQ(best_s_per_byte(std::vector<double>{5, 5}, none, 0), std::numeric_limits<double>::infinity());
  EXPECT_EQ(best_s_per_byte(std::vector<double>{5, 4}, none, 1), 0.25) << "two workers reduce at no cost";
}

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;
TEST(Chunks, AreNoSmallerAndNoLargerThanTheyMay) {
  constexpr size_t kWindow = 256 << 10;
  for (const uint32_t reducer_count : {1u, 3u, 4096u}) {
    const ShardPlan plan(std::vector<uint32_t>(reducer_count, 1), {.window_bytes = kWindow});
    for (const uint64_t item : {1, 2, 4, 8}) {
      for (uint64_t count = 0; count < uint64_t{1} << 40; count = 3 * count + 1) {
        const uint64_t bytes = plan.items_per_chunk(count, item) * item;
        EXPECT_GE(bytes, 8192u);
        EXPECT_LE(bytes, kWindow / 4);
      }
    }
  }
  EXPECT_EQ(ShardPlan({1, 1}, {.chunk_bytes = 4096}).items_per_chunk(1 << 20, 4), 1024u);
}

// The largest multiple of 64 bytes that fills 12 packets of an Ethernet, with the frame's header.
constexpr uint64_t kFilled16KiB = 12 * 1448 - kHeaderBytes - 56;

TEST(Chunks, AreLargerInABucketOfALargeCall) {
  const ShardPlan plan({1, 1, 1, 1, 0}, {.window_bytes = 200'000});
  const auto chunk_bytes = [&](uint64_t bucket_bytes, uint64_t call_bytes) {
    return plan.items_per_chunk(bucket_bytes / 4, 4, call_bytes) * 4;
  };
  constexpr uint64_t kEndless = kMiB * kMiB;
  EXPECT_EQ(chunk_bytes(kMiB, kMiB), 8 * kKiB);
  EXPECT_EQ(chunk_bytes(kMiB, 16 * kMiB), 8 * kKiB);
  EXPECT_EQ(chunk_bytes(kMiB, 32 * kMiB), kFilled16KiB);
  EXPECT_EQ(chunk_bytes(kMiB, kEndless), kFilled16KiB) << "no larger than half the links' largest";
  EXPECT_EQ(chunk_bytes(16 * kMiB, 32 * kMiB), 32 * kKiB) << "and no smaller than by the bucket's own bytes";
  EXPECT_EQ(chunk_bytes(64, kEndless), 16 * kKiB);
  EXPECT_EQ(ShardPlan({1, 1}, {.chunk_bytes = 4096}).items_per_chunk(1 << 20, 4, kEndless), 1024u);
  const ShardPlan fast({1}, {.window_bytes = 20'000'000});
  EXPECT_EQ(fast.items_per_chunk(kMiB, 4, kEndless) * 4, 256 * kKiB) << "what the links need at least";
}

// 5 us for a message and 0.3 s for a GB; a strand has a byte in 0.75 ns.
constexpr MessageCosts kDear{5'000'000, 300'000};
constexpr uint64_t kStrandBytesPerS = 1'333'333'333;

TEST(Chunks, AreLargerWhereMessagesKeepCoresFromTheNetwork) {
  constexpr size_t kWindow = 40'000;
  const auto chunk_bytes = [&](uint64_t shard_bytes, const ShardPlan::Pace& pace, uint64_t call_bytes = 0) {
    return ShardPlan({1, 1, 0}, pace).items_per_chunk(2 * shard_bytes / 4, 4, 2 * call_bytes) * 4;
  };
  ShardPlan::Pace pace{.window_bytes = kWindow};
  EXPECT_EQ(chunk_bytes(62'000, pace), 8 * kKiB);
  pace.costs = kDear;
  pace.strand_bytes_per_s = kStrandBytesPerS;
  // The root of 2 m s b is 28,751.
  EXPECT_EQ(chunk_bytes(62'000, pace), 31'040u) << "two equal ones";
  EXPECT_EQ(chunk_bytes(32 * kKiB, pace), 16 * kKiB);
  EXPECT_EQ(chunk_bytes(32 * kKiB, pace, 8 * kMiB), 32 * kKiB) << "in a large call";
  EXPECT_NEAR(static_cast<double>(chunk_bytes(kMiB, pace)), 32768, 64) << "no larger than paths are known to carry";
  pace.strand_bytes_per_s = 25'000'000;
  EXPECT_EQ(chunk_bytes(62'000, pace), 8 * kKiB) << "the cores have time";
  pace = {.chunk_bytes = 4096, .costs = kDear, .strand_bytes_per_s = kStrandBytesPerS};
  EXPECT_EQ(chunk_bytes(62'000, pace), 4096u);
}

// Reducers with shares of 4 : 1.
TEST(Chunks, AreOfOneSizeInEachShardWhereMessagesAreDear) {
  const ShardPlan plan({4, 1}, {.window_bytes = 40'000, .costs = kDear, .strand_bytes_per_s = kStrandBytesPerS});
  const auto chunk_bytes = [&](std::optional<uint32_t> reducer) {
    return plan.items_per_chunk(50 * kKiB / 4, 4, 50 * kMiB, false, reducer) * 4;
  };
  EXPECT_EQ(chunk_bytes({}), 25 * kKiB);
  EXPECT_EQ(chunk_bytes(0), 40 * kKiB) << "one, and not one with a small rest";
  EXPECT_GE(chunk_bytes(1), 10 * kKiB);
}

TEST(Chunks, OfTheLargestSizeTellWhatACoreCarries) {
  // 5 us for 32 KiB and 0.3 s for a GB, twice.
  EXPECT_NEAR(static_cast<double>(ShardPlan::core_bytes_per_s(kDear)), 1e9 / 2 / (5e3 / 32768 + 0.3), 1e6);
  EXPECT_EQ(ShardPlan::core_bytes_per_s({}), 0u);
}

TEST(Chunks, AreFewerInABucketOfRows) {
  const ShardPlan plan({1, 1, 1, 1, 0}, {.window_bytes = 200'000});
  const auto chunk_bytes = [&](uint64_t bucket_bytes) {
    return plan.items_per_chunk(bucket_bytes / 4, 4, 0, true) * 4;
  };
  EXPECT_EQ(chunk_bytes(64), 16 * kKiB);
  EXPECT_EQ(chunk_bytes(2 * kMiB), 8 * kKiB) << "where the least chunk is a 64th of the shard";
  EXPECT_EQ(chunk_bytes(4 * kMiB), 16 * kKiB);
  EXPECT_EQ(chunk_bytes(8 * kMiB), 32 * kKiB);
  EXPECT_EQ(chunk_bytes(64 * kMiB), 32 * kKiB) << "the links' largest";
  EXPECT_EQ(ShardPlan({1, 1}, {.chunk_bytes = 4096}).items_per_chunk(1 << 20, 4, 0, true), 1024u);
}

struct PaceCase {
  uint64_t bucket_bytes;
  size_t link_bytes;  // that a link carries while its window should last
  uint64_t chunk_bytes;
  size_t least_window_bytes;
};

class PaceTest : public testing::TestWithParam<PaceCase> {};

TEST_P(PaceTest, IsThatOfTheLinksAndOfTheShard) {
  const PaceCase& wanted = GetParam();
  const ShardPlan plan({1, 1, 1, 1, 0}, {.window_bytes = wanted.link_bytes});
  EXPECT_EQ(plan.items_per_chunk(wanted.bucket_bytes / 4, 4) * 4, wanted.chunk_bytes);
  EXPECT_EQ(plan.least_window_bytes(wanted.bucket_bytes / 4, 4), wanted.least_window_bytes);
}

INSTANTIATE_TEST_SUITE_P(
    Links, PaceTest,
    testing::Values(PaceCase{64, 200'000, 16 * kKiB, 0}, PaceCase{kMiB, 200'000, 8 * kKiB, 4 * kKiB},
                    PaceCase{12 * kMiB, 200'000, 16 * kKiB, 32 * kKiB},
                    PaceCase{16 * kMiB, 200'000, 32 * kKiB, 64 * kKiB},
                    PaceCase{64 * kMiB, 200'000, 32 * kKiB, 200'000}, PaceCase{64 * kMiB, 20'000, 32 * kKiB, 20'000},
                    PaceCase{64 * kMiB, 10'000, 16 * kKiB, 10'000}, PaceCase{64 * kMiB, 1'000, 16 * kKiB, 1'000},
                    PaceCase{64 * kMiB, 2'000'000, 128 * kKiB, 256 * kKiB},
                    PaceCase{kMiB, 2'000'000, 32 * kKiB, 4 * kKiB}, PaceCase{kMiB, 20'000'000, 256 * kKiB, 4 * kKiB},
                    PaceCase{kMiB * kMiB, 20'000'000, 256 * kKiB, 20'000'000}));

INSTANTIATE_TEST_SUITE_P(All, Balance,
                         testing::Combine(testing::Values(2, 3, 4, 8, 16), testing::Values(0, 1, 2, 3, 4, 6, 8, 20),
                                          testing::Values(0, 1, 2, 3, 4, 8, 16)));

}  // namespace
}  // namespace jaxhetero
