// How many bytes a worker may have under way at one reducer: pushed, and the total not yet back.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace jaxhetero {

// Follows the path: the goodput seen lately times the shortest round trip seen lately, as BBR (Cardwell et al. 2016)
// sizes its window. More than that only queues, in switches that may drop it, and lets the first total come back later;
// less leaves the wire idle. A round trip here is that of a chunk, so it contains the pushes of all workers.
class Window {
 public:
  using Clock = std::chrono::steady_clock;

  // What was known when a chunk was pushed.
  struct Stamp {
    Clock::time_point pushed;
    uint64_t returned_bytes = 0;
  };

  Window(size_t least_bytes, size_t most_bytes)
      : least_bytes_(least_bytes), most_bytes_(most_bytes), bytes_(std::clamp(kFirstBytes, least_bytes, most_bytes)) {}

  [[nodiscard]] size_t bytes() const { return bytes_; }
  [[nodiscard]] Stamp stamp(Clock::time_point now) const { return {now, returned_bytes_}; }

  // The total of a chunk that was pushed at `stamp` is back.
  void returned(const Stamp& stamp, size_t bytes, Clock::time_point now) {
    returned_bytes_ += bytes;
    const double trip_s = std::chrono::duration<double>(now - stamp.pushed).count();
    if (trip_s <= 0) return;
    note_trip(trip_s, stamp.pushed, now);
    note_rate(static_cast<double>(returned_bytes_ - stamp.returned_bytes) / trip_s, now);
    const double wanted = kGain * std::max(highest_rate_, previous_highest_rate_) * shortest_trip_s_;
    bytes_ =
        emptying_ ? least_bytes_ : std::clamp(static_cast<size_t>(std::min(wanted, 1e12)), least_bytes_, most_bytes_);
  }

 private:
  static constexpr size_t kFirstBytes = size_t{64} << 10;
  static constexpr double kGain = 1.25;  // room for the rate to be found higher
  static constexpr std::chrono::seconds kRateMemory{2};
  static constexpr std::chrono::seconds kTripMemory{10};

  // The first chunk of a round finds the path empty. Only when that has not been so for long, the path is emptied to
  // look again: what the window itself queues must not be taken for distance.
  void note_trip(double trip_s, Clock::time_point pushed, Clock::time_point now) {
    if (emptying_ && pushed >= emptying_since_) {
      emptying_ = false;
      shortest_trip_s_ = kNoTrip;
    }
    if (trip_s <= shortest_trip_s_) {
      shortest_trip_s_ = trip_s;
      shortest_trip_seen_ = now;
    } else if (!emptying_ && now - shortest_trip_seen_ > kTripMemory) {
      emptying_ = true;
      emptying_since_ = now;
    }
  }

  void note_rate(double rate, Clock::time_point now) {
    if (now - rate_stretch_begin_ > kRateMemory) {
      rate_stretch_begin_ = now;
      previous_highest_rate_ = std::exchange(highest_rate_, 0);
    }
    highest_rate_ = std::max(highest_rate_, rate);
  }

  static constexpr double kNoTrip = 1e9;

  size_t least_bytes_;
  size_t most_bytes_;
  size_t bytes_;
  uint64_t returned_bytes_ = 0;
  double shortest_trip_s_ = kNoTrip;
  Clock::time_point shortest_trip_seen_;
  bool emptying_ = false;
  Clock::time_point emptying_since_;
  double highest_rate_ = 0;  // bytes/s in the current stretch of kRateMemory
  double previous_highest_rate_ = 0;
  Clock::time_point rate_stretch_begin_;
};

}  // namespace jaxhetero
