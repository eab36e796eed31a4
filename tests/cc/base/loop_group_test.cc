#include "xla_ffi/base/loop_group.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cc/printing.h"
#include "xla_ffi/base/cores.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/memory_nodes.h"
#include "xla_ffi/base/status.h"

namespace jaxhetero {
namespace {

class LoopGroupTest : public testing::Test {
 protected:
  LoopGroupTest() {
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(group_.add().ok());
  }
  // Runs the first loop on this thread, from `begin` until the group's owner has it stop.
  void run(EventLoop::Task begin) {
    group_.at(0).post(std::move(begin));
    group_.at(0).run();
    group_.stop();
  }

  LoopGroup group_;
};

TEST_F(LoopGroupTest, AsksEveryLoopOnItsThread) {
  const std::thread::id own = std::this_thread::get_id();
  std::vector<std::thread::id> found;
  run([&] {
    group_.ask<std::thread::id>([](size_t) { return std::this_thread::get_id(); },
                                [&](const std::vector<std::thread::id>& ids) {
                                  EXPECT_EQ(std::this_thread::get_id(), own);
                                  found = ids;
                                  group_.at(0).stop();
                                });
  });
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0], own);
  EXPECT_NE(found[1], own);
  EXPECT_NE(found[1], found[2]);
}

TEST_F(LoopGroupTest, LetsLoopsDoWhatTheyWereToldBeforeTheyEnd) {
  std::vector<std::string> done(3);
  run([&] {
    for (size_t index = 0; index < 3; ++index) {
      group_.run_on(index, [&done, index] { done[index] = "done"; });
      EXPECT_TRUE(index > 0 || done[0] == "done") << "the first one's thread is this one";
    }
    group_.at(0).stop();
  });
  EXPECT_EQ(done, std::vector<std::string>(3, "done"));
}

// What the threads of three loops may use.
std::vector<Cores> cores_of_loops(LoopGroup& group) {
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(group.add().ok());
  std::vector<Cores> found;
  group.at(0).post([&] {
    group.ask<Cores>([](size_t) { return own_cores(); },
                     [&](const std::vector<Cores>& cores) {
                       found = cores;
                       group.at(0).stop();
                     });
  });
  std::thread owner([&] { group.run_first(); });
  owner.join();
  group.stop();
  return found;
}

TEST(MemoryNodesTest, LoopsTakeTurnsFromWhereTheProcessRuns) {
  const Cores all = own_cores();
  if (all.size() < 2) GTEST_SKIP() << "one core cannot stand in for two nodes";
  const std::vector<Cores> nodes = {{all[0]}, {all[1]}};
  for (const auto& [here, there] : {std::pair(nodes[0], nodes[1]), std::pair(nodes[1], nodes[0])}) {
    std::vector<Cores> found;
    std::thread starter([&] {
      keep_to(here);
      LoopGroup group{MemoryNodes(nodes)};
      found = cores_of_loops(group);
    });
    starter.join();
    EXPECT_EQ(found, (std::vector<Cores>{here, there, here}));
  }
}

TEST(MemoryNodesTest, ThreadsStayFreeWithoutSeveralNodes) {
  const Cores all = own_cores();
  for (const std::vector<Cores>& nodes : {std::vector<Cores>{}, std::vector<Cores>{{all[0]}}}) {
    LoopGroup group{MemoryNodes(nodes)};
    EXPECT_EQ(cores_of_loops(group), std::vector<Cores>(3, all));
  }
}

TEST(MemoryNodesTest, AThreadRunsOnWhereTheSystemRefuses) {
  LoopGroup group{MemoryNodes({{CPU_SETSIZE - 1}, {CPU_SETSIZE + 1}})};
  EXPECT_EQ(cores_of_loops(group), std::vector<Cores>(3, own_cores()));
}

}  // namespace
}  // namespace jaxhetero
