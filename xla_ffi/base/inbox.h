// Requests of the program's threads, on their way to an event loop's thread.
#pragma once

#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "xla_ffi/base/status.h"

namespace jaxhetero {

// Any thread; the lock is only held to move requests.
template <typename Request>
class Inbox {
 public:
  // Takes the request; or leaves it as it is and returns why the inbox is closed.
  Status add(Request& request) {
    const std::lock_guard lock(mutex_);
    if (closed_.has_value()) return *closed_;
    requests_.push_back(std::move(request));
    return {};
  }

  // All that have been added since the last call, in their order.
  std::vector<Request> take_all() {
    const std::lock_guard lock(mutex_);
    return std::exchange(requests_, {});
  }

  // From now on add() refuses. Only the first reason counts.
  void close(const Status& why) {
    const std::lock_guard lock(mutex_);
    if (!closed_.has_value()) closed_ = why;
  }

  // Why it is closed; ok while it is open.
  [[nodiscard]] Status why_closed() const {
    const std::lock_guard lock(mutex_);
    return closed_.value_or(Status());
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Request> requests_;  // guarded by mutex_
  std::optional<Status> closed_;   // guarded by mutex_
};

}  // namespace jaxhetero
