#include "xla_ffi/transport.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/cc/loop_thread.h"
#include "tests/cc/printing.h"
#include "xla_ffi/auth.h"
#include "xla_ffi/checksum.h"
#include "xla_ffi/tcp_transport.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience{20000};  // of a test; nothing should take that long

Bytes bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

Bytes pattern(size_t size, uint32_t seed = 1) {
  std::mt19937_64 random(seed);
  Bytes bytes(size);
  for (size_t i = 0; i < size; i += 8) {
    const uint64_t value = random();
    std::memcpy(bytes.data() + i, &value, std::min<size_t>(8, size - i));
  }
  return bytes;
}

struct Received {
  FrameHeader header;
  Bytes payload;
};

// One process's side: an event loop, a listener or not, and an owner that remembers what happened.
class Side : public ConnectionOwner {
 public:
  explicit Side(const std::string& token = "secret", bool checksums = false)
      : context_{thread_.loop(), bytes_of(token), checksums} {}
  ~Side() override { thread_.stop(); }

  template <typename Function>
  auto call(Function function) {
    return thread_.call(std::move(function));
  }

  TcpAddress listen() {
    Result<std::unique_ptr<TcpListener>> listener =
        TcpListener::bind(thread_.loop(), *resolve("127.0.0.1", 0), "a test");
    EXPECT_TRUE(listener.ok()) << listener.status().message();
    listener_ = std::move(*listener);
    const Status status = call([&] {
      return listener_->start([this](Fd socket, const TcpAddress& peer, std::shared_ptr<void> admission) {
        connections_.push_back(TcpConnection::accept(context_, std::move(socket), peer, *this, std::move(admission)));
      });
    });
    EXPECT_TRUE(status.ok()) << status.message();
    return *resolve("127.0.0.1", listener_->port());
  }

  void connect(const TcpAddress& address, milliseconds patience = kPatience) {
    call([&] { connections_.push_back(TcpConnection::connect(context_, address, *this, patience)); });
  }

