// Once the job has started, the coordinator and everybody else tell each other that they live: a process that is
// stopped, or cut off, closes no connection. Who says nothing for most of the timeout is lost.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>

#include "xla_ffi/base/event_loop.h"

namespace jaxhetero {

class Heartbeat {
 public:
  using Clock = EventLoop::Clock;

  // Calls `beat` a few times before anybody could take us for dead, on the loop's thread, until it returns false.
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
