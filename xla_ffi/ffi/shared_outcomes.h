// How rounds end that one device of a worker runs for all of its devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "xla_ffi/base/status.h"

namespace jaxhetero {

// The other devices wait as well: what they do next with the results takes all devices, and if the round failed, one of
// them would not come. Thread-safe; callbacks run without the mutex.
class SharedOutcomes {
 public:
  using Done = std::function<void(const Status&)>;

  // `waiter_count`: how many devices wait for each round.
  explicit SharedOutcomes(size_t waiter_count) : waiter_count_(waiter_count) {}

  // Of each waiting device once for a run of the program. Calls back when the round of that run has ended.
  void wait(int64_t run, Done done) {
    const std::optional<Status> end = add(run, done);
    if (end.has_value()) done(*end);
  }

  void end(int64_t run, const Status& status) {
    for (const Done& done : take(run, status)) done(status);
  }

 private:
  struct Run {
    std::optional<Status> end;
    size_t come = 0;
    std::vector<Done> waiting;
  };

  // The outcome, if it is known: then `done` was not taken.
  std::optional<Status> add(int64_t run, Done& done) {
    const std::lock_guard lock(mutex_);
    Run& known = runs_[run];
    ++known.come;
    const std::optional<Status> end = known.end;
    if (!end.has_value()) known.waiting.push_back(std::move(done));
    if (end.has_value() && known.come == waiter_count_) runs_.erase(run);
    return end;
  }

  std::vector<Done> take(int64_t run, const Status& status) {
    const std::lock_guard lock(mutex_);
    Run& known = runs_[run];
    known.end = status;
    std::vector<Done> waiting = std::move(known.waiting);
    if (known.come == waiter_count_) runs_.erase(run);
    return waiting;
  }

  const size_t waiter_count_;
  std::mutex mutex_;
  std::map<int64_t, Run> runs_;  // guarded by mutex_
};

}  // namespace jaxhetero
