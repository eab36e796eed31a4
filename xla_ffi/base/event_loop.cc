#include "xla_ffi/base/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

namespace jaxhetero {
namespace {

constexpr int kSlices = 10;  // of a wait in after_running()

Status system_error(const char* call) {
  return {Code::kInternal, std::string(call) + " failed: " + std::strerror(errno)};
}

// An event carries the descriptor and its generation. If an earlier callback of the turn closes a descriptor, and its
// number is reused, the new watch must not receive the old one's events.
uint64_t event_key(int fd, uint32_t generation) { return uint64_t{generation} << 32 | static_cast<uint32_t>(fd); }

}  // namespace

Result<std::unique_ptr<EventLoop>> EventLoop::create() {
  Fd epoll([] { return epoll_create1(EPOLL_CLOEXEC); });
  if (!epoll.valid()) return system_error("epoll_create1");
  Fd wakeup([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  if (!wakeup.valid()) return system_error("eventfd");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = event_key(wakeup.get(), 0);
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wakeup.get(), &event) != 0) return system_error("epoll_ctl");
  return std::unique_ptr<EventLoop>(new EventLoop(std::move(epoll), std::move(wakeup)));
}

// What callbacks keep alive may use the loop as it goes.
EventLoop::~EventLoop() {
  const auto watches = std::exchange(watches_, {});
  const auto timers = std::exchange(timers_, {});
  const auto tasks = std::exchange(end_of_turn_, {});
  const auto posted = std::exchange(posted_, {});
}

void EventLoop::run() {
  std::array<epoll_event, 64> events;
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
    }
    const int timeout = run_pollers() ? 0 : timeout_ms();
    const int ready = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout);
    for (int i = 0; i < std::max(ready, 0); ++i) {
      const int fd = static_cast<int>(static_cast<uint32_t>(events[i].data.u64));
      if (fd == wakeup_.get()) {
        run_posted();
        continue;
      }
      const auto watch = watches_.find(fd);
      if (watch == watches_.end() || event_key(fd, watch->second.generation) != events[i].data.u64) continue;
      const std::shared_ptr<FdCallback> callback = watch->second.callback;  // the callback may unwatch itself
      (*callback)(events[i].events);
    }
    run_due_timers();
    run_end_of_turn();
  }
}

void EventLoop::post(Task task) {
  {
    const std::lock_guard lock(mutex_);
    posted_.push_back(std::move(task));
  }
  wake();
}

void EventLoop::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake();
}

void EventLoop::wake() {
  const uint64_t one = 1;
  // Fails only if the counter is full; then the loop is awake anyway.
  [[maybe_unused]] const ssize_t written = ::write(wakeup_.get(), &one, sizeof one);
}

void EventLoop::run_posted() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t read = ::read(wakeup_.get(), &count, sizeof count);
  std::vector<Task> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.swap(posted_);
  }
  for (Task& task : tasks) task();
}

Status EventLoop::watch(int fd, uint32_t epoll_events, FdCallback callback) {
  const uint32_t generation = next_generation_++;
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = event_key(fd, generation);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return system_error("epoll_ctl");
  watches_.insert_or_assign(fd, Watch{generation, std::make_shared<FdCallback>(std::move(callback))});
  return {};
}

Status EventLoop::change(int fd, uint32_t epoll_events) {
  const auto watch = watches_.find(fd);
  if (watch == watches_.end()) return {Code::kInternal, "the event loop does not watch this descriptor"};
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = event_key(fd, watch->second.generation);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0) return system_error("epoll_ctl");
  return {};
}

void EventLoop::unwatch(int fd) {
  if (watches_.erase(fd) > 0) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

EventLoop::TimerId EventLoop::after(std::chrono::milliseconds delay, Task task) {
  const TimerId id = next_timer_++;
  add_timer(id, delay, std::move(task));
  return id;
}

EventLoop::TimerId EventLoop::after_running(std::chrono::milliseconds delay, Task task) {
  const TimerId id = next_timer_++;
  run_slices(id, delay / kSlices, kSlices, std::move(task));
  return id;
}

void EventLoop::add_timer(TimerId id, std::chrono::milliseconds delay, Task task) {
  const Clock::time_point when = Clock::now() + delay;
  timers_.emplace(std::pair(when, id), std::move(task));
  timer_times_.emplace(id, when);
}

// However long the loop stands still, only one slice passes meanwhile.
void EventLoop::run_slices(TimerId id, std::chrono::milliseconds slice, int left, Task task) {
  if (left == 0) return task();
  add_timer(id, slice, [this, id, slice, left, task = std::move(task)]() mutable {
    run_slices(id, slice, left - 1, std::move(task));
  });
}

void EventLoop::cancel(TimerId timer) {
  const auto when = timer_times_.find(timer);
  if (when == timer_times_.end()) return;
  timers_.erase({when->second, timer});
  timer_times_.erase(when);
}

void EventLoop::run_due_timers() {
  const Clock::time_point now = Clock::now();
  while (!timers_.empty() && timers_.begin()->first.first <= now) {
    auto due = timers_.extract(timers_.begin());
    timer_times_.erase(due.key().second);
    due.mapped()();
  }
}

void EventLoop::run_end_of_turn() {
  while (!end_of_turn_.empty()) {
    std::vector<Task> tasks;
    tasks.swap(end_of_turn_);
    for (Task& task : tasks) task();
  }
}

EventLoop::PollerId EventLoop::add_poller(Poller poller) {
  pollers_.emplace(next_poller_, std::make_shared<Poller>(std::move(poller)));
  return next_poller_++;
}

// Returns whether the loop may not sleep: a poller has more to do, or what the pollers have queued ran after them.
bool EventLoop::run_pollers() {
  if (pollers_.empty()) return false;
  std::vector<std::shared_ptr<Poller>> pollers;  // a poller may remove itself
  for (const auto& [id, poller] : pollers_) pollers.push_back(poller);
  bool has_more = false;
  for (const auto& poller : pollers) has_more |= (*poller)();
  has_more |= !end_of_turn_.empty();
  run_end_of_turn();
  return has_more;
}

int EventLoop::timeout_ms() const {
  if (timers_.empty()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(timers_.begin()->first.first - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, std::numeric_limits<int>::max()));
}

int64_t EventLoop::now_ms() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now().time_since_epoch()).count();
}

}  // namespace jaxhetero
