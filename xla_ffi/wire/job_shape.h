// The settings that every worker of a job must have been started with, and the bounds that follow from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "xla_ffi/wire/codec.h"

namespace jaxhetero {

inline constexpr uint32_t kMaxWorkers = 4096;
inline constexpr uint32_t kMaxReducers = 4096;

// What every worker of a job must have been started with.
struct JobShape {
  uint32_t worker_count = 0;
  uint32_t reducer_count = 0;    // dedicated ones
  uint32_t colocated_count = 0;  // inside workers, the first ranks
  uint32_t chunk_bytes = 0;      // 0: by the size of the shards
  uint32_t window_chunks = 0;    // 0: as many as the path needs
  bool checksum = false;         // of every frame
  bool failover = false;         // go on when a reducer is lost
  bool measure_rates = false;    // of the interfaces, at the start: see rate_probe.h

  bool operator==(const JobShape&) const = default;
};
// The declaration of these settings by name: the binding, the wire format and the words of a refusal follow from it.
// The names are those of jaxhetero.config.Config. `visit(name, member)` is called for each, in the order on the wire.
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
}

// Where two processes' ideas of the job differ: "chunk_bytes is 4096, not 0".
std::string difference(const JobShape& job, const JobShape& from);

// Every reducer of a job: the dedicated ones and those inside workers. None for a worker alone.
uint32_t total_reducer_count(const JobShape& job);

// Where the job does not say how large chunks are, the plan does, between these.
inline constexpr size_t kLeastAutoChunkBytes = size_t{8} << 10;
inline constexpr size_t kMostAutoChunkBytes = size_t{256} << 10;
size_t most_chunk_bytes(const JobShape& job);
size_t least_chunk_bytes(const JobShape& job);  // of a shard that takes several

// What a worker may have under way at one reducer when its window adapts to the path. A reducer holds that much for
// each worker and round.
inline constexpr size_t kMostWindowBytes = size_t{4} << 20;
// Two at least: while the total of one comes back, the other goes out.
uint64_t most_chunks_under_way(const JobShape& job, size_t chunk_bytes);

template <typename Codec, typename Job>
void fields(Codec& codec, Job& job)
  requires IsA<Job, JobShape>
{
  for_each_setting([&](const char* /*name*/, auto member) { codec(job.*member); });
}

}  // namespace jaxhetero
