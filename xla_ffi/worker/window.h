// How many bytes a worker may have under way at one reducer: pushed, and the total not yet back.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

namespace jaxhetero {

// Follows the path: the goodput seen lately times the shortest round trip seen lately, as BBR (Cardwell et al. 2016)
// sizes its window. More than that only queues, in switches that may drop it, and lets the first total come back later;
// less leaves the wire idle. A round trip here is that of a chunk, from its push to its total.
class Window {
 public:
  using Clock = std::chrono::steady_clock;

  Window(size_t least_bytes, size_t most_bytes)
      : least_bytes_(least_bytes), most_bytes_(most_bytes), bytes_(std::clamp(kFirstBytes, least_bytes, most_bytes)) {}

  // At least as many as `enough`, once the round has come so far.
  [[nodiscard]] size_t bytes(size_t enough = 0) const {
    return std::min(emptying_ ? bytes_ : std::max(bytes_, enough), opened_bytes_);
  }

  // Nothing is under way: the next round begins with `first_bytes`, and every total opens room for one chunk more, as
  // TCP's slow start does. A full window at once would put the first chunks for the last reducer behind the whole
  // windows of all the others, and no total could come back before.
  void restart(size_t first_bytes, Clock::time_point now) {
    opened_bytes_ = first_bytes;
    begin_sample(now);
  }

  // The total of a chunk that was pushed at `pushed` is back.
  void returned(Clock::time_point pushed, size_t bytes, Clock::time_point now) {
    opened_bytes_ = std::min(opened_bytes_ + bytes, most_bytes_);
    const double trip_s = seconds(now - pushed);
    if (trip_s <= 0) return;
    note_trip(trip_s, pushed, now);
    note_rate(bytes, now);
    const double highest = std::max(highest_rate_, previous_highest_rate_);
    if (highest == 0) return;
    const double wanted = highest * (kGain * shortest_trip_s_ + kSlackS);
    bytes_ =
        emptying_ ? least_bytes_ : std::clamp(static_cast<size_t>(std::min(wanted, 1e12)), least_bytes_, most_bytes_);
  }

 private:
  static constexpr size_t kFirstBytes = size_t{64} << 10;
  static constexpr double kGain = 1.25;  // room for the rate to be found higher
  // Bridges the moments in which a process of the round waits for a processor. Measured; see docs/notebook/windows.md.
  static constexpr double kSlackS = 0.001;
  static constexpr std::chrono::seconds kRateMemory{2};
  static constexpr std::chrono::seconds kTripMemory{10};
  // A rate is taken over as many totals: of fewer, that happened to come back together, it would be far too high.
  static constexpr int kSampleChunks = 16;

  static double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

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

  void note_rate(size_t bytes, Clock::time_point now) {
    sample_bytes_ += bytes;
    const double sample_s = seconds(now - sample_begin_);
    if (++sample_chunks_ < kSampleChunks || sample_s < shortest_trip_s_) return;
    if (now - rate_stretch_begin_ > kRateMemory) {
      rate_stretch_begin_ = now;
      previous_highest_rate_ = std::exchange(highest_rate_, 0);
    }
    highest_rate_ = std::max(highest_rate_, static_cast<double>(sample_bytes_) / sample_s);
    begin_sample(now);
  }

  void begin_sample(Clock::time_point now) {
    sample_begin_ = now;
    sample_bytes_ = 0;
    sample_chunks_ = 0;
  }

  static constexpr double kNoTrip = 1e9;

  size_t least_bytes_;
  size_t most_bytes_;
  size_t bytes_;
  size_t opened_bytes_ = std::numeric_limits<size_t>::max();
  double shortest_trip_s_ = kNoTrip;
  Clock::time_point shortest_trip_seen_;
  bool emptying_ = false;
  Clock::time_point emptying_since_;
  Clock::time_point sample_begin_;
  uint64_t sample_bytes_ = 0;
  int sample_chunks_ = 0;
  double highest_rate_ = 0;  // bytes/s in the current stretch of kRateMemory
  double previous_highest_rate_ = 0;
  Clock::time_point rate_stretch_begin_;
};

}  // namespace jaxhetero
