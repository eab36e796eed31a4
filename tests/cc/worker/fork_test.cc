// What a forked child has of its parent: no descriptor, and none of its process-wide objects.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "xla_ffi/base/fd.h"
#include "xla_ffi/base/of_process.h"

namespace jaxhetero {
namespace {

bool is_open(int fd) { return fcntl(fd, F_GETFD) >= 0; }

// How many of these things are wrong in a child.
int wrong_in_child(const std::function<int()>& count_wrong) {
  const pid_t child = fork();
  if (child == 0) _exit(count_wrong());
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

Fd make_event() {
  return Fd([] { return eventfd(0, 0); });
}

TEST(ForkTest, ChildHasNoDescriptor) {
  Fd kept = make_event();
  Fd moved_from = make_event();
  const int moved = moved_from.get();
  Fd moved_to = make_event();
  moved_to = std::move(moved_from);
  std::vector<Fd> many;  // moved as the vector grows
  for (int i = 0; i < 20; ++i) many.push_back(make_event());
  many.erase(many.begin() + 5);
  {
    const Fd gone = make_event();
  }
  const int kept_number = kept.get();
  EXPECT_EQ(wrong_in_child([&] {
              int wrong = is_open(kept_number) + is_open(moved) + kept.valid() + moved_to.valid();
              for (const Fd& each : many) wrong += each.valid();
              return wrong;
            }),
            0);
  EXPECT_TRUE(is_open(kept_number) && is_open(moved) && kept.valid() && moved_to.valid());
}

TEST(ForkTest, ChildClosesNothingOfItsOwn) {
  auto parents = std::make_unique<Fd>(make_event());
  const int number = parents->get();
  EXPECT_EQ(wrong_in_child([&] {
              const int own = open("/dev/null", O_RDONLY);  // the lowest number that is free
              parents.reset();
              return int{own != number || !is_open(own)};
            }),
            0);
}

TEST(ForkTest, ChildHasDescriptorsOfItsOwnWhichItsChildLacks) {
  const Fd parents = make_event();
  EXPECT_EQ(wrong_in_child([] {
              const Fd own = make_event();
              return int{!is_open(own.get())} + wrong_in_child([&own] { return int{own.valid()}; });
            }),
            0);
}

TEST(ForkTest, ChildOfAnyMomentHasNoDescriptor) {
  std::atomic<bool> stopping = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (!stopping) {
        Fd one = make_event();
        Fd other = std::move(one);
        one = make_event();
      }
    });
  }
  const auto count_open = [] {
    int count = 0;
    for (int fd = 3; fd < 64; ++fd) count += is_open(fd);
    return count;
  };
  const int before = wrong_in_child(count_open);  // what the test's runner has open
  for (int i = 0; i < 200; ++i) EXPECT_EQ(wrong_in_child(count_open), before);
  stopping = true;
  for (std::thread& thread : threads) thread.join();
}

TEST(ForkTest, CopiesDoNotHoldUpTheEndOfAConnection) {
  std::array<int, 2> ends{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  Fd ours(ends[0]);
  const Fd theirs(ends[1]);
  const Fd copy(dup(ours.get()));
  ours.shut_down();
  char byte = 0;
  EXPECT_EQ(recv(theirs.get(), &byte, 1, MSG_DONTWAIT), 0);
  EXPECT_FALSE(ours.valid());
}

struct Locked {
  std::mutex mutex;
  int value = 0;
};

TEST(ForkTest, ChildHasProcessWideObjectsOfItsOwn) {
  of_process<Locked>().value = 1;
  std::atomic<bool> stopping = false;
  std::atomic<bool> is_held = false;
  std::thread holder([&] {
    const std::lock_guard lock(of_process<Locked>().mutex);
    is_held = true;
    while (!stopping) std::this_thread::yield();
  });
  while (!is_held) std::this_thread::yield();
  EXPECT_EQ(wrong_in_child([] {
              const std::lock_guard lock(of_process<Locked>().mutex);
              return of_process<Locked>().value;
            }),
            0);
  stopping = true;
  holder.join();
  EXPECT_EQ(of_process<Locked>().value, 1);
}

}  // namespace
}  // namespace jaxhetero
