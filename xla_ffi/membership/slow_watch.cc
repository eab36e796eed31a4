#include "xla_ffi/membership/worker_watch.h"

#include <algorithm>
#include <map>
#include <utility>

namespace jaxhetero {
namespace {

// For which more than half of those that wait do so.
std::optional<uint32_t> most_awaited(const std::vector<uint32_t>& awaited) {
  std::map<uint32_t, size_t> counts;  // keyed by rank
  for (const uint32_t rank : awaited) {
    if (2 * ++counts[rank] > awaited.size()) return rank;
  }
  return std::nullopt;
}

}  // namespace

// A look in which the pace is low, and nobody or no one of them is waited for, tells nothing.
bool WorkerWatch::note(double pace, const std::vector<uint32_t>& awaited) {
  best_pace_ = std::max(best_pace_, std::min(pace, std::exchange(pace_, pace)));
  const std::optional<uint32_t> found = is_low() ? most_awaited(awaited) : std::nullopt;
  if (is_low() && !found) return false;
  if (found != std::exchange(found_, found)) look_count_ = 0;
  if (++look_count_ < kLooks || found == slow_) return false;
  slow_ = found;
  return true;
}

void WorkerWatch::change_plan() {
  if (!slow_) *this = {};
}

}  // namespace jaxhetero
