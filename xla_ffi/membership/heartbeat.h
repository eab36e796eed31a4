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
    loop.after(std::max(timeout / 10, std::chrono::milliseconds(1)),
               [&loop, timeout, beat = std::move(beat)]() mutable { start(loop, timeout, std::move(beat)); });
  }
  static std::chrono::milliseconds patience(std::chrono::milliseconds timeout) { return timeout * 4 / 5; }

  void heard() { heard_ = Clock::now(); }
  [[nodiscard]] bool stopped(std::chrono::milliseconds timeout) const { return silence() > patience(timeout); }
  [[nodiscard]] Clock::duration silence() const { return Clock::now() - heard_; }

 private:
  Clock::time_point heard_ = Clock::now();
};

}  // namespace jaxhetero
