#include "xla_ffi/membership/slow_watch.h"

#include <algorithm>
#include <map>
#include <utility>

namespace jaxhetero {

std::optional<uint32_t> most_awaited(const std::vector<uint32_t>& awaited, size_t count) {
  std::map<uint32_t, size_t> counts;  // keyed by process
  for (const uint32_t process : awaited) {
    if (2 * ++counts[process] > count) return process;
  }
  return std::nullopt;
}

// A look in which the pace is low, and nobody or no one of them is waited for, tells nothing.
bool SlowWatch::note(double pace, std::optional<uint32_t> awaited) {
  best_pace_ = std::max(best_pace_, std::min(pace, std::exchange(pace_, pace)));
  const std::optional<uint32_t> found = is_low() ? awaited : std::nullopt;
  if (is_low() && !found) return false;
  if (found != std::exchange(found_, found)) look_count_ = 0;
  if (++look_count_ < kLooks || found == slow_) return false;
  slow_ = found;
  return true;
}

void SlowWatch::change_plan() {
  if (!slow_) *this = {};
}

void SlowWatch::forget_slow() {
  slow_.reset();
  found_.reset();
  look_count_ = 0;
}

}  // namespace jaxhetero
