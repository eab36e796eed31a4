// Instructions of an XLA program that end at a given time, or that take a given time on an emulated accelerator. They
// delay only the instructions that need their results.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Clock = std::chrono::steady_clock;

// Fulfils each promise at its time, on a thread of its own.
class Timer {
 public:
  void at(Clock::time_point time, ffi::Promise promise) {
    {
      const std::lock_guard lock(mutex_);
      waiting_.emplace(time, std::move(promise));
    }
    changed_.notify_one();
  }

 private:
  void run(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested()) {
      if (waiting_.empty()) {
        changed_.wait(lock, stop, [this] { return !waiting_.empty(); });
      } else if (const Clock::time_point first = waiting_.begin()->first; Clock::now() < first) {
        changed_.wait_until(lock, stop, first, [this, first] { return waiting_.begin()->first < first; });
      } else {
        auto due = waiting_.extract(waiting_.begin());
        lock.unlock();
        due.mapped().SetAvailable();  // XLA continues the program inside this call
        lock.lock();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::multimap<Clock::time_point, ffi::Promise> waiting_;  // guarded by mutex_
  std::jthread thread_{[this](const std::stop_token& stop) { run(stop); }};
};

Timer& timer() {
  static Timer timer;
  return timer;
}

// An accelerator, which does one thing at a time.
class Device {
 public:
  // When work ends that could begin at this time.
  Clock::time_point end(Clock::time_point from, Clock::duration work) {
    const std::lock_guard lock(mutex_);
    busy_until_ = std::max(busy_until_, from) + work;
    return busy_until_;
  }

 private:
  std::mutex mutex_;
  Clock::time_point busy_until_;  // guarded by mutex_
};

Device& device() {
  static Device device;
  return device;
}

// The nanoseconds of CLOCK_MONOTONIC in two halves, the lower first.
Clock::time_point from_halves(const uint32_t* halves) {
  return Clock::time_point(std::chrono::nanoseconds(int64_t{halves[1]} << 32 | halves[0]));
}

Clock::duration from_seconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// Ends `ready_s` seconds after `begin`, as in from_halves(). The second operand only makes the instruction wait for it.
ffi::Future wait(ffi::BufferR1<ffi::U32> begin, ffi::BufferR0<ffi::F32>, ffi::Result<ffi::BufferR0<ffi::F32>> one,
                 double ready_s) {
  const Clock::time_point origin = from_halves(begin.typed_data());
  *one->typed_data() = 1;
  ffi::Promise promise;
  ffi::Future future(promise);
  timer().at(origin + from_seconds(ready_s), std::move(promise));
  return future;
}

// Takes `work_s` seconds, once the operand was there and what was begun before has ended. `part` makes instructions
// unlike that have the same operand.
ffi::Future work(ffi::BufferR0<ffi::F32>, ffi::Result<ffi::BufferR0<ffi::F32>> zero, double work_s, int64_t) {
  *zero->typed_data() = 0;
  ffi::Promise promise;
  ffi::Future future(promise);
  timer().at(device().end(Clock::now(), from_seconds(work_s)), std::move(promise));
  return future;
}

// The same as if it had been queued on the accelerator, which needs no host between two instructions: begins at the
// time `there` of what it needs from the host, or when the accelerator has ended what it was given before.
ffi::Future queued_work(ffi::BufferR0<ffi::F32>, ffi::BufferR1<ffi::U32> there,
                        ffi::Result<ffi::BufferR0<ffi::F32>> zero, double work_s, int64_t) {
  *zero->typed_data() = 0;
  ffi::Promise promise;
  ffi::Future future(promise);
  timer().at(device().end(from_halves(there.typed_data()), from_seconds(work_s)), std::move(promise));
  return future;
}

// When the operand is there.
ffi::Error stamp(ffi::BufferR0<ffi::F32>, ffi::Result<ffi::BufferR1<ffi::U32>> there, int64_t) {
  const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
  there->typed_data()[0] = static_cast<uint32_t>(now);
  there->typed_data()[1] = static_cast<uint32_t>(now >> 32);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(BenchWait, wait,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR1<ffi::U32>>()
                                  .Arg<ffi::BufferR0<ffi::F32>>()
                                  .Ret<ffi::BufferR0<ffi::F32>>()
                                  .Attr<double>("ready_s"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    BenchWork, work,
    ffi::Ffi::Bind().Arg<ffi::BufferR0<ffi::F32>>().Ret<ffi::BufferR0<ffi::F32>>().Attr<double>("work_s").Attr<int64_t>(
        "part"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(BenchQueuedWork, queued_work,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR0<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::U32>>()
                                  .Ret<ffi::BufferR0<ffi::F32>>()
                                  .Attr<double>("work_s")
                                  .Attr<int64_t>("part"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    BenchStamp, stamp,
    ffi::Ffi::Bind().Arg<ffi::BufferR0<ffi::F32>>().Ret<ffi::BufferR1<ffi::U32>>().Attr<int64_t>("part"));
