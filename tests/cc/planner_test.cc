#include "xla_ffi/worker/planner.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

using Shares = std::vector<uint32_t>;

// In a job that says how many strands there are, so that nothing is measured.
Shares shares_of(uint32_t strand_count, uint32_t rail_count, bool is_internal = false) {
  const JobShape job{.worker_count = 2, .reducer_count = 1, .strands = strand_count};
  View view;
  view.job = job;
  view.strand_count = strand_count;
  view.rail_count = rail_count;
  view.reducers = {{0, "10.0.0.1", 4000, "a", -1, {}}};
  Planner planner(job);
  planner.enter(view);
  return planner.strand_shares(is_internal);
}

TEST(Planner, GivesStrandsEqualShares) {
  EXPECT_EQ(shares_of(1, 1), Shares({2}));
  EXPECT_EQ(shares_of(3, 1), Shares(3, 4));
  EXPECT_EQ(shares_of(4, 2), Shares(4, 3));
}

// Two strands of one interface have together what the only strand of another one has.
TEST(Planner, GivesRailsEqualShares) {
  EXPECT_EQ(shares_of(3, 2), Shares({1, 2, 1}));
  EXPECT_EQ(shares_of(5, 2), Shares({2, 3, 2, 3, 2}));
  EXPECT_EQ(shares_of(5, 2, /*is_internal=*/true), shares_of(5, 2));
}

// Another host has more interfaces than there are strands.
TEST(Planner, UsesAsManyRailsAsThereAreStrands) { EXPECT_EQ(shares_of(2, 4), Shares({1, 1})); }

}  // namespace
}  // namespace jaxhetero
