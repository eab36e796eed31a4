// The settings that all workers of a job must share, and the bounds that follow from them. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "xla_ffi/wire/codec.h"

namespace jaxhetero {

inline constexpr uint32_t kMaxWorkers = 4096;
inline constexpr uint32_t kMaxReducers = 4096;
inline constexpr uint32_t kMaxStrands = 32;
inline constexpr uint32_t kMaxRails = 16;

// The coordinator refuses a worker whose settings differ from rank 0's.
struct JobShape {
  uint32_t worker_count = 0;     // of an elastic job: the most
  uint32_t reducer_count = 0;    // dedicated ones
  uint32_t colocated_count = 0;  // inside workers, the first ranks
  uint32_t chunk_bytes = 0;      // chosen from the size of the shards where it is 0
  uint32_t window_chunks = 0;    // adapted to the path where it is 0
  bool checksum = false;         // every frame has a checksum
  bool failover = false;         // continue when a reducer is lost
  bool measure_rates = false;    // the job measures the rates of network interfaces at the start: see rate_probe.h
  uint32_t strands = 0;          // the strands of every process; chosen by the cores and the rates where it is 0
  // Of an elastic job: the fewest workers with which it goes on, and how many there are at the start; else 0.
  uint32_t least_worker_count = 0;
  uint32_t first_worker_count = 0;

  bool operator==(const JobShape&) const = default;
  [[nodiscard]] bool is_elastic() const { return least_worker_count > 0; }
};

// The one declaration of these settings by name, as in jaxhetero.config.Config: the binding, the encoding and the text
// of a refusal follow from it. Calls `visit(name, member)` for each, in wire order.
template <typename Visit>
void for_each_setting(Visit&& visit) {
  visit("worker_count", &JobShape::worker_count);
  visit("reducer_count", &JobShape::reducer_count);
  visit("colocated_count", &JobShape::colocated_count);
  visit("chunk_bytes", &JobShape::chunk_bytes);
  visit("window_chunks", &JobShape::window_chunks);
  visit("checksum", &JobShape::checksum);
  visit("failover", &JobShape::failover);
  visit("measure_rates", &JobShape::measure_rates);
  visit("strands", &JobShape::strands);
  visit("least_worker_count", &JobShape::least_worker_count);
  visit("first_worker_count", &JobShape::first_worker_count);
}

// The settings that differ, as text: "chunk_bytes is 4096, not 0".
std::string difference(const JobShape& job, const JobShape& from);

// Dedicated and co-located reducers. 0 for a worker alone.
uint32_t total_reducer_count(const JobShape& job);

// How many there are at the start.
uint32_t workers_at_start(const JobShape& job);
uint32_t reducers_at_start(const JobShape& job);

// If the job does not set chunk_bytes, the plan chooses a size in this range.
inline constexpr size_t kLeastAutoChunkBytes = size_t{8} << 10;
inline constexpr size_t kMostAutoChunkBytes = size_t{256} << 10;
size_t most_chunk_bytes(const JobShape& job);
size_t least_chunk_bytes(const JobShape& job);  // the least chunk of a shard with several chunks

// The most bytes that a worker has under way at one reducer if its window adapts to the path. A reducer holds as much
// for each worker and round.
inline constexpr size_t kMostWindowBytes = size_t{4} << 20;
// At least two: one goes out while the total of the other comes back.
uint64_t most_chunks_under_way(const JobShape& job, size_t chunk_bytes);

// With which of `count` peers this process, one of so many, begins when it has a frame for each of them. It is another
// peer for each process: one with which all begin would get a frame of everybody at once, and its port of the switch,
// which may hold a few hundred KB, would drop them.
size_t first_peer(size_t count, size_t process, size_t process_count);

template <typename Codec, typename Job>
void fields(Codec& codec, Job& job)
  requires IsA<Job, JobShape>
{
  for_each_setting([&](const char* /*name*/, auto member) { codec(job.*member); });
}

}  // namespace jaxhetero