  // Runs `condition` on the loop's thread until it holds.
  [[nodiscard]] bool wait(const std::function<bool()>& condition) {
    const auto deadline = EventLoop::Clock::now() + kPatience;
    while (!call(condition)) {
      if (EventLoop::Clock::now() > deadline) return false;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return true;
  }
  [[nodiscard]] bool wait_open(size_t count = 1) {
    return wait([=, this] { return open_count_ == count; });
  }
  [[nodiscard]] bool wait_frames(size_t count) {
    return wait([=, this] { return frames_.size() >= count; });
  }
  // How the first connection ended.
  Status wait_closed() {
    const bool closed = wait([this] { return !closed_.empty(); });
    return closed ? call([this] { return closed_.front(); }) : Status(Code::kInternal, "the test waited in vain");
  }

  void send(OutFrame frame, size_t connection = 0) {
    call([&] { connections_.at(connection)->send(std::move(frame)); });
  }

  // What on_header and on_frame do instead, where a test says so; on the loop's thread.
  std::function<Status(Connection&, const FrameHeader&, std::vector<iovec>&)> on_header_;
  std::function<Status(Connection&, const FrameHeader&)> on_frame_;

  // For the loop's thread, thus call(), only.
  std::vector<std::shared_ptr<TcpConnection>> connections_;
  std::vector<Received> frames_;
  std::vector<Status> closed_;
  size_t open_count_ = 0;

  [[nodiscard]] TransportCounters& counters() { return *context_.counters; }

 private:
  void on_open(Connection&) override { ++open_count_; }
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override {
    if (on_header_) return on_header_(connection, header, into);
    Bytes& payload = coming_[&connection];
    payload.assign(header.payload_bytes, {});
    into = as_pieces(payload);
    return {};
  }
  Status on_frame(Connection& connection, const FrameHeader& header) override {
    frames_.push_back({header, std::move(coming_[&connection])});
    return on_frame_ ? on_frame_(connection, header) : Status();
  }
  void on_close(Connection&, const Status& why) override { closed_.push_back(why); }

  LoopThread thread_;
  TcpContext context_;
  std::unique_ptr<TcpListener> listener_;
  std::map<Connection*, Bytes> coming_;
};

// A peer without our code: a blocking socket.
class RawPeer {
 public:
  explicit RawPeer(const TcpAddress& address) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const timeval patience{kPatience.count() / 1000, 0};
    setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    EXPECT_EQ(::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length), 0);
  }
  explicit RawPeer(Fd socket) : socket_(std::move(socket)) {}

  void send(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;
      bytes = bytes.subspan(static_cast<size_t>(sent));
    }
  }

  // Up to `count` bytes; fewer when the other side closed.
  Bytes read(size_t count) {
    Bytes bytes(count);
    size_t end = 0;
    while (end < count) {
      const ssize_t got = ::recv(socket_.get(), bytes.data() + end, count - end, 0);
      if (got <= 0) break;
      end += static_cast<size_t>(got);
    }
    bytes.resize(end);
    return bytes;
  }
  [[nodiscard]] bool is_closed_within(milliseconds patience) {
    pollfd events{socket_.get(), POLLIN, 0};
    return ::poll(&events, 1, static_cast<int>(patience.count())) == 1 && read(1).empty();
  }

  static Bytes hello(uint32_t version, const Nonce& nonce) {
    Bytes bytes = bytes_of("jxhetero");
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<std::byte>(version >> shift));
    bytes.insert(bytes.end(), nonce.begin(), nonce.end());
    return bytes;
  }

  // The whole handshake of a client; this pins its bytes.
  void prove_token(const std::string& token) {
    const Nonce client{std::byte{1}, std::byte{2}};
    send(hello(kProtocolVersion, client));
    const Bytes answer = read(8 + 4 + 32 + 32);
    ASSERT_EQ(answer.size(), 76u);
    Nonce server;
    std::copy_n(answer.begin() + 12, server.size(), server.begin());
    EXPECT_EQ(Bytes(answer.begin(), answer.begin() + 44), hello(kProtocolVersion, server));
    const Digest proof = prove(bytes_of(token), "server", client, server);
    EXPECT_TRUE(std::equal(proof.begin(), proof.end(), answer.begin() + 44));
    send(prove(bytes_of(token), "client", client, server));
  }

  Fd socket_;
};

Bytes frame_bytes(FrameHeader header, std::span<const std::byte> payload) {
  header.payload_bytes = static_cast<uint32_t>(payload.size());
  const EncodedHeader encoded = encode(header);
  Bytes bytes(encoded.size() + payload.size());
  std::ranges::copy(encoded, bytes.begin());
  std::ranges::copy(payload, bytes.begin() + encoded.size());
  return bytes;
}

FrameHeader header_of(FrameType type, uint64_t op = 0) {
  FrameHeader header;
  header.type = type;
  header.op = op;
  return header;
}

// A push of `count` bytes, which may be larger than a control frame.
FrameHeader push_of(uint64_t offset, uint32_t count) {
  FrameHeader header = header_of(FrameType::kPush);
  header.spec = {Kind::kSum, DType::kU8, 0, 1, uint64_t{1} << 40, 0};
  header.offset = offset;
  header.count = count;
  header.payload_bytes = count;
  return header;
}

class TransportTest : public testing::Test {
 protected:
  void open() {
    client_.connect(server_.listen());
    ASSERT_TRUE(client_.wait_open());
    ASSERT_TRUE(server_.wait_open());
  }

  // A frame there and one back.
  void expect_works(Side& client, size_t connection = 0) {
    const size_t before = server_.call([&] { return server_.frames_.size(); });
    client.send(OutFrame::control(FrameType::kDescribe, bytes_of("still here")), connection);
    ASSERT_TRUE(server_.wait_frames(before + 1));
    EXPECT_EQ(server_.call([&] { return server_.frames_.back().payload; }), bytes_of("still here"));
  }

  Side server_;
  Side client_;
};

// --- The handshake.

TEST_F(TransportTest, OpensBothSides) {
  open();
  expect_works(client_);
  EXPECT_TRUE(server_.call([&] { return server_.closed_.empty(); }));
}

