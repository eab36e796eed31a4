#include "xla_ffi/worker/op.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "xla_ffi/wire/codec.h"
#include "xla_ffi/worker/round.h"

namespace jaxhetero {
namespace {

class OpTest : public testing::Test {
 protected:
  // Starts a round, of which everything is pushed and the first total comes.
  void run() { run(0, operand_.size() / sizeof(float)); }
  void run(uint64_t offset, uint64_t count) {
    RoundRequest request;
    request.spec.total_count = operand_.size() / sizeof(float);
    request.stake = stake_of(request.spec, 1, 0);
    request.inputs.append(operand_.data(), operand_.size());
    op_.add(std::move(request));
    Round& round = op_.start_next_round();
    Segment& segment = round.segments.emplace_back(Shard{0, offset, count}, 16, round.request.spec.total_count);
    segment.next_push = segment.end();
    op_.keep_running_round();
  }

  Op op_;
  Bytes operand_ = Bytes(64, std::byte{7});
};

TEST_F(OpTest, ForgetsTheRoundThatAllHaveCompleted) {
  run();
  op_.finish_round();
  for (const uint64_t other : {0, 2}) {
    op_.forget(other);
    EXPECT_EQ(op_.kept_bytes(), 64u) << other;
  }
  op_.forget(1);
  EXPECT_EQ(op_.kept_bytes(), 0u);
}

TEST_F(OpTest, ForgetsNothingOfTheRoundThatRuns) {
  run();
  op_.forget(0);
  op_.forget(1);
  EXPECT_EQ(op_.kept_bytes(), 64u);
}

// A reducer was lost meanwhile: the kept contribution is all there is of the round that will run anew.
TEST_F(OpTest, ForgetsNothingOfTheRoundThatWillRunAnew) {
  run();
  op_.finish_round();
  run();
  ASSERT_EQ(op_.stop_round(), nullptr) << "it is no replay";
  operand_.assign(operand_.size(), std::byte{0});  // a total has taken its place
  op_.forget(1);
  ASSERT_EQ(op_.kept_bytes(), 64u);
  std::vector<iovec> pieces;
  op_.next()->inputs.slice(0, 64, pieces);
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(*static_cast<const std::byte*>(pieces[0].iov_base), std::byte{7});
}

TEST_F(OpTest, KeepsAShardThatGoesOnAtTheBucketsBeginning) {
  run(12, 7);
  ASSERT_EQ(op_.stop_round(), nullptr);
  std::vector<iovec> pieces;
  op_.next()->inputs.slice(0, 64, pieces);
  const auto* const kept = static_cast<const std::byte*>(pieces[0].iov_base);
  EXPECT_EQ(std::vector(kept, kept + 12), std::vector(12, std::byte{7}));
  EXPECT_EQ(std::vector(kept + 48, kept + 64), std::vector(16, std::byte{7}));
}

TEST(Segment, GoesOnAtTheBucketsBeginning) {
  Segment segment(Shard{0, 90, 40}, 16, 100);
  std::vector<Range> chunks;
  for (; segment.next_push < segment.end(); segment.next_push += chunks.back().count) {
    chunks.push_back(segment.next_chunk());
  }
  EXPECT_EQ(chunks, (std::vector<Range>{{90, 10}, {0, 16}, {16, 14}}));
}

TEST_F(OpTest, IsStillOnceAfterARound) {
  const auto later = [] { return EventLoop::Clock::now() + std::chrono::hours(1); };
  EXPECT_FALSE(op_.becomes_still(later())) << "nothing has run";
  for (int round = 0; round < 2; ++round) {
    run();
    EXPECT_FALSE(op_.becomes_still(later())) << "it runs";
    op_.finish_round();
    EXPECT_FALSE(op_.becomes_still(EventLoop::Clock::now() - std::chrono::hours(1))) << "it has just run";
    EXPECT_TRUE(op_.becomes_still(later()));
    EXPECT_FALSE(op_.becomes_still(later())) << "it has been said";
  }
}

}  // namespace
}  // namespace jaxhetero
