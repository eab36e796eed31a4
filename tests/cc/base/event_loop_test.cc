#include "xla_ffi/base/event_loop.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/loop_thread.h"
#include "tests/cc/printing.h"
#include "xla_ffi/base/status.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

// The loop on the test's own thread: set up, run until a callback stops it, look.
class EventLoopTest : public testing::Test {
 protected:
  void TearDown() override { EXPECT_FALSE(gave_up_) << "the loop did not stop by itself"; }

  void run() {
    loop_->after(milliseconds(10000), [this] {
      gave_up_ = true;
      loop_->stop();
    });
    loop_->run();
  }

  std::unique_ptr<EventLoop> loop_ = std::move(*EventLoop::create());
  bool gave_up_ = false;
};

// A descriptor that is readable until it is drained.
Fd readable() { return Fd(eventfd(1, EFD_NONBLOCK)); }

TEST_F(EventLoopTest, RunsTimersInTheOrderOfTheirTimes) {
  std::string order;
  loop_->after(milliseconds(30), [&] { order += 'c'; });
  loop_->after(milliseconds(10), [&] { order += 'a'; });
  loop_->after(milliseconds(20), [&] { order += 'b'; });
  loop_->after(milliseconds(40), [&] { loop_->stop(); });
  run();
  EXPECT_EQ(order, "abc");
}

TEST_F(EventLoopTest, RunsATimerNotBeforeItsTime) {
  const auto begin = EventLoop::Clock::now();
  const int64_t begin_ms = loop_->now_ms();
  loop_->after(milliseconds(25), [&] { loop_->stop(); });
  run();
  EXPECT_GE(EventLoop::Clock::now() - begin, milliseconds(25));
  EXPECT_GE(loop_->now_ms() - begin_ms, 25);
}

TEST_F(EventLoopTest, WaitsWhileItRunsAndNotWhileItStandsStill) {
  std::string order;
  loop_->after_running(milliseconds(50), [&] {
    order += 'b';
    loop_->stop();
  });
  loop_->after(milliseconds(60), [&] { order += 'a'; });
  const EventLoop::TimerId cancelled = loop_->after_running(milliseconds(20), [&] { order += 'c'; });
  loop_->post([] { std::this_thread::sleep_for(milliseconds(100)); });
  loop_->after(milliseconds(15), [&] { loop_->cancel(cancelled); });
  run();
  EXPECT_EQ(order, "ab");
}

TEST_F(EventLoopTest, RunsATimerThatATimerSets) {
  int left = 5;
  std::function<void()> again = [&] {
    if (--left == 0) return loop_->stop();
    loop_->after(milliseconds(1), again);
  };
  loop_->after(milliseconds(0), again);
  run();
  EXPECT_EQ(left, 0);
}

TEST_F(EventLoopTest, DoesNotRunACancelledTimer) {
  std::string ran;
  const EventLoop::TimerId early = loop_->after(milliseconds(5), [&] { ran += "early "; });
  EventLoop::TimerId same_time = 0;
  loop_->after(milliseconds(10), [&] {
    ran += "canceller";
    loop_->cancel(same_time);  // due in this very turn
  });
  same_time = loop_->after(milliseconds(10), [&] { ran += "same time "; });
  loop_->cancel(early);
  loop_->after(milliseconds(20), [&] { loop_->stop(); });
  // So that both timers of 10 ms are due when the loop looks.
  loop_->post([] { std::this_thread::sleep_for(milliseconds(15)); });
  run();
  EXPECT_EQ(ran, "canceller");
}

TEST_F(EventLoopTest, LetsCancelWhatIsNoTimerAnyMore) {
  EventLoop::TimerId itself = 0;
  itself = loop_->after(milliseconds(1), [&] {
    loop_->cancel(itself);
    loop_->cancel(0);
    loop_->cancel(12345);
    loop_->stop();
  });
  run();
}

