// The loops that bench/sums.py times: the reducer's arithmetic and a plain copy, on one core.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "xla_ffi/sum/reduce.h"

namespace {

using Clock = std::chrono::steady_clock;

// Calls `work(offset)` for one chunk after the other, round and round, until `seconds` have passed. Returns the bytes
// of a chunk times the chunks in a second.
template <typename Work>
double bytes_per_s(size_t region_bytes, size_t chunk_bytes, double seconds, const Work& work) {
  const Clock::time_point start = Clock::now();
  double passed = 0;
  size_t chunks = 0;
  while (passed < seconds) {
    for (size_t offset = 0; offset + chunk_bytes <= region_bytes; offset += chunk_bytes, ++chunks) work(offset);
    passed = std::chrono::duration<double>(Clock::now() - start).count();
  }
  return static_cast<double>(chunks) * static_cast<double>(chunk_bytes) / passed;
}

}  // namespace

extern "C" {

// Sums `piece_count` regions of `region_bytes`, which lie one after the other in `memory`, into the first, as a reducer
// does: chunk by chunk. Returns bytes of the total in a second.
double sum_bytes_per_s(uint8_t dtype, size_t piece_count, std::byte* memory, size_t region_bytes, size_t chunk_bytes,
                       double seconds) {
  const auto type = static_cast<jaxhetero::DType>(dtype);
  const size_t count = chunk_bytes / jaxhetero::item_bytes(type);
  std::vector<const std::byte*> pieces(piece_count);
  return bytes_per_s(region_bytes, chunk_bytes, seconds, [&](size_t offset) {
    for (size_t i = 0; i < piece_count; ++i) pieces[i] = memory + i * region_bytes + offset;
    jaxhetero::reduce_in_order(jaxhetero::Arithmetic::kSum, type, pieces, memory + offset, count);
  });
}

// Copies the first `half_bytes` of `memory` to the next. Returns bytes copied in a second.
double copy_bytes_per_s(std::byte* memory, size_t half_bytes, size_t chunk_bytes, double seconds) {
  return bytes_per_s(half_bytes, chunk_bytes, seconds,
                     [&](size_t offset) { std::memcpy(memory + half_bytes + offset, memory + offset, chunk_bytes); });
}
}
