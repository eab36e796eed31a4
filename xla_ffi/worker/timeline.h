// The completed rounds of a worker: how many took how long, and the latest ones with the times of their stages. Beside
// them the latest views, which tell who took part in them.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/base/event_loop.h"

namespace jaxhetero {

// When a completed round went through its stages.
struct RoundRecord {
  using Time = EventLoop::Clock::time_point;

  // What went through one reducer.
  struct Part {
    uint32_t reducer = 0;  // the reducer's number
    uint64_t bytes = 0;
    Time end;  // the time when its last result was received
  };

  std::string description;
  uint64_t number = 0;
  uint64_t bytes = 0;
  Time requested;     // the time of the program's call
  Time first_push;    // given to the transport
  Time first_result;  // received
  Time end;           // the last result received
};

// When rounds stood still, and who took part from then on.
struct ViewRecord {
  uint32_t number = 0;
  std::string why;  // nothing of the first view
  std::vector<uint32_t> workers;
  std::vector<uint32_t> reducers;
  RoundRecord::Time halted;
  RoundRecord::Time begun;
};

// Rounds by their time from the request to the end.
struct RoundTimes {
  // A round that takes one of these belongs below it. The last count is of those above all.
  static constexpr std::array<double, 17> kEdgesS = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
                                                     0.1,    0.25,    0.5,    1,     2.5,    5,     10,   30};

  std::array<uint64_t, kEdgesS.size() + 1> counts{};
  double sum_s = 0;

  void add(double time_s) {
    ++counts[static_cast<size_t>(std::ranges::lower_bound(kEdgesS, time_s) - kEdgesS.begin())];
    sum_s += time_s;
  }
};

// Any thread. Of rounds and of views a bounded number is kept: the oldest goes first.
class Timeline {
 public:
  struct Entry {
    RoundRecord record;
    std::vector<RoundRecord::Part> parts;
  };
  // Consecutive rounds; `first` counts all that came before them, kept or not.
  struct Entries {
    uint64_t first = 0;
    std::vector<Entry> rounds;
  };

  void add(RoundRecord record, std::span<const RoundRecord::Part> parts) {
    const std::lock_guard lock(mutex_);
    times_.add(std::chrono::duration<double>(record.end - record.requested).count());
    if (kept_.size() == most_records_) {
      parts_.erase(parts_.begin(), parts_.begin() + static_cast<ptrdiff_t>(kept_.front().part_count));
      kept_.pop_front();
      ++first_;
    }
    kept_.push_back({std::move(record), parts.size()});
    parts_.insert(parts_.end(), parts.begin(), parts.end());
  }

  void add(ViewRecord view) {
    const std::lock_guard lock(mutex_);
    if (views_.size() == most_records_) views_.pop_front();
    views_.push_back(std::move(view));
  }

  // For those who read since() from time to time and want to miss none. Call it before the first add().
  void keep(size_t most_records) {
    const std::lock_guard lock(mutex_);
    most_records_ = std::max<size_t>(most_records, 1);
  }

  // Those kept, oldest first, without the first `count` of all that were ever added.
  [[nodiscard]] Entries since(uint64_t count) const {
    const std::lock_guard lock(mutex_);
    Entries found{std::clamp(count, first_, first_ + kept_.size()), {}};
    found.rounds.reserve(first_ + kept_.size() - found.first);
    auto part = parts_.begin();
    for (uint64_t number = first_; const Kept& kept : kept_) {
      const auto end = part + static_cast<ptrdiff_t>(kept.part_count);
      if (number++ >= found.first) found.rounds.push_back({kept.record, {part, end}});
      part = end;
    }
    return found;
  }

  // The views kept whose number is at least this one, oldest first.
  [[nodiscard]] std::vector<ViewRecord> views_from(uint32_t number) const {
    const std::lock_guard lock(mutex_);
    return {std::ranges::lower_bound(views_, number, {}, &ViewRecord::number), views_.end()};
  }

  [[nodiscard]] RoundTimes times() const {
    const std::lock_guard lock(mutex_);
    return times_;
  }

 private:
  struct Kept {
    RoundRecord record;
    size_t part_count = 0;
  };

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  size_t most_records_ = 4096;
  uint64_t first_ = 0;  // how many entries are gone
  std::deque<Kept> kept_;
  // The parts of all of kept_; a vector for each would take memory anew for each round.
  std::deque<RoundRecord::Part> parts_;
  std::deque<ViewRecord> views_;
  RoundTimes times_;
};

}  // namespace jaxhetero
