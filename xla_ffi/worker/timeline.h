// The latest completed rounds of a worker, with the times of their stages, for Communicator::timeline().
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/base/event_loop.h"

namespace jaxhetero {

// When a completed round went through its stages.
struct RoundRecord {
  using Time = EventLoop::Clock::time_point;

  std::string description;
  uint64_t number = 0;
  uint64_t bytes = 0;
  Time requested;     // by the program
  Time first_push;    // given to the transport
  Time first_result;  // received
  Time end;           // the last result received
};

// Bounded: the oldest record goes first. Any thread.
class Timeline {
 public:
  void add(RoundRecord record) {
    const std::lock_guard lock(mutex_);
    if (records_.size() == kMostRecords) records_.pop_front();
    records_.push_back(std::move(record));
  }

  // Oldest first.
  [[nodiscard]] std::vector<RoundRecord> records() const {
    const std::lock_guard lock(mutex_);
    return {records_.begin(), records_.end()};
  }

 private:
  static constexpr size_t kMostRecords = 4096;

  mutable std::mutex mutex_;
  std::deque<RoundRecord> records_;  // guarded by mutex_
};

}  // namespace jaxhetero
