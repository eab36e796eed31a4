#include "xla_ffi/worker/window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>

namespace jaxhetero {
namespace {

using std::chrono::microseconds;

constexpr size_t kChunk = 8192;
constexpr double kSlack = 0.002;  // seconds of what the path carries, for hosts that are late

// A path that carries `bytes_per_s` and on which an unhindered chunk takes `trip` to come back as a total.
struct Path {
  double bytes_per_s;
  microseconds trip;
};

// Pushes chunks as a worker does, for `duration`, and returns the window in the end.
size_t run(Window& window, const Path& path, Window::Clock::time_point& now, microseconds duration, size_t enough = 0) {
  struct Chunk {
    Window::Clock::time_point pushed;
    Window::Clock::time_point back;
  };
  std::deque<Chunk> under_way;
  const auto chunk_time = microseconds(static_cast<int64_t>(1e6 * kChunk / path.bytes_per_s));
  Window::Clock::time_point wire_free = now;
  const auto end = now + duration;
  while (now < end) {
    while (under_way.size() * kChunk < window.bytes(enough)) {
      wire_free = std::max(wire_free, now) + chunk_time;
      under_way.push_back({now, wire_free + path.trip});
    }
    now = under_way.front().back;
    window.returned(under_way.front().pushed, kChunk, now);
    under_way.pop_front();
  }
  return window.bytes();
}

class WindowTest : public testing::TestWithParam<Path> {
 protected:
  Window::Clock::time_point now_{std::chrono::seconds(1)};
};

TEST_P(WindowTest, FillsThePathAndLittleMore) {
  const Path path = GetParam();
  Window window(2 * kChunk, size_t{64} << 20);
  const size_t bytes = run(window, path, now_, microseconds(5000000));
  const double needed = std::max<double>(2 * kChunk, path.bytes_per_s * 1e-6 * static_cast<double>(path.trip.count()));
  EXPECT_GE(bytes, needed);
  EXPECT_LE(bytes, 2 * needed + kSlack * path.bytes_per_s + 2 * kChunk);
}

INSTANTIATE_TEST_SUITE_P(Paths, WindowTest,
                         testing::Values(Path{3e6, microseconds(500)}, Path{30e6, microseconds(1000)},
                                         Path{125e6, microseconds(200)}, Path{125e6, microseconds(20000)},
                                         Path{1e9, microseconds(50)}));

TEST_F(WindowTest, FollowsAPathThatChanges) {
  Window window(2 * kChunk, size_t{64} << 20);
  const size_t fast = run(window, {100e6, microseconds(2000)}, now_, microseconds(3000000));
  const size_t slow = run(window, {5e6, microseconds(2000)}, now_, microseconds(5000000));
  EXPECT_LT(slow, fast / 4);
  EXPECT_GE(run(window, {100e6, microseconds(2000)}, now_, microseconds(6000000)), fast / 2);
}

// One round that never ends would otherwise take its own queue for distance.
TEST_F(WindowTest, DoesNotGrowByItsOwnQueue) {
  for (const size_t enough : {size_t{0}, 64 * kChunk}) {
    Window window(2 * kChunk, size_t{64} << 20);
    const size_t early = run(window, {10e6, microseconds(3000)}, now_, microseconds(2000000));
    EXPECT_LE(run(window, {10e6, microseconds(3000)}, now_, microseconds(300000000), enough), 2 * early);
  }
}

// As the answers to measures, which are headers only, or the totals that waited for one late worker. The chunks were
// pushed one by one or all at once. One chunk more is pushed among the totals, and has a short round trip.
TEST_F(WindowTest, IsNotOpenedByTotalsThatComeBackTogether) {
  constexpr double kBytesPerS = 25e6;
  constexpr int kChunks = 64;
  const auto chunk_time = microseconds(static_cast<int64_t>(1e6 * kChunk / kBytesPerS));
  const double carried_in_a_trip = kBytesPerS * 1e-6 * static_cast<double>(chunk_time.count());
  for (const auto push_time : {chunk_time, microseconds(0)}) {
    Window window(2 * kChunk, size_t{64} << 20);
    for (int round = 0; round < 50; ++round) {
      window.restart(2 * kChunk, now_);
      const auto started_at = now_;
      window.returned(started_at, kChunk, now_ += chunk_time);
      now_ = started_at + kChunks * chunk_time;
      for (int chunk = 1; chunk < kChunks; ++chunk) {
        window.returned(started_at + chunk * push_time, kChunk, now_ += microseconds(10));
      }
      window.returned(now_ - microseconds(100), kChunk, now_ += chunk_time);
      now_ += microseconds(1000);
    }
    EXPECT_LE(window.bytes(), 2 * carried_in_a_trip + kSlack * kBytesPerS + 2 * kChunk);
  }
}

TEST(Window, StaysWithinItsBounds) {
  Window::Clock::time_point now{std::chrono::seconds(1)};
  Window fixed(3 * kChunk, 3 * kChunk);
  EXPECT_EQ(run(fixed, {1e9, microseconds(10000)}, now, microseconds(1000000)), 3 * kChunk);
  Window small(2 * kChunk, 10 * kChunk);
  EXPECT_EQ(run(small, {1e9, microseconds(10000)}, now, microseconds(1000000)), 10 * kChunk);
  EXPECT_EQ(run(small, {1e5, microseconds(1)}, now, microseconds(9000000)), 2 * kChunk);
}

TEST(Window, OpensStepByStepAfterAPause) {
  Window::Clock::time_point now{std::chrono::seconds(1)};
  Window window(0, 100 * kChunk);
  const size_t full = run(window, {100e6, microseconds(2000)}, now, microseconds(1000000));
  ASSERT_GT(full, 8 * kChunk);
  window.restart(2 * kChunk, now);
  EXPECT_EQ(window.bytes(), 2 * kChunk);
  window.returned(now, kChunk, now + microseconds(2000));
  EXPECT_EQ(window.bytes(), 3 * kChunk);
  EXPECT_GE(run(window, {100e6, microseconds(2000)}, now, microseconds(100000)), full / 2);
}

TEST(Window, IsEnoughOnceTheRoundHasComeSoFar) {
  Window::Clock::time_point now{std::chrono::seconds(1)};
  Window window(0, 100 * kChunk);
  ASSERT_LT(run(window, {1e6, microseconds(100)}, now, microseconds(1000000)), 2 * kChunk);
  window.restart(2 * kChunk, now);
  for (size_t chunks = 2; chunks < 14; ++chunks) {
    EXPECT_EQ(window.bytes(10 * kChunk), std::min<size_t>(chunks, 10) * kChunk);
    window.returned(now, kChunk, now + microseconds(8000));
  }
}

}  // namespace
}  // namespace jaxhetero
