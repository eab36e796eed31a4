// An event loop: one thread that serves many sockets (epoll), timers, and tasks from other threads. A process's
// communicator or reducer owns one; everything of transport and membership runs on its thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xla_ffi/base/fd.h"
#include "xla_ffi/base/status.h"

namespace jaxhetero {

class EventLoop {
 public:
  using Clock = std::chrono::steady_clock;
  using Task = std::function<void()>;
  using FdCallback = std::function<void(uint32_t epoll_events)>;
  using TimerId = uint64_t;
  // Does what is to be done, and returns whether there may be more at once.
  using Poller = std::function<bool()>;
  using PollerId = uint64_t;

  static Result<std::unique_ptr<EventLoop>> create();
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Runs callbacks until stop(). Blocks in epoll_wait only. Everything below, but post() and stop(), is for its thread.
  void run();

  // From any thread. Posted tasks run on the loop's thread, in order. A task posted after the loop has ended never
  // runs.
  void post(Task task);
  void stop();

  // Level-triggered: `callback` runs in every turn in which one of `epoll_events` holds. One watch per descriptor.
  Status watch(int fd, uint32_t epoll_events, FdCallback callback);
  Status change(int fd, uint32_t epoll_events);
  void unwatch(int fd);

  // Runs `task` once after `delay`. cancel() of a timer that has run, or of 0, does nothing.
  TimerId after(std::chrono::milliseconds delay, Task task);
  // Likewise, but for a wait for somebody else: where this loop stood still, on a busy machine, that hardly counts.
  TimerId after_running(std::chrono::milliseconds delay, Task task);
  void cancel(TimerId timer);

  // Runs `task` after all callbacks of this turn, for example to write what several callbacks have queued.
  void at_end_of_turn(Task task) { end_of_turn_.push_back(std::move(task)); }

  // Runs `poller` in every turn, as the last thing before the loop sleeps; it does not sleep if there may be more.
  PollerId add_poller(Poller poller);
  void remove_poller(PollerId poller) { pollers_.erase(poller); }

  [[nodiscard]] int64_t now_ms() const;

 private:
  struct Watch {
    uint32_t generation;
    std::shared_ptr<FdCallback> callback;
  };

  EventLoop(Fd epoll, Fd wakeup) : epoll_(std::move(epoll)), wakeup_(std::move(wakeup)) {}
  void wake();
  void add_timer(TimerId id, std::chrono::milliseconds delay, Task task);
  void run_slices(TimerId id, std::chrono::milliseconds slice, int left, Task task);
  void run_posted();
  void run_due_timers();
  void run_end_of_turn();
  bool run_pollers();
  [[nodiscard]] int timeout_ms() const;

  Fd epoll_;
  Fd wakeup_;
  std::unordered_map<int, Watch> watches_;
  uint32_t next_generation_ = 1;
  std::map<std::pair<Clock::time_point, TimerId>, Task> timers_;
  std::unordered_map<TimerId, Clock::time_point> timer_times_;
  TimerId next_timer_ = 1;
  std::vector<Task> end_of_turn_;
  std::map<PollerId, std::shared_ptr<Poller>> pollers_;
  PollerId next_poller_ = 1;

  std::mutex mutex_;
  std::vector<Task> posted_;  // guarded by mutex_
  bool stopping_ = false;     // guarded by mutex_
};

}  // namespace jaxhetero
