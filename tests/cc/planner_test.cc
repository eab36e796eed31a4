#include "xla_ffi/worker/planner.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/worker/part_plan.h"
#include "xla_ffi/worker/round.h"

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

// Two strands of one interface have together what the only strand of another one has.
TEST(Planner, GivesRailsEqualShares) {
  EXPECT_EQ(shares_of(3, 2), Shares({3, 6, 3}));
  EXPECT_EQ(shares_of(5, 2), Shares({2, 3, 2, 3, 2}));
}

// Another host has more interfaces than there are strands.
TEST(Planner, UsesAsManyRailsAsThereAreStrands) { EXPECT_EQ(shares_of(2, 4), Shares({6, 6})); }

}  // namespace
}  // namespace jaxhetero