TEST_F(EventLoopTest, RunsPostedTasksInOrder) {
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) loop_->post([&order, i] { order.push_back(i); });
  loop_->post([&] { loop_->stop(); });
  run();
  ASSERT_EQ(order.size(), 100u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(EventLoopThreads, MayAllPost) {
  constexpr int kThreads = 4;
  constexpr int kTasks = 2000;
  LoopThread thread;
  std::vector<int> seen(kThreads);  // the loop's thread only
  std::atomic<int> out_of_order = 0;
  {
    std::vector<std::jthread> posters;
    for (size_t poster = 0; poster < kThreads; ++poster) {
      posters.emplace_back([&, poster] {
        for (int i = 0; i < kTasks; ++i) {
          thread.loop().post([&, poster, i] { out_of_order += seen[poster]++ == i ? 0 : 1; });
        }
      });
    }
  }
  EXPECT_EQ(thread.call([&] { return seen; }), std::vector<int>(kThreads, kTasks));
  EXPECT_EQ(out_of_order, 0);
}

TEST(EventLoopThreads, MayStopALoopThatSleeps) {
  LoopThread thread;
  thread.call([] {});
  std::this_thread::sleep_for(milliseconds(10));
  thread.stop();
}

TEST(EventLoopThreads, MayStopALoopBeforeItRuns) {
  const std::unique_ptr<EventLoop> loop = std::move(*EventLoop::create());
  loop->stop();
  loop->run();
}

TEST(EventLoopThreads, MayPostAfterTheEnd) {
  auto token = std::make_shared<int>();
  {
    LoopThread thread;
    thread.stop();
    thread.loop().post([token] { FAIL(); });
  }
  EXPECT_EQ(token.use_count(), 1) << "the task that never ran was not let go";
}

TEST_F(EventLoopTest, RunsTheEndOfTheTurnAfterItsCallbacks) {
  std::string order;
  const std::array<Fd, 2> fds = {readable(), readable()};
  for (const Fd& fd : fds) {
    ASSERT_TRUE(loop_
                    ->watch(fd.get(), EPOLLIN,
                            [&, number = fd.get()](uint32_t) {
                              order += 'c';
                              loop_->unwatch(number);
                              loop_->at_end_of_turn([&] {
                                order += 'e';
                                loop_->at_end_of_turn([&] { order += 'f'; });
                              });
                              loop_->stop();
                            })
                    .ok());
  }
  run();
  EXPECT_EQ(order, "cceeff");
}

TEST_F(EventLoopTest, CallsBackAsLongAsAnEventHolds) {
  const Fd fd = readable();
  int calls = 0;
  ASSERT_TRUE(loop_
                  ->watch(fd.get(), EPOLLIN,
                          [&](uint32_t events) {
                            EXPECT_EQ(events, uint32_t{EPOLLIN});
                            if (++calls == 3) loop_->stop();
                          })
                  .ok());
  run();
  EXPECT_EQ(calls, 3);
}

TEST_F(EventLoopTest, WatchesForWhatItWasToldLast) {
  const Fd fd = readable();
  std::vector<uint32_t> seen;
  ASSERT_TRUE(loop_
                  ->watch(fd.get(), EPOLLIN,
                          [&](uint32_t events) {
                            seen.push_back(events);
                            if (seen.size() == 2) return loop_->stop();
                            EXPECT_TRUE(loop_->change(fd.get(), EPOLLOUT).ok());
                          })
                  .ok());
  run();
  EXPECT_EQ(seen, (std::vector<uint32_t>{EPOLLIN, EPOLLOUT}));
}

TEST_F(EventLoopTest, RefusesWhatItCannotWatch) {
  EXPECT_EQ(loop_->watch(-1, EPOLLIN, [](uint32_t) {}).code(), Code::kInternal);
  EXPECT_EQ(loop_->change(12345, EPOLLIN).code(), Code::kInternal);
  const Fd fd = readable();
  EXPECT_TRUE(loop_->watch(fd.get(), EPOLLIN, [](uint32_t) {}).ok());
  EXPECT_FALSE(loop_->watch(fd.get(), EPOLLIN, [](uint32_t) {}).ok()) << "one watch per descriptor";
  loop_->unwatch(fd.get());
  loop_->unwatch(fd.get());  // does nothing
  EXPECT_FALSE(loop_->change(fd.get(), EPOLLIN).ok());
}

// The callback, and what it holds, lives until it returns.
TEST_F(EventLoopTest, LetsACallbackUnwatchItself) {
  const Fd fd = readable();
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> alive = held;
  int calls = 0;
  ASSERT_TRUE(loop_
                  ->watch(fd.get(), EPOLLIN,
                          [&, held = std::move(held)](uint32_t) {
                            loop_->unwatch(fd.get());
                            calls += *held;
                            loop_->after(milliseconds(20), [&] { loop_->stop(); });
                          })
                  .ok());
  run();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(alive.expired());
}

// Two descriptors are ready at once. The first callback closes the second, and opens another with the same number: the
// event that is already on its way is not for that one.
TEST_F(EventLoopTest, KeepsOldEventsFromANewDescriptor) {
  std::array<Fd, 2> fds = {readable(), readable()};
  int called = -1;
  bool new_one_called = false;
  Fd silent;
  for (int i : {0, 1}) {
    ASSERT_TRUE(loop_
                    ->watch(fds[static_cast<size_t>(i)].get(), EPOLLIN,
                            [&, i](uint32_t) {
                              EXPECT_EQ(called, -1) << "the other one was closed";
                              called = i;
                              loop_->unwatch(fds[static_cast<size_t>(i)].get());
                              Fd& other = fds[static_cast<size_t>(1 - i)];
                              const int number = other.get();
                              loop_->unwatch(number);
                              other.reset();
                              silent = Fd(eventfd(0, EFD_NONBLOCK));
                              ASSERT_EQ(silent.get(), number) << "the kernel gives the lowest free number";
                              EXPECT_TRUE(loop_->watch(number, EPOLLIN, [&](uint32_t) { new_one_called = true; }).ok());
                              loop_->after(milliseconds(20), [&] { loop_->stop(); });
                            })
                    .ok());
  }
  run();
  EXPECT_NE(called, -1);
  EXPECT_FALSE(new_one_called);
}

TEST(FdTest, ClosesItselfOnce) {
  int number = -1;
  {
    Fd first(eventfd(0, 0));
    number = first.get();
    Fd second(std::move(first));
    EXPECT_FALSE(first.valid());  // NOLINT(bugprone-use-after-move): that is the test
    Fd third;
    third = std::move(second);
    EXPECT_EQ(third.get(), number);
    EXPECT_EQ(lseek(number, 0, SEEK_CUR) == -1 && errno == EBADF, false);
  }
  EXPECT_TRUE(lseek(number, 0, SEEK_CUR) == -1 && errno == EBADF);
}

}  // namespace
}  // namespace jaxhetero