TEST_F(TransportTest, KnowsItsPeer) {
  open();
  const auto peer = [](Side& side) {
    return side.call([&] { return std::pair(side.connections_[0]->peer(), side.connections_[0]->peer_host()); });
  };
  EXPECT_EQ(peer(client_).second, "127.0.0.1");
  EXPECT_TRUE(peer(client_).first.starts_with("127.0.0.1:"));
  EXPECT_TRUE(peer(server_).first.starts_with("127.0.0.1:"));
}

TEST_F(TransportTest, RefusesAnotherTokenOnBothSides) {
  Side stranger("another");
  stranger.connect(server_.listen());
  EXPECT_EQ(stranger.wait_closed().code(), Code::kUnauthenticated);
  EXPECT_NE(stranger.wait_closed().message().find("token"), std::string::npos);
  EXPECT_EQ(server_.wait_closed().code(), Code::kUnauthenticated);
  EXPECT_EQ(server_.call([&] { return server_.open_count_; }), 0u);
  EXPECT_EQ(stranger.call([&] { return stranger.open_count_; }), 0u);
}

// Who does not know the token may send us back our own proof.
TEST_F(TransportTest, RefusesItsOwnProof) {
  RawPeer mirror(server_.listen());
  mirror.send(RawPeer::hello(kProtocolVersion, {}));
  const Bytes answer = mirror.read(76);
  ASSERT_EQ(answer.size(), 76u);
  mirror.send(std::span(answer).subspan(44));
  EXPECT_EQ(server_.wait_closed().code(), Code::kUnauthenticated);
  EXPECT_TRUE(mirror.is_closed_within(kPatience));
}

// Who listened to a client that was let in has nothing that opens the door again: the server's nonce is another one.
TEST_F(TransportTest, RefusesAReplayedHandshake) {
  const TcpAddress address = server_.listen();
  const Nonce client{std::byte{1}};
  Bytes recorded = RawPeer::hello(kProtocolVersion, client);
  {
    RawPeer honest(address);
    honest.send(recorded);
    const Bytes answer = honest.read(76);
    ASSERT_EQ(answer.size(), 76u);
    Nonce server;
    std::copy_n(answer.begin() + 12, server.size(), server.begin());
    const Digest proof = prove(bytes_of("secret"), "client", client, server);
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
  EXPECT_EQ(server_.counters().refused_count, 1u);
}

TEST_F(TransportTest, TellsAClientOfAnotherVersionItsOwn) {
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

// A server of our own making, for what a client may meet.
class RawServer {
 public:
  RawServer() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const TcpAddress any = *resolve("127.0.0.1", 0);
    EXPECT_EQ(::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&any.storage), any.length), 0);
    EXPECT_EQ(::listen(socket_.get(), 8), 0);
    address_.length = sizeof address_.storage;
    getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address_.storage), &address_.length);
  }
  RawPeer accept() { return RawPeer(Fd(::accept(socket_.get(), nullptr, nullptr))); }

  Fd socket_;
  TcpAddress address_;
};

TEST_F(TransportTest, RefusesAServerOfAnotherVersion) {
  RawServer server;
  client_.connect(server.address_);
  RawPeer peer = server.accept();
  ASSERT_EQ(peer.read(44).size(), 44u);
  Bytes answer = RawPeer::hello(kProtocolVersion + 1, {});
  answer.resize(76);
  peer.send(answer);
  EXPECT_EQ(client_.wait_closed().code(), Code::kVersionMismatch);
}

TEST_F(TransportTest, RefusesAServerThatSpeaksSomethingElse) {
  RawServer server;
  client_.connect(server.address_);
  RawPeer peer = server.accept();
  peer.send(
      bytes_of("HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n400 Bad Request"));
  EXPECT_EQ(client_.wait_closed().code(), Code::kProtocol);
}

// A server that goes away, or has too many guests, says nothing about our token.
TEST_F(TransportTest, DoesNotTakeAHangUpForAWrongToken) {
  RawServer server;
  client_.connect(server.address_);
  {
    RawPeer peer = server.accept();
  }
  EXPECT_EQ(client_.wait_closed().code(), Code::kInternal);
}

