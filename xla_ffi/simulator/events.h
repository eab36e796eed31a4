// Virtual time: events happen in the order of their times, and those of one time in the order in which they were
// planned. So a simulation is the same on every run.
#pragma once

#include <cstdint>
#include <queue>
#include <vector>

#include "xla_ffi/simulator/huge_pages.h"

namespace jaxhetero::simulator {

class EventHandler {
 public:
  virtual ~EventHandler() = default;
  // `what` is the number that the event was planned with.
  virtual void on_event(uint64_t what) = 0;
};

class EventQueue {
 public:
  [[nodiscard]] double now_s() const { return now_s_; }
  [[nodiscard]] uint64_t past_count() const { return past_count_; }

  // Plans an event, not before now. The handler outlives it.
  void at(double time_s, EventHandler& handler, uint64_t what) {
    events_.push({time_s < now_s_ ? now_s_ : time_s, planned_count_++, &handler, what});
  }

  // The next event happens. False if there is none.
  bool step() {
    if (events_.empty()) return false;
    const Event event = events_.top();
    events_.pop();
    now_s_ = event.time_s;
    ++past_count_;
    event.handler->on_event(event.what);
    return true;
  }

 private:
  struct Event {
    double time_s;
    uint64_t number;
    EventHandler* handler;
    uint64_t what;
  };
  struct IsLater {
    bool operator()(const Event& a, const Event& b) const {
      return a.time_s != b.time_s ? a.time_s > b.time_s : a.number > b.number;
    }
  };

  std::priority_queue<Event, std::vector<Event, HugePages<Event>>, IsLater> events_;
  double now_s_ = 0;
  uint64_t planned_count_ = 0;
  uint64_t past_count_ = 0;
};

}  // namespace jaxhetero::simulator
