// Who is let in, and who is shown out without disturbing anybody.
#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cc/two_sides.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {
namespace {

using HandshakeTest = TransportTest;

TEST_F(HandshakeTest, OpensBothSides) {
  open();
  expect_works(client_);
  EXPECT_TRUE(server_.call([&] { return server_.closed_.empty(); }));
}

TEST_F(HandshakeTest, KnowsItsPeer) {
  open();
  const auto peer = [](Side& side) {
    return side.call([&] { return std::pair(side.connections_[0]->peer(), side.connections_[0]->peer_host()); });
  };
  EXPECT_EQ(peer(client_).second, "127.0.0.1");
  EXPECT_TRUE(peer(client_).first.starts_with("127.0.0.1:"));
  EXPECT_TRUE(peer(server_).first.starts_with("127.0.0.1:"));
}

TEST_F(HandshakeTest, RefusesAnotherTokenOnBothSides) {
  Side stranger("another");
  stranger.connect(server_.listen());
  EXPECT_EQ(stranger.wait_closed().code(), Code::kUnauthenticated);
  EXPECT_NE(stranger.wait_closed().message().find("token"), std::string::npos);
  EXPECT_EQ(server_.wait_closed().code(), Code::kUnauthenticated);
  EXPECT_EQ(server_.call([&] { return server_.open_count_; }), 0u);
  EXPECT_EQ(stranger.call([&] { return stranger.open_count_; }), 0u);
}

// Who does not know the token may send us back our own proof.
TEST_F(HandshakeTest, RefusesItsOwnProof) {
  RawPeer mirror(server_.listen());
  mirror.send(RawPeer::hello(kProtocolVersion, {}));
  const Bytes answer = mirror.read(76);
  ASSERT_EQ(answer.size(), 76u);
  mirror.send(std::span(answer).subspan(44));
  EXPECT_EQ(server_.wait_closed().code(), Code::kUnauthenticated);
  EXPECT_TRUE(mirror.is_closed_within(kPatience));
}

// Who listened to a client that was let in has nothing that opens the door again: the server's nonce is another one.
TEST_F(HandshakeTest, RefusesAReplayedHandshake) {
  const TcpAddress address = server_.listen();
  const Bytes client = RawPeer::hello(kProtocolVersion, {std::byte{1}});
  Bytes recorded = client;
  {
    RawPeer honest(address);
    honest.send(recorded);
    const Bytes answer = honest.read(76);
    ASSERT_EQ(answer.size(), 76u);
    const Digest proof = prove(bytes_of("secret"), "client", client, std::span(answer).first(44));
    recorded.insert(recorded.end(), proof.begin(), proof.end());
    honest.send(proof);
    ASSERT_TRUE(server_.wait_open());
  }
  ASSERT_EQ(server_.wait_closed().code(), Code::kInternal);
  RawPeer replay(address);
  replay.send(recorded);
  EXPECT_EQ(replay.read(1000).size(), 76u);
  EXPECT_TRUE(server_.wait([&] { return server_.closed_.size() == 2; }));
  EXPECT_EQ(server_.call([&] { return server_.closed_.back().code(); }), Code::kUnauthenticated);
  EXPECT_EQ(server_.call([&] { return server_.open_count_; }), 1u);
  EXPECT_EQ(server_.count_of(&Counters::refused_count), 1u);
}

// The proofs are of all that the hellos say: somebody on the way could have a connection taken for that of another
// strand.
TEST_F(HandshakeTest, RefusesAHelloThatWasChangedOnItsWay) {
  RawServer outside;
  client_.connect(outside.address_);
  RawPeer client = outside.accept();
  RawPeer inside(server_.listen());
  Bytes hello = client.read(44);
  ASSERT_EQ(hello.size(), 44u);
  hello[10] ^= std::byte{1};  // the strand
  inside.send(hello);
  client.send(inside.read(76));
  inside.send(client.read(32));
  inside.socket_.reset();
  EXPECT_EQ(client_.wait_closed().code(), Code::kUnauthenticated);
  EXPECT_FALSE(server_.wait_closed().ok());
  EXPECT_EQ(server_.call([&] { return server_.open_count_; }), 0u);
}

TEST_F(HandshakeTest, TellsAClientOfAnotherVersionItsOwn) {
  RawPeer other(server_.listen());
  other.send(RawPeer::hello(kProtocolVersion + 1, {}));
  const Bytes answer = other.read(1000);
  ASSERT_EQ(answer.size(), 76u);
  Nonce nonce;
  std::copy_n(answer.begin() + 12, nonce.size(), nonce.begin());
  EXPECT_EQ(Bytes(answer.begin(), answer.begin() + 44), RawPeer::hello(kProtocolVersion, nonce));
  EXPECT_EQ(server_.wait_closed().code(), Code::kVersionMismatch);
  EXPECT_NE(server_.wait_closed().message().find("version " + std::to_string(kProtocolVersion + 1) +
                                                 ", this process version " + std::to_string(kProtocolVersion)),
            std::string::npos);
}

TEST_F(HandshakeTest, RefusesAServerOfAnotherVersion) {
  RawServer server;
  client_.connect(server.address_);
  RawPeer peer = server.accept();
  ASSERT_EQ(peer.read(44).size(), 44u);
  Bytes answer = RawPeer::hello(kProtocolVersion + 1, {});
  answer.resize(76);
  peer.send(answer);
  EXPECT_EQ(client_.wait_closed().code(), Code::kVersionMismatch);
}

TEST_F(HandshakeTest, RefusesAServerThatSpeaksSomethingElse) {
  RawServer server;
  client_.connect(server.address_);
  RawPeer peer = server.accept();
  peer.send(
      bytes_of("HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n400 Bad Request"));
  EXPECT_EQ(client_.wait_closed().code(), Code::kProtocol);
}

// A server that goes away, or has too many guests, says nothing about our token.
TEST_F(HandshakeTest, DoesNotTakeAHangUpForAWrongToken) {
  RawServer server;
  client_.connect(server.address_);
  {
    RawPeer peer = server.accept();
  }
  EXPECT_EQ(client_.wait_closed().code(), Code::kInternal);
}

TEST_F(HandshakeTest, GivesUpOnASilentServer) {
  RawServer server;
  client_.connect(server.address_, milliseconds(50));
  EXPECT_EQ(client_.wait_closed().message(), "no answer in the handshake");
}

TEST_F(HandshakeTest, SaysWhyItCannotConnect) {
  TcpAddress nobody;
  {
    const RawServer server;
    nobody = server.address_;
  }
  client_.connect(nobody);
  EXPECT_EQ(client_.wait_closed().message(), "Connection refused");
}

// Whatever strangers send, they are shown out and the others are not disturbed.
struct Stranger {
  std::string name;
  std::string bytes;
};

class StrangerTest : public TransportTest, public testing::WithParamInterface<Stranger> {};

TEST_P(StrangerTest, DoesNotDisturb) {
  const TcpAddress address = server_.listen();
  client_.connect(address);
  ASSERT_TRUE(client_.wait_open() && server_.wait_open());
  {
    RawPeer stranger(address);
    stranger.send(bytes_of(GetParam().bytes));
    if (GetParam().bytes.size() >= 44) {
      EXPECT_TRUE(stranger.is_closed_within(kPatience));
    }
    expect_works(client_);
  }
  EXPECT_FALSE(server_.wait_closed().ok());
  EXPECT_EQ(server_.call([&] { return server_.open_count_; }), 1u);
  EXPECT_EQ(server_.count_of(&Counters::refused_count), 1u);
  expect_works(client_);
}

INSTANTIATE_TEST_SUITE_P(
    All, StrangerTest,
    testing::Values(Stranger{"says_nothing_and_closes", ""}, Stranger{"closes_in_the_middle", "jxhetero"},
                    Stranger{"sends_zeros", std::string(100, '\0')}, Stranger{"sends_much", std::string(1 << 20, 'x')},
                    Stranger{"speaks_http", "GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/7.88.1\r\n\r\n"}),
    [](const auto& info) { return info.param.name; });

// The handshake has a deadline, which a byte now and then does not put off. This test lasts as long as that.
TEST_F(HandshakeTest, ShowsOutAStrangerWhoDawdles) {
  const TcpAddress address = server_.listen();
  client_.connect(address);
  ASSERT_TRUE(client_.wait_open() && server_.wait_open());
  RawPeer slow(address);
  const Bytes hello = RawPeer::hello(kProtocolVersion, {});
  const auto start = EventLoop::Clock::now();
  size_t sent = 0;
  while (!slow.is_closed_within(milliseconds(150)) && sent < hello.size() - 1) {
    slow.send(std::span(hello).subspan(sent++, 1));
    if (sent % 10 == 0) expect_works(client_);
  }
  EXPECT_LT(sent, hello.size() - 1) << "it was let stay";
  EXPECT_GT(EventLoop::Clock::now() - start, milliseconds(4500));
  EXPECT_EQ(server_.wait_closed().message(), "no answer in the handshake");
}

TEST_F(HandshakeTest, TakesAHandshakeByteByByte) {
  RawPeer peer(server_.listen());
  const Bytes client = RawPeer::hello(kProtocolVersion, {});
  for (std::byte byte : client) peer.send({&byte, 1});
  const Bytes answer = peer.read(76);
  ASSERT_EQ(answer.size(), 76u);
  const Digest proof = prove(bytes_of("secret"), "client", client, std::span(answer).first(44));
  for (std::byte byte : proof) peer.send({&byte, 1});
  EXPECT_TRUE(server_.wait_open());
}

// Many strangers who say nothing: an honest client has to wait until they are shown out, but is not turned away.
TEST_F(HandshakeTest, LetsAnHonestClientWaitWhileStrangersCrowdTheDoor) {
  const TcpAddress address = server_.listen();
  std::vector<RawPeer> strangers;
  for (int i = 0; i < 300; ++i) strangers.emplace_back(address);
  client_.connect(address);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_TRUE(client_.call([&] { return client_.closed_.empty(); }));
  strangers.clear();
  EXPECT_TRUE(client_.wait_open());
}

// A large job starts at once: more clients than strangers are let in.
TEST_F(HandshakeTest, OpensForManyAtOnce) {
  constexpr size_t kClients = 400;
  const TcpAddress address = server_.listen();
  for (size_t i = 0; i < kClients; ++i) client_.connect(address);
  EXPECT_TRUE(client_.wait_open(kClients));
  EXPECT_TRUE(server_.wait_open(kClients));
}

}  // namespace
}  // namespace jaxhetero