TEST_F(TransportTest, GivesUpOnASilentServer) {
  RawServer server;
  client_.connect(server.address_, milliseconds(50));
  EXPECT_EQ(client_.wait_closed().message(), "no answer in the handshake");
}

TEST_F(TransportTest, SaysWhyItCannotConnect) {
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
  EXPECT_EQ(server_.counters().refused_count, 1u);
  expect_works(client_);
}

INSTANTIATE_TEST_SUITE_P(
    All, StrangerTest,
    testing::Values(Stranger{"says_nothing_and_closes", ""}, Stranger{"closes_in_the_middle", "jxhetero"},
                    Stranger{"sends_zeros", std::string(100, '\0')}, Stranger{"sends_much", std::string(1 << 20, 'x')},
                    Stranger{"speaks_http", "GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/7.88.1\r\n\r\n"}),
    [](const auto& info) { return info.param.name; });

// The handshake has a deadline, which a byte now and then does not put off. This test lasts as long as that.
TEST_F(TransportTest, ShowsOutAStrangerWhoDawdles) {
  const TcpAddress address = server_.listen();
  client_.connect(address);
  ASSERT_TRUE(client_.wait_open() && server_.wait_open());
  RawPeer slow(address);
  const Bytes hello = RawPeer::hello(kProtocolVersion, {});
  const auto begin = EventLoop::Clock::now();
  size_t sent = 0;
  while (!slow.is_closed_within(milliseconds(150)) && sent < hello.size() - 1) {
    slow.send(std::span(hello).subspan(sent++, 1));
    if (sent % 10 == 0) expect_works(client_);
  }
  EXPECT_LT(sent, hello.size() - 1) << "it was let stay";
  EXPECT_GT(EventLoop::Clock::now() - begin, milliseconds(4500));
  EXPECT_EQ(server_.wait_closed().message(), "no answer in the handshake");
}

TEST_F(TransportTest, TakesAHandshakeByteByByte) {
  RawPeer peer(server_.listen());
  const Nonce client{};
  for (std::byte byte : RawPeer::hello(kProtocolVersion, client)) peer.send({&byte, 1});
  const Bytes answer = peer.read(76);
  ASSERT_EQ(answer.size(), 76u);
  Nonce server;
  std::copy_n(answer.begin() + 12, server.size(), server.begin());
  for (std::byte byte : prove(bytes_of("secret"), "client", client, server)) peer.send({&byte, 1});
  EXPECT_TRUE(server_.wait_open());
}

