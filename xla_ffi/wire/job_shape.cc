#include "xla_ffi/wire/job_shape.h"

#include <algorithm>

#include "xla_ffi/wire/frame.h"

namespace jaxhetero {

std::string difference(const JobShape& job, const JobShape& from) {
  std::string text;
  for_each_setting([&](const char* name, auto member) {
    if (job.*member == from.*member) return;
    if (!text.empty()) text += ", ";
    text += std::string(name) + " is " + std::to_string(job.*member) + ", not " + std::to_string(from.*member);
  });
  return text;
}

uint32_t total_reducer_count(const JobShape& job) { return job.reducer_count + job.colocated_count; }

uint32_t workers_at_start(const JobShape& job) { return job.is_elastic() ? job.first_worker_count : job.worker_count; }

uint32_t reducers_at_start(const JobShape& job) {
  return job.reducer_count + std::min(job.colocated_count, workers_at_start(job));
}

size_t most_chunk_bytes(const JobShape& job) { return job.chunk_bytes > 0 ? job.chunk_bytes : kMostAutoChunkBytes; }

size_t least_chunk_bytes(const JobShape& job) { return job.chunk_bytes > 0 ? job.chunk_bytes : kLeastAutoChunkBytes; }

uint64_t most_chunks_under_way(const JobShape& job, size_t chunk_bytes) {
  if (job.window_chunks > 0) return job.window_chunks;
  return std::max<uint64_t>(2, kMostWindowBytes / (kHeaderBytes + chunk_bytes));
}

size_t first_peer(size_t count, size_t process, size_t process_count) {
  return count == 0 ? 0 : count * process / process_count % count;
}

}  // namespace jaxhetero
