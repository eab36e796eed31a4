#include "xla_ffi/worker/launch_order.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "xla_ffi/base/status.h"
#include "xla_ffi/worker/round.h"

namespace jaxhetero {
namespace {

class LaunchOrderTest : public testing::Test {
 protected:
  static constexpr uint64_t kOp = 7;

  // The next round of an op, of this call in this run.
  Status note(uint64_t call, int64_t run, int32_t device = 0, uint64_t op = kOp) {
    latest_ = RoundRequest();
    latest_.op = op;
    latest_.sequence = call;
    latest_.run = run;
    latest_.device = device;
    latest_.description = "an op";
    return order_.note(latest_);
  }
  static void expect_refused(const Status& status, const std::string& word) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("an op"), std::string::npos) << status.message();
  }

  LaunchOrder order_;
  RoundRequest latest_;
};

TEST_F(LaunchOrderTest, TakesEachRunAndEachRoundOfALoop) {
  for (const int64_t run : {5, 5, 6, 9}) EXPECT_TRUE(note(1, run).ok()) << run;
}

TEST_F(LaunchOrderTest, RefusesAProgramThatIsLaunchedByTwoThreads) {
  ASSERT_TRUE(note(1, 6).ok());
  expect_refused(note(1, 5), "several threads launch the program");
}

// XLA numbers the launches of each program by themselves.
TEST_F(LaunchOrderTest, TakesOtherProgramsInAnyOrderOfTheirNumbers) {
  ASSERT_TRUE(note(1, 600).ok());
  ASSERT_TRUE(note(2, 5).ok());
  ASSERT_TRUE(note(1, 601).ok());
  ASSERT_TRUE(note(2, 6).ok());
  expect_refused(note(1, 600), "several threads launch the program");
}

TEST_F(LaunchOrderTest, RefusesTwoCallsOfOneRun) {
  ASSERT_TRUE(note(1, 5).ok());
  expect_refused(note(2, 5), "two calls");
  EXPECT_TRUE(note(3, 5, 0, kOp + 1).ok()) << "of another op";
}

TEST_F(LaunchOrderTest, TellsWhatWasCompiledAnew) {
  ASSERT_TRUE(note(3, 1).ok());
  EXPECT_FALSE(latest_.is_compiled_anew) << "the op's first round is the first anyway";
  ASSERT_TRUE(note(4, 1000).ok());
  EXPECT_TRUE(latest_.is_compiled_anew);
  ASSERT_TRUE(note(4, 1001).ok());
  EXPECT_FALSE(latest_.is_compiled_anew);
  ASSERT_TRUE(note(3, 2).ok());
  EXPECT_FALSE(latest_.is_compiled_anew) << "it was compiled before";
}

TEST_F(LaunchOrderTest, ForgetsNoneOfTheLatestCallsWhereMoreAndMoreAreCompiled) {
  for (int64_t call = 0; call < 1000; ++call) {
    ASSERT_TRUE(note(static_cast<uint64_t>(call), 10 * call + 1).ok());
    expect_refused(note(static_cast<uint64_t>(call), 10 * call), "several threads");
  }
}

// A worker may use another device than the others do, but not two in another order.
TEST_F(LaunchOrderTest, GivesEachDeviceAnOpOfItsOwn) {
  ASSERT_TRUE(note(1, 5, 3).ok());
  EXPECT_EQ(latest_.op, kOp) << "whichever the first one is";
  ASSERT_TRUE(note(2, 5, 4).ok());
  const uint64_t next = latest_.op;
  EXPECT_NE(next, kOp);
  ASSERT_TRUE(note(2, 6, 4).ok());
  EXPECT_EQ(latest_.op, next);
  ASSERT_TRUE(note(1, 6, 3).ok());
  EXPECT_EQ(latest_.op, kOp);
  ASSERT_TRUE(note(3, 6, 2).ok());
  EXPECT_NE(latest_.op, kOp);
  EXPECT_NE(latest_.op, next);
}

TEST_F(LaunchOrderTest, LeavesRoundsOfNoProgramAlone) {
  RoundRequest request;
  request.op = kOp;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(order_.note(request).ok());
  EXPECT_EQ(request.op, kOp);
}

}  // namespace
}  // namespace jaxhetero