// Many strangers who say nothing: an honest client has to wait until they are shown out, but is not turned away.
TEST_F(TransportTest, LetsAnHonestClientWaitWhileStrangersCrowdTheDoor) {
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
TEST_F(TransportTest, OpensForManyAtOnce) {
  constexpr size_t kClients = 400;
  const TcpAddress address = server_.listen();
  for (size_t i = 0; i < kClients; ++i) client_.connect(address);
  EXPECT_TRUE(client_.wait_open(kClients));
  EXPECT_TRUE(server_.wait_open(kClients));
}

// --- Frames.

// One frame per leaf size list, gathered from the leaves and scattered into as many on the other side.
class PayloadTest : public TransportTest, public testing::WithParamInterface<std::vector<size_t>> {};

TEST_P(PayloadTest, ComesFromLeavesAndGoesIntoLeaves) {
  const std::vector<size_t>& sizes = GetParam();
  const size_t total = std::accumulate(sizes.begin(), sizes.end(), size_t{0});
  Bytes from = pattern(total);
  Bytes to(total);
  Leaves sources;
  Leaves targets;
  for (size_t begin = 0; size_t size : sizes) {
    sources.append(from.data() + begin, size);
    targets.append(to.data() + begin, size);
    begin += size;
  }
  server_.on_header_ = [&](Connection&, const FrameHeader& header, std::vector<iovec>& into) {
    targets.slice(header.offset, header.payload_bytes, into);
    return Status();
  };
  open();
  // As frames of all sizes, the empty one included.
  size_t frame_count = 0;
  client_.call([&] {
    size_t next = 0;
    for (size_t offset = 0; offset < total || frame_count == 0; ++frame_count) {
      const size_t count = std::min(next, total - offset);
      next = std::min<size_t>(2 * next + 1, kMaxChunkBytes);
      client_.connections_[0]->send(OutFrame::gather(push_of(offset, static_cast<uint32_t>(count)), sources, offset));
      offset += count;
    }
  });
  ASSERT_TRUE(server_.wait_frames(frame_count));
  EXPECT_TRUE(from == to);
  EXPECT_EQ(client_.call([&] { return client_.connections_[0]->written_frame_count(); }), frame_count);
  EXPECT_EQ(client_.call([&] { return client_.connections_[0]->queued_frame_count(); }), frame_count);
  EXPECT_EQ(client_.counters().sent_bytes, 44 + 32 + frame_count * kHeaderBytes + total);
  EXPECT_EQ(server_.counters().received_bytes, client_.counters().sent_bytes);
  EXPECT_EQ(client_.counters().received_bytes, 76u);
}

std::vector<size_t> tiny_leaves() {
  std::vector<size_t> sizes(5000);
  for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = i % 8;
  return sizes;
}

INSTANTIATE_TEST_SUITE_P(All, PayloadTest,
                         testing::Values(std::vector<size_t>{}, std::vector<size_t>{0}, std::vector<size_t>{1},
                                         std::vector<size_t>{100000}, std::vector<size_t>{0, 5, 0, 0, 70000, 1, 0},
                                         tiny_leaves(), std::vector<size_t>(1000, 1), std::vector<size_t>{64 << 20}));

TEST_F(TransportTest, SendsBothWaysAtOnce) {
  constexpr size_t kFrames = 64;
  constexpr size_t kBytes = 1 << 18;
  open();
  const Bytes payload = pattern(kBytes);
  const auto send_all = [&](Side& side) {
    side.call([&] {
      for (size_t i = 0; i < kFrames; ++i) {
        side.connections_[0]->send(OutFrame::of(push_of(i, kBytes), payload, nullptr));
      }
    });
  };
  send_all(client_);
  send_all(server_);
  for (Side* side : {&client_, &server_}) {
    ASSERT_TRUE(side->wait_frames(kFrames));
    side->call([&] {
      for (size_t i = 0; i < kFrames; ++i) {
        EXPECT_EQ(side->frames_[i].header.offset, i);
        EXPECT_TRUE(side->frames_[i].payload == payload);
      }
    });
  }
}

// TCP knows no frames: cut anywhere, they arrive the same.
class DribbleTest : public TransportTest, public testing::WithParamInterface<size_t> {};

TEST_P(DribbleTest, ComposesFramesFromAnyPieces) {
  RawPeer peer(server_.listen());
  peer.prove_token("secret");
  Bytes stream;
  constexpr size_t kFrames = 20;
  for (size_t i = 0; i < kFrames; ++i) {
    const Bytes payload = pattern(i % 3 == 0 ? 0 : 7 * i, static_cast<uint32_t>(i));
    const Bytes frame = frame_bytes(header_of(FrameType::kDescribe, i), payload);
    stream.insert(stream.end(), frame.begin(), frame.end());
  }
  for (size_t begin = 0; begin < stream.size(); begin += GetParam()) {
    peer.send(std::span(stream).subspan(begin, std::min(GetParam(), stream.size() - begin)));
    if (GetParam() > 1) std::this_thread::sleep_for(milliseconds(1));
  }
  ASSERT_TRUE(server_.wait_frames(kFrames));
  server_.call([&] {
    for (size_t i = 0; i < kFrames; ++i) {
      EXPECT_EQ(server_.frames_[i].header.op, i);
      EXPECT_EQ(server_.frames_[i].payload, pattern(i % 3 == 0 ? 0 : 7 * i, static_cast<uint32_t>(i)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(PieceBytes, DribbleTest, testing::Values(1, 13, 63, 64, 65, 1000, 1 << 20));

// The peer does not read: the rest waits here, and arrives in order when it does.
TEST_F(TransportTest, WaitsForAPeerThatDoesNotRead) {
  constexpr size_t kFrames = 16;
  constexpr size_t kBytes = 1 << 20;
  RawPeer peer(server_.listen());
  peer.prove_token("secret");
  ASSERT_TRUE(server_.wait_open());
  const auto payload = std::make_shared<const Bytes>(pattern(kBytes));
  server_.call([&] {
    for (size_t i = 0; i < kFrames; ++i)
      server_.connections_[0]->send(OutFrame::of(push_of(i, kBytes), *payload, payload));
  });
  uint64_t sent = 0;
  while (sent != server_.counters().sent_bytes) {  // until no more fits
    sent = server_.counters().sent_bytes;
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_LT(sent, kFrames * kBytes) << "the socket buffers took everything: nothing was tested";
  EXPECT_LT(server_.call([&] { return server_.connections_[0]->written_frame_count(); }), kFrames);
  EXPECT_GT(payload.use_count(), 1) << "needed until it is sent";
  for (size_t i = 0; i < kFrames; ++i) {
    const Bytes got = peer.read(kHeaderBytes + kBytes);
    ASSERT_TRUE(got == frame_bytes(push_of(i, kBytes), *payload)) << "frame " << i;
  }
  ASSERT_TRUE(server_.wait([&] { return server_.connections_[0]->written_frame_count() == kFrames; }));
  EXPECT_EQ(payload.use_count(), 1) << "and no longer";
}

struct BadFrame {
  std::string name;
  std::function<void(Bytes&)> change;
};

class BadFrameTest : public TransportTest, public testing::WithParamInterface<BadFrame> {};

TEST_P(BadFrameTest, ClosesThisConnectionOnly) {
  const TcpAddress address = server_.listen();
  client_.connect(address);
  ASSERT_TRUE(client_.wait_open() && server_.wait_open());
  RawPeer bad(address);
  bad.prove_token("secret");
  ASSERT_TRUE(server_.wait_open(2));
  bad.send(frame_bytes(header_of(FrameType::kDescribe), bytes_of("good")));
  Bytes frame = frame_bytes(header_of(FrameType::kDescribe), {});
  GetParam().change(frame);
  bad.send(frame);
  EXPECT_EQ(server_.wait_closed().code(), Code::kProtocol);
  EXPECT_TRUE(bad.is_closed_within(kPatience));
  EXPECT_EQ(server_.counters().bad_frame_count, 1u);
  expect_works(client_);
}

INSTANTIATE_TEST_SUITE_P(All, BadFrameTest,
                         testing::Values(BadFrame{"magic", [](Bytes& b) { b[0] = std::byte{0}; }},
                                         BadFrame{"type", [](Bytes& b) { b[2] = std::byte{99}; }},
                                         BadFrame{"four_gigabytes",
                                                  [](Bytes& b) { std::fill_n(b.begin() + 4, 4, std::byte{0xff}); }},
                                         BadFrame{"http",
                                                  [](Bytes& b) {
                                                    b = bytes_of(
                                                        "GET / HTTP/1.1\r\nHost: localhost\r\n"
                                                        "User-Agent: curl/7.88.1\r\nAccept: */*\r\n\r\n");
                                                  }}),
                         [](const auto& info) { return info.param.name; });

// --- Checksums.

class ChecksumTest : public testing::Test {
 protected:
  Side server_{"secret", true};
  Side client_{"secret", true};
};

TEST_F(ChecksumTest, LetFramesOfAllSizesThrough) {
  client_.connect(server_.listen());
  ASSERT_TRUE(client_.wait_open() && server_.wait_open());
  Bytes memory = pattern(300000);
  Leaves leaves;
  for (size_t begin = 0; begin < memory.size(); begin += 1000) leaves.append(memory.data() + begin, 1000);
  const std::vector<uint32_t> sizes = {0, 1, 8, 999, 65536, 299999};
  for (uint32_t size : sizes) client_.send(OutFrame::gather(push_of(size, size), leaves, 1));
  ASSERT_TRUE(server_.wait_frames(sizes.size()));
  server_.call([&] {
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_TRUE(server_.frames_[i].header.has_checksum);
      EXPECT_TRUE(std::equal(server_.frames_[i].payload.begin(), server_.frames_[i].payload.end(), memory.begin() + 1));
    }
  });
  EXPECT_EQ(server_.counters().checksum_mismatch_count, 0u);
}

// A frame with its checksum, as it crosses the wire.
Bytes checked_frame_bytes(const FrameHeader& header, std::span<const std::byte> payload) {
  EncodedHeader encoded = encode(header);
  set_checksum(encoded, crc32c(start_checksum(encoded), payload));
  Bytes bytes(encoded.begin(), encoded.end());
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  return bytes;
}

TEST_F(ChecksumTest, FindEveryDamagedBit) {
  const TcpAddress address = server_.listen();
  const Bytes payload = pattern(100);
  const Bytes good = checked_frame_bytes(push_of(0, 100), payload);
  uint64_t mismatch_count = 0;
  for (size_t at :
       {size_t{8}, size_t{16}, kHeaderBytes - 1, kHeaderBytes, good.size() - 1}) {  // rank, op, checksum, ...
    RawPeer peer(address);
    peer.prove_token("secret");
    peer.send(good);
    Bytes bad = good;
    bad[at] ^= std::byte{1};
    peer.send(bad);
    EXPECT_TRUE(peer.is_closed_within(kPatience)) << at;
    EXPECT_EQ(server_.counters().checksum_mismatch_count, ++mismatch_count) << at;
    EXPECT_EQ(server_.counters().bad_frame_count, mismatch_count) << at;
    EXPECT_EQ(server_.call([&] { return server_.frames_.size(); }), mismatch_count) << "only the good ones";
    EXPECT_NE(server_.call([&] { return server_.closed_.back().message(); }).find("came damaged"), std::string::npos);
  }
}

TEST_F(ChecksumTest, MayNotBeLeftOut) {
  RawPeer peer(server_.listen());
  peer.prove_token("secret");
  peer.send(frame_bytes(push_of(0, 100), pattern(100)));
  EXPECT_EQ(server_.wait_closed().code(), Code::kProtocol);
  EXPECT_NE(server_.wait_closed().message().find("no checksums"), std::string::npos);
}

// --- Owners that refuse, close, or err.

TEST_F(TransportTest, ClosesWithTheStatusOfItsOwner) {
  server_.on_header_ = [](Connection&, const FrameHeader&, std::vector<iovec>&) {
    return Status(Code::kMismatch, "not like this");
  };
  open();
  client_.send(OutFrame::control(FrameType::kDescribe, bytes_of("hello")));
  EXPECT_EQ(server_.wait_closed().message(), "not like this");
  EXPECT_FALSE(client_.wait_closed().ok());
}

TEST_F(TransportTest, ClosesWithTheStatusOfItsOwnerAfterAFrame) {
  server_.on_frame_ = [](Connection&, const FrameHeader&) { return Status(Code::kMismatch, "not like this"); };
  open();
  for (int i = 0; i < 3; ++i) client_.send(OutFrame::control(FrameType::kDescribe, bytes_of("hello")));
  EXPECT_EQ(server_.wait_closed().message(), "not like this");
  EXPECT_EQ(server_.call([&] { return server_.frames_.size(); }), 1u) << "it read on";
}

TEST_F(TransportTest, WantsAPlaceForEveryByte) {
  Bytes place(3);
  server_.on_header_ = [&](Connection&, const FrameHeader&, std::vector<iovec>& into) {
    into = as_pieces(place);
    return Status();
  };
  open();
  client_.send(OutFrame::control(FrameType::kDescribe, bytes_of("hello")));
  EXPECT_EQ(server_.wait_closed().code(), Code::kInternal);
}

class CloseInCallback : public TransportTest, public testing::WithParamInterface<bool> {};

TEST_P(CloseInCallback, IsAllowed) {
  const bool in_header = GetParam();
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
  open();
  client_.call([&] {
    for (const char* text : {"hello", "", "world"}) {
      client_.connections_[0]->send(OutFrame::control(FrameType::kDescribe, bytes_of(text)));
    }
  });
  EXPECT_FALSE(client_.wait_closed().ok());
  EXPECT_TRUE(server_.call([&] { return server_.closed_.empty(); }));
  EXPECT_EQ(server_.call([&] { return server_.frames_.size(); }), in_header ? 0u : 1u);
}

INSTANTIATE_TEST_SUITE_P(All, CloseInCallback, testing::Bool(),
                         [](const auto& info) { return info.param ? "on_header" : "on_frame"; });

TEST_F(TransportTest, IgnoresWhatIsAskedOfAClosedConnection) {
  open();
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

TEST_F(TransportTest, FlushesEverythingBeforeItCloses) {
  constexpr size_t kFrames = 40;
  open();
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

TEST_F(TransportTest, MayBeFlushedFromBothSides) {
  open();
  for (Side* side : {&client_, &server_}) {
    side->call([&] {
      side->connections_[0]->send(OutFrame::control(FrameType::kDescribe, bytes_of("bye")));
      side->connections_[0]->close_after_flush();
    });
  }
  static_cast<void>(client_.wait_closed());
  static_cast<void>(server_.wait_closed());
}

// A peer that neither reads nor closes holds nobody up for long.
TEST_F(TransportTest, FlushesForALimitedTime) {
  RawPeer peer(server_.listen());
  peer.prove_token("secret");
  ASSERT_TRUE(server_.wait_open());
  const auto begin = EventLoop::Clock::now();
  server_.call([&] {
    for (int i = 0; i < 32; ++i)
      server_.connections_[0]->send(OutFrame::control(FrameType::kDescribe, pattern(1 << 20)));
    server_.connections_[0]->close_after_flush();
  });
  EXPECT_TRUE(server_.wait_closed().ok());
  EXPECT_LT(EventLoop::Clock::now() - begin, milliseconds(5000));
}

TEST_F(TransportTest, DropsItsQueueForALastWord) {
  open();
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
  for (size_t begin = 0; begin < kBytes; begin += kBytes / 8) leaves.append(memory.data() + begin, kBytes / 8);
  server_.call([&] {
    for (uint64_t i = 0; i < 3; ++i) server_.connections_[0]->send(OutFrame::gather(push_of(i, kBytes), leaves, 0));
  });
  uint64_t sent = 0;
  while (sent != server_.counters().sent_bytes || sent < 1000) {  // until no more fits
    sent = server_.counters().sent_bytes;
    std::this_thread::sleep_for(milliseconds(20));
  }
  ASSERT_LT(sent, kBytes);
  server_.call([&] {
    server_.connections_[0]->close_with(OutFrame::control(FrameType::kFault, bytes_of("last")));
    std::ranges::fill(memory, std::byte{0});
  });
  EXPECT_TRUE(peer.read(kHeaderBytes + kBytes) == frame_bytes(push_of(0, kBytes), original));
  EXPECT_TRUE(peer.read(1000) == frame_bytes(header_of(FrameType::kFault), bytes_of("last")));
  EXPECT_TRUE(peer.is_closed_within(milliseconds(0)));
}

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

TEST(Resolve, ReadsEndpoints) {
  EXPECT_EQ(resolve("127.0.0.1:4000")->text(), "127.0.0.1:4000");
  EXPECT_EQ(resolve("[::1]:4000")->text(), "[::1]:4000");
  EXPECT_EQ(resolve("[::1]:4000")->host(), "::1");
  EXPECT_EQ(resolve("", 4000)->text(), "0.0.0.0:4000");
  for (const char* bad : {"", ":", "localhost", ":4000", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:-1",
                          "127.0.0.1:4000x", "127.0.0.1: 4000"}) {
    const Status status = resolve(std::string(bad)).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << bad;
    EXPECT_NE(status.message().find(bad), std::string::npos) << status.message();
  }
}

}  // namespace
}  // namespace jaxhetero
