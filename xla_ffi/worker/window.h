// How many bytes a worker may have under way at one reducer: pushed, and the total not yet back. One for each link,
// which asks bytes() before every push and reports every total. One thread; no clock of its own.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

namespace jaxhetero {

// The window is the highest goodput of the last seconds times the shortest round trip of the last seconds, as in BBR
// (Cardwell et al. 2016). A larger window only fills queues, in switches that may drop frames, and delays the first
// total; a smaller one leaves the wire idle. A round trip is that of a chunk, from its push to its total.
class Window {
 public:
  using Clock = std::chrono::steady_clock;

  Window(size_t least_bytes, size_t most_bytes)
      : least_bytes_(least_bytes), most_bytes_(most_bytes), bytes_(std::clamp(kFirstBytes, least_bytes, most_bytes)) {}

  // `enough` raises it for rounds that need more, as soon as the window has opened so far.
  [[nodiscard]] size_t bytes(size_t enough = 0) const {
    return std::min(emptying_ ? bytes_ : std::max(bytes_, enough), opened_bytes_);
  }

  // What the window may be for now, since restart(); more with every total.
  [[nodiscard]] size_t opened_bytes() const { return opened_bytes_; }

  // Nothing is under way: the next round starts with `first_bytes`, and every total makes room for one chunk more, like
  // TCP's slow start. A full window at once would put the first chunks for the last reducer behind the whole windows of
  // all the others, and no total could come back before.
  void restart(size_t first_bytes, Clock::time_point now) {
    opened_bytes_ = first_bytes;
    start_sample(now, now);
  }

  // The total of a chunk of `bytes` that was pushed at `pushed_at` is back.
  void returned(Clock::time_point pushed_at, size_t bytes, Clock::time_point now) {
    opened_bytes_ = std::min(opened_bytes_ + bytes, most_bytes_);
    const double trip_s = seconds(now - pushed_at);
    if (trip_s <= 0) return;
    note_trip(trip_s, pushed_at, now);
    note_rate(bytes, pushed_at, now);
    const double highest = std::max(highest_rate_, previous_highest_rate_);
    if (highest == 0) return;
    const double wanted = highest * (kGain * shortest_trip_s_ + kSlackS);
    bytes_ =
        emptying_ ? least_bytes_ : std::clamp(static_cast<size_t>(std::min(wanted, 1e12)), least_bytes_, most_bytes_);
  }

 private:
  static constexpr size_t kFirstBytes = size_t{64} << 10;
  static constexpr double kGain = 1.25;  // room to find that the path carries more
  // Bridges the moments in which a process of the round waits for a processor. Measured; see notebook/links.md.
  static constexpr double kSlackS = 0.001;
  static constexpr std::chrono::seconds kRateMemory{2};
  static constexpr std::chrono::seconds kTripMemory{10};
  // A rate is taken over this many totals. A few that happened to come back together would give far too high a rate.
  static constexpr int kSampleChunks = 16;

  static double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

  // The first chunk of a round finds the path empty. When no chunk has for a long time, the path is emptied to measure
  // its round trip again: the window must not take its own queue for distance.
  void note_trip(double trip_s, Clock::time_point pushed_at, Clock::time_point now) {
    if (emptying_ && pushed_at >= emptying_since_) {
      emptying_ = false;
      shortest_trip_s_ = kNoTrip;
    }
    if (trip_s <= shortest_trip_s_) {
      shortest_trip_s_ = trip_s;
      shortest_trip_seen_at_ = now;
    } else if (!emptying_ && now - shortest_trip_seen_at_ > kTripMemory) {
      emptying_ = true;
      emptying_since_ = now;
    }
  }

  // The time of a sample is a round trip at least: its last chunk was pushed after its start. And it is not less than
  // the time in which its chunks were pushed. For totals may wait at a reducer, or be headers only, and then come back
  // together, faster than the path carries what was pushed.
  void note_rate(size_t bytes, Clock::time_point pushed_at, Clock::time_point now) {
    sample_bytes_ += bytes;
    if (++sample_chunks_ < kSampleChunks || pushed_at < sample_started_at_) return;
    const double sample_s = seconds(std::max(now - sample_started_at_, pushed_at - sample_follows_push_at_));
    if (now - rate_stretch_started_at_ > kRateMemory) {
      rate_stretch_started_at_ = now;
      previous_highest_rate_ = std::exchange(highest_rate_, 0);
    }
    highest_rate_ = std::max(highest_rate_, static_cast<double>(sample_bytes_) / sample_s);
    start_sample(now, pushed_at);
  }

  void start_sample(Clock::time_point now, Clock::time_point last_push_at) {
    sample_started_at_ = now;
    sample_follows_push_at_ = last_push_at;
    sample_bytes_ = 0;
    sample_chunks_ = 0;
  }

  static constexpr double kNoTrip = 1e9;

  size_t least_bytes_;
  size_t most_bytes_;
  size_t bytes_;
  size_t opened_bytes_ = std::numeric_limits<size_t>::max();
  double shortest_trip_s_ = kNoTrip;
  Clock::time_point shortest_trip_seen_at_;
  bool emptying_ = false;
  Clock::time_point emptying_since_;
  Clock::time_point sample_started_at_;
  Clock::time_point sample_follows_push_at_;  // the push of the chunk before its first one
  uint64_t sample_bytes_ = 0;
  int sample_chunks_ = 0;
  double highest_rate_ = 0;  // bytes/s in the current stretch of kRateMemory
  double previous_highest_rate_ = 0;
  Clock::time_point rate_stretch_started_at_;
};

}  // namespace jaxhetero
