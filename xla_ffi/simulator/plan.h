// The plan that a simulated job makes: the worker's own planner, after a measurement of rates and costs without noise.
#pragma once

#include <cstdint>
#include <vector>

#include "xla_ffi/simulator/job.h"
#include "xla_ffi/worker/planner.h"

namespace jaxhetero::simulator {

// What a planner needs to know of a job's processes.
View view_of(const Cluster& cluster, const JobConfig& job);

// Into how many parts, one for each strand, the job cuts each of its buckets.
std::vector<uint32_t> part_counts(const Cluster& cluster, const JobConfig& job);

// Enters the view and, if the job wants it, measures. `job` outlives the planner.
void prepare(Planner& planner, const View& view, const Cluster& cluster, const JobConfig& job);

}  // namespace jaxhetero::simulator
