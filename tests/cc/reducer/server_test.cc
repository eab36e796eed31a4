// A reducer as its coordinator sees it.
#include "xla_ffi/reducer/server.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "tests/cc/one_reducer.h"
#include "tests/cc/two_sides.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

// The coordinator is the server, and the two workers are the client's connections.
class ReducerServerTest : public TransportTest {
 protected:
  void start() {
    ReducerServerConfig config;
    config.coordinator = server_.listen().text();
    config.token = bytes_of("secret");
    config.host = "127.0.0.1";
    config.start_timeout = config.timeout = kPatience;
    reducer_.emplace(std::move(config));
    ASSERT_TRUE(reducer_->start().ok());
    const Bytes registered = first_frame(FrameType::kRegister);
    const uint16_t port = decode_registration(registered).value().port;
    server_.send(OutFrame::control(FrameType::kView, encode(view_)));
    first_frame(FrameType::kReady);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      client_.connect(*resolve("127.0.0.1", port));
      ASSERT_TRUE(client_.wait_open(rank + 1));
      client_.send(OutFrame::control(FrameType::kJoin, encode(Join{view_.job_id, rank})), rank);
    }
  }

  // The payload of the first frame of this type that the coordinator was sent.
  Bytes first_frame(FrameType type) {
    std::optional<Bytes> payload;
    EXPECT_TRUE(server_.wait([&] {
      const auto found = std::ranges::find(server_.frames_, type, [](const Received& got) { return got.header.type; });
      if (found != server_.frames_.end()) payload = found->payload;
      return payload.has_value();
    }));
    return payload.value_or(Bytes());
  }

  View view_ = [] {
    View view;
    view.job_id = 1;
    view.job.worker_count = 2;
    view.job.reducer_count = 1;
    view.job.chunk_bytes = kChunkBytes;
    view.job.window_chunks = kWindow;
    view.worker_hosts = {"a", "b"};
    view.worker_endpoints.resize(2);
    return view;
  }();
  std::optional<ReducerServer> reducer_;
};

// Workers may be slow to hear of it, and the reducer does not wait for them for long: without a word its end would look
// like the cause.
TEST_F(ReducerServerTest, TellsTheCoordinatorWhyTheJobHasFailed) {
  ASSERT_NO_FATAL_FAILURE(start());
  FrameHeader header = header_of(FrameType::kDescribe, kOp);
  client_.send(OutFrame::control(FrameType::kDescribe, encode(OpDescription{f32_sum(16), "step"}), header));
  FrameHeader push = push_of(0, 16);
  push.op = kOp;
  push.last = true;
  const auto chunk = std::make_shared<const Bytes>(kChunkBytes);
  client_.send(OutFrame::of(push, *chunk, chunk));
  client_.send(OutFrame::control(FrameType::kGoodbye, {}), 1);
  const Status why = decode_fault(first_frame(FrameType::kFault));
  EXPECT_EQ(why.code(), Code::kWorkerLost);
  // Who waits for it depends on which connection was read first.
  EXPECT_NE(why.message().find("rank 1 (host b) shut down, but "), std::string::npos) << why.message();
}

}  // namespace
}  // namespace jaxhetero
