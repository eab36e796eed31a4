#include "xla_ffi/worker/callback_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <latch>
#include <memory>
#include <thread>

#include "xla_ffi/base/cores.h"

namespace jaxhetero {
namespace {

// Each task waits for all: with fewer threads than tasks this would hang.
TEST(CallbackThreads, LetsNoTaskWaitForAnother) {
  constexpr int kTasks = 64;
  std::latch everybody(kTasks + 1);
  CallbackThreads callback_threads;
  for (int i = 0; i < kTasks; ++i) callback_threads.run([&] { everybody.arrive_and_wait(); });
  everybody.arrive_and_wait();
}

TEST(CallbackThreads, RunsMoreTasksThanThreads) {
  std::atomic<int> count = 0;
  {
    CallbackThreads callback_threads;
    for (int i = 0; i < 10000; ++i) callback_threads.run([&] { ++count; });
  }
  EXPECT_EQ(count, 10000);
}

TEST(CallbackThreads, RunOnTheCoresOfTheirMaker) {
  const Cores all = own_cores();
  CallbackThreads callback_threads;
  std::promise<Cores> found;
  std::thread giver([&] {
    keep_to({all[0]});
    callback_threads.run([&] { found.set_value(own_cores()); });
  });
  giver.join();
  EXPECT_EQ(found.get_future().get(), all);
}

TEST(CallbackThreads, UsesAnIdleThreadAgain) {
  CallbackThreads callback_threads;
  const auto thread_of_a_task = [&] {
    std::promise<std::thread::id> id;
    std::future<std::thread::id> known = id.get_future();
    callback_threads.run([&] { id.set_value(std::this_thread::get_id()); });
    return known.get();
  };
  const std::thread::id first = thread_of_a_task();
  int same = 0;
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // until it is idle
    same += thread_of_a_task() == first ? 1 : 0;
  }
  EXPECT_GT(same, 0);
}

TEST(CallbackThreads, FinishesWhatItWasGivenBeforeItEnds) {
  std::atomic<int> count = 0;
  {
    CallbackThreads callback_threads;
    for (int i = 0; i < 100; ++i) {
      callback_threads.run([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        callback_threads.run([&] { ++count; });  // as a program that starts its next round
      });
    }
  }
  EXPECT_EQ(count, 100);
}

// Each of the two waits for the other, as two devices of a program do.
TEST(CallbackThreads, LetsNoTaskWaitForAnotherWhileItEnds) {
  std::latch both(2);
  CallbackThreads callback_threads;
  callback_threads.run([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until it is being destroyed
    callback_threads.run([&] { both.arrive_and_wait(); });
    both.arrive_and_wait();
  });
}

// A completion may let go of the last reference to whatever owns the callback_threads: the thread cannot join itself.
TEST(CallbackThreads, MayBeDestroyedByOneOfItsTasks) {
  std::latch left_alone(1);
  std::promise<void> destroyed;
  std::atomic<int> count = 0;
  auto callback_threads = std::make_shared<CallbackThreads>();
  CallbackThreads& same = *callback_threads;
  for (int i = 0; i < 10; ++i) same.run([&] { ++count; });
  same.run([&, last = std::move(callback_threads)]() mutable {
    left_alone.wait();
    last.reset();
    destroyed.set_value();
  });
  left_alone.count_down();
  destroyed.get_future().wait();
  EXPECT_EQ(count, 10);
}

}  // namespace
}  // namespace jaxhetero
