// What a simulation is of: hosts, and a job on them.
#pragma once

#include <cstdint>
#include <vector>

#include "xla_ffi/simulator/network.h"
#include "xla_ffi/simulator/processor.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/job_shape.h"

namespace jaxhetero::simulator {

struct HostConfig {
  std::vector<double> interfaces;  // the rate of each, in bytes per second each way, headers of packets included
  uint32_t processor = 0;          // the number of the processor, which several hosts may share
};

struct ProcessorConfig {
  uint32_t core_count = 1;
  double memory_bytes_per_s = 0;
};

struct BucketConfig {
  uint64_t count = 0;  // elements
  DType dtype = DType::kF32;
  double ready_s = 0;  // the time after the start of its step
  int64_t priority = 0;
  double needed_s = -1;  // the time after the next step's start; where it is below 0, its own step ends with it
};

struct JobConfig {
  JobShape shape;
  uint32_t strand_count = 1;  // the strands of every process
  std::vector<uint32_t> worker_hosts;
  std::vector<uint32_t> reducer_hosts;  // the hosts of the dedicated reducers
  Costs worker_costs;
  Costs reducer_costs;
  std::vector<BucketConfig> buckets;  // the buckets of a step, in the order of their sequence
  uint64_t call_bytes = 0;  // the bytes of all buckets of a collective call; those of each bucket alone where it is 0
  uint32_t step_count = 1;
  double step_s = 0;              // the least time of a step
  std::vector<double> slowdowns;  // factors of each step's times, indexed by step and rank; none where it is empty
  uint64_t seed = 0;              // the seed of the numbers of ops, which decide where the first shards go
};

struct Cluster {
  NetworkConfig network;
  std::vector<ProcessorConfig> processors;
  std::vector<HostConfig> hosts;
};

}  // namespace jaxhetero::simulator
