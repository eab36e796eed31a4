#include "xla_ffi/worker/planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/worker/part_plan.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/shard_plan.h"

namespace jaxhetero {
namespace {

using Shares = std::vector<uint64_t>;

// The elements of each strand's part of a large bucket, in units of the whole bucket's twelfth. The job says how many
// strands there are, so that nothing is measured.
Shares shares_of(uint32_t strand_count, uint32_t rail_count) {
  const JobShape job{.worker_count = 2, .reducer_count = 1, .strands = strand_count};
  View view;
  view.job = job;
  view.strand_count = strand_count;
  view.rail_count = rail_count;
  view.reducers = {{0, "10.0.0.1", 4000, "a", -1, {}}};
  Planner planner(job);
  planner.enter(view);
  constexpr uint64_t kTwelfth = 1 << 20;
  RoundRequest request;
  request.spec.total_count = 12 * kTwelfth;
  Shares shares;
  for (const RoundPart& part : planner.parts_of(request).cut(request)) {
    shares.push_back(part.request.spec.total_count / kTwelfth);
  }
  return shares;
}

TEST(Planner, GivesStrandsEqualShares) {
  EXPECT_EQ(shares_of(1, 1), Shares({12}));
  EXPECT_EQ(shares_of(3, 1), Shares({4, 4, 4}));
  EXPECT_EQ(shares_of(4, 2), Shares({3, 3, 3, 3}));
}

// A group's shares of a large bucket, by reducer, in units of the whole bucket's twentieth. Of four workers each has a
// reducer, whose number is behind those of the dedicated ones.
Shares shares_of_group(const std::vector<uint32_t>& group, uint32_t dedicated_count) {
  const JobShape job{.worker_count = 4, .reducer_count = dedicated_count, .colocated_count = 4};
  View view;
  view.job = job;
  for (uint32_t number = 0; number < dedicated_count + 4; ++number) {
    const auto rank = static_cast<int32_t>(number) - static_cast<int32_t>(dedicated_count);
    view.reducers.push_back({number, "10.0.0.1", 4000, "a", std::max(rank, -1), {}});
  }
  Planner planner(job);
  planner.enter(view);
  constexpr uint64_t kTwentieth = 1 << 20;
  RoundRequest request;
  request.spec.total_count = 20 * kTwentieth;
  request.spec.group = group;
  Shares shares(view.reducers.size());
  for (const Shard& shard : planner.plans().plan_of(request)->cut(7, request.spec.total_count, 4)) {
    shares[shard.reducer] = (shard.count + kTwentieth / 2) / kTwentieth;
  }
  return shares;
}

TEST(Planner, BalancesWithinTheGroup) {
  EXPECT_EQ(shares_of_group({}, 0), Shares({5, 5, 5, 5}));
  // Worker 3 carries no contribution of its own, so its reducer is like a dedicated one.
  EXPECT_EQ(shares_of_group({0, 1, 2}, 0), Shares({4, 4, 4, 8}));
  EXPECT_EQ(shares_of_group({1, 2, 3}, 0), Shares({8, 4, 4, 4}));
  EXPECT_EQ(shares_of_group({0, 2}, 0), Shares({0, 10, 0, 10}));
  EXPECT_EQ(shares_of_group({0, 2}, 2), Shares({5, 5, 0, 5, 0, 5}));
}

// In an elastic job, a worker that has come and one that has been there from the start have the same plan of states.
TEST(Planner, GoesOnFromThePlanThatAViewTells) {
  const JobShape job{.worker_count = 4, .reducer_count = 2, .failover = true, .least_worker_count = 2};
  ASSERT_TRUE(job.is_elastic());
  View view;
  view.number = 100;
  view.job = job;
  view.members = {{0, 0}, {1, 0}, {2, 0}};
  view.reducers = {{0, "10.0.0.1", 4000, "a", -1, {}}, {1, "10.0.0.2", 4000, "b", -1, {}}};
  Planner planner(job);
  EXPECT_TRUE(planner.encoded_states().empty());
  planner.enter(view);
  EXPECT_EQ(planner.view_number(), 100u);
  EXPECT_EQ(planner.plans().states->owners().size(), 2u);
  view.number = 101;
  view.states = planner.encoded_states();
  view.members = {{0, 0}, {2, 0}, {3, 101}};
  view.reducers[1] = {1, "10.0.0.3", 4000, "c", -1, {}, 101};
  planner.enter(view);
  Planner of_comer(job);
  of_comer.enter(view);
  EXPECT_EQ(of_comer.encoded_states(), planner.encoded_states());
  EXPECT_EQ(planner.plans().states->owners().size(), 1u) << "what reducer 1 had, its neighbour goes on with";
  EXPECT_EQ(planner.plans().states->candidates().size(), 1u);
}

// Two strands of one interface have together what the only strand of another one has.
TEST(Planner, GivesRailsEqualShares) {
  EXPECT_EQ(shares_of(3, 2), Shares({3, 6, 3}));
  EXPECT_EQ(shares_of(5, 2), Shares({2, 3, 2, 3, 2}));
}

// Another host has more interfaces than there are strands.
TEST(Planner, UsesAsManyRailsAsThereAreStrands) { EXPECT_EQ(shares_of(2, 4), Shares({6, 6})); }

// One dedicated reducer and eight in workers: what is small for nine is measured with all interfaces.
TEST(Planner, MeasuresWithAllStrands) {
  const JobShape job{.worker_count = 8, .reducer_count = 1, .colocated_count = 8, .measure_rates = true};
  View view;
  view.job = job;
  view.strand_count = view.rail_count = 2;
  for (uint32_t number = 0; number < 9; ++number) {
    view.reducers.push_back({number, "10.0.0.1", 4000, "a", static_cast<int32_t>(number) - 1, {}});
  }
  Planner planner(job);
  planner.enter(view);
  const std::optional<RoundRequest> meeting = planner.next_probe();
  ASSERT_TRUE(meeting.has_value());
  std::vector<iovec> totals;
  meeting->outputs.slice(0, sizeof(int64_t), totals);
  *static_cast<int64_t*>(totals.at(0).iov_base) = job.worker_count;  // all are there
  planner.finish_probe({});
  const std::optional<RoundRequest> probe = planner.next_probe();
  ASSERT_TRUE(probe.has_value());
  const std::vector<RoundPart> parts = planner.parts_of(*probe).cut(*probe);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].request.spec.total_count, parts[1].request.spec.total_count);
}

}  // namespace
}  // namespace jaxhetero
