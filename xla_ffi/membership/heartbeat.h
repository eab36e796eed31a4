// Heartbeats between the coordinator and every other process, from the start of the job: a process that is stopped or
// cut off closes no connection. A process that is silent for 4/5 of the timeout counts as lost.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>

#include "xla_ffi/base/event_loop.h"

namespace jaxhetero {

// Times the silence of one peer. On the loop's thread.
class Heartbeat {
 public:
  using Clock = EventLoop::Clock;

  // Calls `beat` on the loop's thread, ten times per timeout, until it returns false.
  static void start(EventLoop& loop, std::chrono::milliseconds timeout, std::function<bool()> beat) {
    if (!beat()) return;
    wait(loop, std::max(timeout / 10, std::chrono::milliseconds(1)), timeout, std::move(beat));
  }
  static std::chrono::milliseconds patience(std::chrono::milliseconds timeout) { return timeout * 4 / 5; }

  void heard() { heard_ = Clock::now(); }
  [[nodiscard]] bool stopped(std::chrono::milliseconds timeout) const { return silence() > patience(timeout); }
  [[nodiscard]] Clock::duration silence() const { return Clock::now() - heard_; }

 private:
  // A beat that is late by more than others: this process was stopped, or its host. What the peers have sent meanwhile
  // is read first; until then their silence is our own.
  static void wait(EventLoop& loop, std::chrono::milliseconds pause, std::chrono::milliseconds timeout,
                   std::function<bool()> beat) {
    const Clock::time_point due = Clock::now() + pause;
    loop.after(pause, [&loop, due, timeout, beat = std::move(beat)]() mutable {
      if (Clock::now() - due > timeout / 5) return wait(loop, std::chrono::milliseconds(1), timeout, std::move(beat));
      start(loop, timeout, std::move(beat));
    });
  }

  Clock::time_point heard_ = Clock::now();
};

// How often a peer beats that does not say so: only one who misses several beats is silent.
class BeatRhythm {
 public:
  using Clock = Heartbeat::Clock;

  void note() {
    const Clock::time_point now = Clock::now();
    if (last_ != Clock::time_point()) interval_ = now - last_;
    last_ = now;
  }
  [[nodiscard]] Clock::duration most_silence() const { return 8 * interval_; }

 private:
  Clock::time_point last_;
  Clock::duration interval_ = std::chrono::hours(1);  // not known yet
};

}  // namespace jaxhetero
