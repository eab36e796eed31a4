// In which order a worker pushes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "tests/cc/fake_peers.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {
namespace {

// Where nothing comes back for a while, the others may be at another round, so one after the other is tried. They may
// be late as well, and a chunk of every round at once would be a long queue.
TEST(ReducerLink, TriesOtherRoundsLittleByLittle) {
  constexpr size_t kWindow = 2;
  constexpr size_t kTried = 3;  // in the first two attempts
  constexpr uint64_t kOps = 200;
  Job job({.workers = 1, .reducers = 1, .chunk_bytes = 4096, .window_chunks = kWindow});
  FakeReducer reducer(job);
  std::mutex mutex;
  std::vector<FrameHeader> pushes;  // guarded by it
  size_t answered = 0;
  reducer.on_push_ = [&](Connection& connection, const FrameHeader& push) {
    const std::lock_guard lock(mutex);
    pushes.push_back(push);
    for (; pushes.size() >= kWindow + kTried && answered < pushes.size(); ++answered) {
      FrameHeader header = pushes[answered];
      header.type = FrameType::kResult;
      connection.send(push_frame(header, header.payload_bytes));
    }
  };
  Communicator& worker = job.add_worker(0);
  ASSERT_TRUE(Job::wait_ready(worker).ok());
  std::vector<Part> parts;
  for (uint64_t op = 0; op < kOps; ++op) parts.emplace_back(worker, TestRound{.op = op, .leaf_counts = {8192}}, 0);
  for (Part& part : parts) ASSERT_TRUE(part.wait().ok());

  const std::lock_guard lock(mutex);
  const auto goes_on =
      std::ranges::find_if(pushes, [](const FrameHeader& push) { return push.op == 0 && push.offset == 2 * 1024; });
  EXPECT_LT(goes_on - pushes.begin(), kOps / 2);
  EXPECT_EQ(pushes.size(), 8 * kOps);
}

}  // namespace
}  // namespace jaxhetero
