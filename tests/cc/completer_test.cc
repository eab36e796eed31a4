#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <latch>
#include <memory>
#include <thread>

#include "xla_ffi/worker/callback_threads.h"

namespace jaxhetero {
namespace {

// Each task waits for all: with fewer threads than tasks this would hang.
TEST(Completer, LetsNoTaskWaitForAnother) {
  constexpr int kTasks = 64;
  std::latch everybody(kTasks + 1);
  Completer completer;
  for (int i = 0; i < kTasks; ++i) completer.run([&] { everybody.arrive_and_wait(); });
  everybody.arrive_and_wait();
}

TEST(Completer, RunsMoreTasksThanThreads) {
  std::atomic<int> count = 0;
  {
    Completer completer;
    for (int i = 0; i < 10000; ++i) completer.run([&] { ++count; });
  }
  EXPECT_EQ(count, 10000);
}

TEST(Completer, UsesAnIdleThreadAgain) {
  Completer completer;
  const auto thread_of_a_task = [&] {
    std::promise<std::thread::id> id;
    std::future<std::thread::id> known = id.get_future();
    completer.run([&] { id.set_value(std::this_thread::get_id()); });
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

TEST(Completer, FinishesWhatItWasGivenBeforeItEnds) {
  std::atomic<int> count = 0;
  {
    Completer completer;
    for (int i = 0; i < 100; ++i) {
      completer.run([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        completer.run([&] { ++count; });  // as a program that starts its next round
      });
    }
  }
  EXPECT_EQ(count, 100);
}

// A completion may let go of the last reference to whatever owns the completer: the thread cannot join itself.
TEST(Completer, MayBeDestroyedByOneOfItsTasks) {
  std::latch left_alone(1);
  std::promise<void> destroyed;
  std::atomic<int> count = 0;
  auto completer = std::make_shared<Completer>();
  Completer& same = *completer;
  for (int i = 0; i < 10; ++i) same.run([&] { ++count; });
  same.run([&, last = std::move(completer)]() mutable {
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
