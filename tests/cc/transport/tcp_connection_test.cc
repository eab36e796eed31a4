// What the owner of a connection may do, the ways in which it ends, and addresses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/cc/two_sides.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {
namespace {

// --- Owners that refuse, close, or err.

TEST_P(EitherWayTest, ClosesWithTheStatusOfItsOwner) {
  server_.on_header_ = [](Connection&, const FrameHeader&, std::vector<iovec>&) {
    return Status(Code::kMismatch, "not like this");
  };
  open(GetParam());
  client_.send(OutFrame::control(FrameType::kDescribe, bytes_of("hello")));
  EXPECT_EQ(server_.wait_closed().message(), "not like this");
  EXPECT_FALSE(client_.wait_closed().ok());
}

TEST_P(EitherWayTest, ClosesWithTheStatusOfItsOwnerAfterAFrame) {
  server_.on_frame_ = [](Connection&, const FrameHeader&) { return Status(Code::kMismatch, "not like this"); };
  open(GetParam());
  for (int i = 0; i < 3; ++i) client_.send(OutFrame::control(FrameType::kDescribe, bytes_of("hello")));
  EXPECT_EQ(server_.wait_closed().message(), "not like this");
  EXPECT_EQ(server_.call([&] { return server_.frames_.size(); }), 1u) << "it read on";
}

TEST_P(EitherWayTest, TellsItsOwnerWhatIsWritten) {
  open(GetParam());
  const auto is_all = [this] { return client_.written_count_ == client_.connections_[0]->queued_frame_count(); };
  for (size_t count : {1, 3}) {
    for (size_t i = 0; i < count; ++i) client_.send(OutFrame::control(FrameType::kDescribe, Bytes(1'000'000)));
    EXPECT_TRUE(client_.wait(is_all));
  }
  ASSERT_TRUE(server_.wait_frames(4));
}

TEST_P(EitherWayTest, WantsAPlaceForEveryByte) {
  Bytes place(3);
  server_.on_header_ = [&](Connection&, const FrameHeader&, std::vector<iovec>& into) {
    into = as_pieces(place);
    return Status();
  };
  open(GetParam());
  client_.send(OutFrame::control(FrameType::kDescribe, bytes_of("hello")));
  EXPECT_EQ(server_.wait_closed().code(), Code::kInternal);
}

class CloseInCallback : public TransportTest, public testing::WithParamInterface<std::tuple<Way, bool>> {};

TEST_P(CloseInCallback, IsAllowed) {
  const Way way = std::get<0>(GetParam());
  const bool in_header = std::get<1>(GetParam());
  Bytes place(100);
  server_.on_header_ = [&](Connection& connection, const FrameHeader& header, std::vector<iovec>& into) {
    into = as_pieces(std::span(place).first(header.payload_bytes));
    if (in_header) {
      connection.close();
      server_.connections_.clear();
    }
    return Status();
  };
  server_.on_frame_ = [&](Connection& connection, const FrameHeader&) {
    connection.close();
    server_.connections_.clear();
    return Status(Code::kInternal, "after close() nobody hears this");
  };
  open(way);
  client_.call([&] {
    for (const char* text : {"hello", "", "world"}) {
      client_.connections_[0]->send(OutFrame::control(FrameType::kDescribe, bytes_of(text)));
    }
  });
  EXPECT_FALSE(client_.wait_closed().ok());
  EXPECT_TRUE(server_.call([&] { return server_.closed_.empty(); }));
  EXPECT_EQ(server_.call([&] { return server_.frames_.size(); }), in_header ? 0u : 1u);
}

INSTANTIATE_TEST_SUITE_P(All, CloseInCallback, testing::Combine(testing::ValuesIn(kWays), testing::Bool()));

TEST_P(EitherWayTest, IgnoresWhatIsAskedOfAClosedConnection) {
  open(GetParam());
  client_.call([&] {
    TcpConnection& connection = *client_.connections_[0];
    connection.send(OutFrame::control(FrameType::kDescribe, bytes_of("lost")));
    connection.close();
    connection.send(OutFrame::control(FrameType::kDescribe, bytes_of("lost")));
    connection.close_after_flush();
    connection.close_with(OutFrame::control(FrameType::kFault, {}));
    connection.close();
  });
  EXPECT_FALSE(server_.wait_closed().ok());
  EXPECT_TRUE(client_.call([&] { return client_.closed_.empty(); }));
}

// --- The ways to end.

TEST_P(EitherWayTest, FlushesEverythingBeforeItCloses) {
  constexpr size_t kFrames = 40;
  open(GetParam());
  client_.call([&] {
    for (size_t i = 0; i < kFrames; ++i) {
      client_.connections_[0]->send(OutFrame::control(FrameType::kDescribe, pattern(1 << 19), header_of({}, i)));
    }
    client_.connections_[0]->close_after_flush();
    client_.connections_[0]->send(OutFrame::control(FrameType::kDescribe, bytes_of("too late")));
  });
  EXPECT_EQ(server_.wait_closed().message(), "it closed the connection");
  EXPECT_EQ(server_.call([&] { return server_.frames_.size(); }), kFrames);
  EXPECT_TRUE(client_.wait_closed().ok());
}

TEST_P(EitherWayTest, MayBeFlushedFromBothSides) {
  open(GetParam());
  for (Side* side : {&client_, &server_}) {
    side->call([&] {
      side->connections_[0]->send(OutFrame::control(FrameType::kDescribe, bytes_of("bye")));
      side->connections_[0]->close_after_flush();
    });
  }
  static_cast<void>(client_.wait_closed());
  static_cast<void>(server_.wait_closed());
}

TEST_F(TransportTest, BlamesNobodyForTheTimeThatItsOwnLoopWasAway) {
  constexpr milliseconds kShort{1000};
  const TcpAddress address = server_.listen();
  client_.call([&] {
    client_.connections_.push_back(TcpConnection::connect(client_.context(), address, client_, kShort));
    std::this_thread::sleep_for(kShort + milliseconds(500));
  });
  EXPECT_TRUE(client_.wait_open());
  expect_works(client_);
}

// A peer that reads slowly gets everything; one that neither reads nor closes holds nobody up for long.
TEST_F(TransportTest, FlushesForAsLongAsThePeerReads) {
  constexpr size_t kFrames = 32;
  constexpr size_t kBytes = 1 << 20;
  for (const bool reads : {true, false}) {
    Side side;
    RawPeer peer(side.listen());
    peer.prove_token("secret");
    ASSERT_TRUE(side.wait_open());
    side.call([&] {
      for (size_t i = 0; i < kFrames; ++i) {
        side.connections_[0]->send(OutFrame::control(FrameType::kDescribe, pattern(kBytes)));
      }
      side.connections_[0]->close_after_flush();
    });
    if (reads) {
      for (size_t i = 0; i < kFrames; ++i) {  // longer than one that does not read has
        ASSERT_EQ(peer.read(kHeaderBytes + kBytes).size(), kHeaderBytes + kBytes) << "frame " << i;
        std::this_thread::sleep_for(milliseconds(100));
      }
      EXPECT_TRUE(peer.is_closed_within(kPatience));
      peer.socket_ = Fd();
    }
    EXPECT_TRUE(side.wait_closed().ok());
  }
}

TEST_P(EitherWayTest, DropsItsQueueForALastWord) {
  open(GetParam());
  const auto dropped = std::make_shared<const Bytes>(pattern(1000));
  client_.call([&] {
    for (int i = 0; i < 10; ++i) {
      client_.connections_[0]->send(OutFrame::of(header_of(FrameType::kDescribe), *dropped, dropped));
    }
    client_.connections_[0]->close_with(OutFrame::control(FrameType::kFault, bytes_of("last")));
    EXPECT_EQ(dropped.use_count(), 1) << "its memory may be needed elsewhere at once";
  });
  EXPECT_FALSE(server_.wait_closed().ok());
  server_.call([&] {
    ASSERT_EQ(server_.frames_.size(), 1u);
    EXPECT_EQ(server_.frames_[0].payload, bytes_of("last"));
  });
}

// A frame is half sent when the end comes. Its rest must follow, or the last word could not be told from it; but from a
// copy, because its memory is needed elsewhere at once.
TEST_F(TransportTest, SaysItsLastWordBehindAHalfSentFrame) {
  constexpr size_t kBytes = 8 << 20;
  RawPeer peer(server_.listen());
  peer.prove_token("secret");
  ASSERT_TRUE(server_.wait_open());
  const Bytes original = pattern(kBytes);
  Bytes memory = original;
  Leaves leaves;
  for (size_t offset = 0; offset < kBytes; offset += kBytes / 8) leaves.append(memory.data() + offset, kBytes / 8);
  server_.call([&] {
    for (uint64_t i = 0; i < 3; ++i) server_.connections_[0]->send(OutFrame::gather(push_of(i, kBytes), leaves, 0));
  });
  uint64_t sent = 0;
  while (sent != server_.count_of(&Counters::sent_bytes) || sent < 1000) {  // until no more fits
    sent = server_.count_of(&Counters::sent_bytes);
    std::this_thread::sleep_for(milliseconds(20));
  }
  ASSERT_LT(sent, kBytes);
  server_.call([&] {
    server_.connections_[0]->close_with(OutFrame::control(FrameType::kFault, bytes_of("last")));
    std::memset(memory.data(), 0, memory.size());  // quick also in a sanitizer: the flush has its deadline
  });
  EXPECT_TRUE(peer.read(kHeaderBytes + kBytes) == frame_bytes(push_of(0, kBytes), original));
  EXPECT_TRUE(peer.read(1000) == frame_bytes(header_of(FrameType::kFault), bytes_of("last")));
  EXPECT_TRUE(peer.is_closed_within(milliseconds(0)));
}

// The peer resets the connection while much is queued for it. Its last word lies in our kernel.
TEST_F(TransportTest, HearsTheLastWordOfAPeerThatNoLongerReads) {
  RawPeer peer(server_.listen());
  peer.prove_token("secret");
  ASSERT_TRUE(server_.wait_open());
  server_.call([&] {
    for (int i = 0; i < 32; ++i)
      server_.connections_[0]->send(OutFrame::control(FrameType::kDescribe, pattern(1 << 20)));
  });
  server_.call([&] {  // so that the loop finds all of it at once
    peer.send(frame_bytes(header_of(FrameType::kFault), bytes_of("last")));
    peer.socket_.reset();
  });
  EXPECT_FALSE(server_.wait_closed().ok());
  server_.call([&] {
    ASSERT_EQ(server_.frames_.size(), 1u);
    EXPECT_EQ(server_.frames_[0].payload, bytes_of("last"));
  });
}

INSTANTIATE_TEST_SUITE_P(All, EitherWayTest, testing::ValuesIn(kWays));

// --- Addresses.

TEST(Listener, SaysWhichAddressIsInUse) {
  const std::unique_ptr<EventLoop> loop = std::move(*EventLoop::create());
  const RawServer other;
  const Status status = TcpListener::bind(*loop, other.address_, "the coordinator").status();
  EXPECT_EQ(status.code(), Code::kAddressInUse);
  EXPECT_NE(status.message().find(other.address_.text()), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("the coordinator"), std::string::npos) << status.message();
}

TEST(Listener, SaysWhichAddressIsNotOurs) {
  const std::unique_ptr<EventLoop> loop = std::move(*EventLoop::create());
  EXPECT_EQ(TcpListener::bind(*loop, *resolve("192.0.2.1", 0), "a test").status().code(), Code::kAddressInUse);
}

TEST(Listener, TakesIpv4AndIpv6AtEveryInterface) {
  Side server;
  const uint16_t port = server.listen("").port();
  size_t count = 0;
  for (const std::string host : {"127.0.0.1", "::1"}) {
    const TcpAddress address = *resolve(host, port);
    if (!address.is_own()) continue;  // no IPv6 here
    Side client;
    client.connect(address);
    ASSERT_TRUE(client.wait_open()) << host;
    ASSERT_TRUE(server.wait_open(++count)) << host;
    server.call([&] { EXPECT_EQ(server.connections_.back()->peer_host(), host) << "as others know it"; });
  }
}

TEST(Connection, TakesASourceOfItsOwnFamilyAlone) {
  if (!resolve("::1", 0)->is_own()) GTEST_SKIP() << "this kernel has no IPv6";
  Side server;
  Side client;
  client.context().source = *resolve("127.0.0.1", 0);
  client.connect(server.listen("::1"));
  EXPECT_TRUE(client.wait_open());
}

TEST(Resolve, ReadsEndpoints) {
  EXPECT_EQ(resolve_all("127.0.0.1:4000")->front().text(), "127.0.0.1:4000");
  EXPECT_EQ(resolve_all("[::1]:4000")->front().text(), "[::1]:4000");
  EXPECT_EQ(resolve_all("[::1]:4000")->front().host(), "::1");
  EXPECT_EQ(resolve("::ffff:10.0.0.3", 4000)->text(), "10.0.0.3:4000");
  EXPECT_FALSE(resolve("192.0.2.1", 4000)->is_own());
  EXPECT_TRUE(resolve("127.0.0.1", 4000)->is_own());
  for (const char* bad : {"", ":", "localhost", ":4000", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:-1",
                          "127.0.0.1:4000x", "127.0.0.1: 4000"}) {
    const Status status = resolve_all(bad).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << bad;
    EXPECT_NE(status.message().find(bad), std::string::npos) << status.message();
  }
}

}  // namespace
}  // namespace jaxhetero
