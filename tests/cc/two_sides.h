// Two processes' sides of connections, over real sockets on the loopback; and peers that do not run our code.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cc/bytes.h"
#include "tests/cc/fabric_library.h"
#include "tests/cc/loop_thread.h"
#include "tests/cc/printing.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/transport/tcp_listener.h"
#include "xla_ffi/wire/auth.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {

using std::chrono::milliseconds;

inline constexpr milliseconds kPatience{20000};  // of a test; nothing takes that long

struct Received {
  FrameHeader header;
  Bytes payload;
};

// One process's side: an event loop, perhaps a listener, and an owner that records its callbacks.
class Side : public ConnectionOwner {
 public:
  explicit Side(const std::string& token = "secret", bool checksums = false)
      : context_{thread_.loop(), bytes_of(token), checksums} {}
  ~Side() override {
    thread_.stop();
    connections_.clear();  // before their context
  }

  template <typename Function>
  auto call(Function function) {
    return thread_.call(std::move(function));
  }

  TcpAddress listen(const std::string& host = "127.0.0.1") {
    Result<std::unique_ptr<TcpListener>> listener = TcpListener::bind(thread_.loop(), *resolve(host, 0), "a test");
    EXPECT_TRUE(listener.ok()) << listener.status().message();
    listener_ = std::move(*listener);
    const Status status = call([&] {
      return listener_->start([this](Fd socket, const TcpAddress& peer, std::shared_ptr<void> admission) {
        connections_.push_back(TcpConnection::accept(context_, std::move(socket), peer, *this, std::move(admission)));
      });
    });
    EXPECT_TRUE(status.ok()) << status.message();
    return *resolve(host, listener_->port());
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
  // Waits until a connection has ended; returns the Status of the first that did.
  Status wait_closed() {
    const bool closed = wait([this] { return !closed_.empty(); });
    return closed ? call([this] { return closed_.front(); }) : Status(Code::kInternal, "the test waited in vain");
  }

  void send(OutFrame frame, size_t connection = 0) {
    call([&] { connections_.at(connection)->send(std::move(frame)); });
  }

  // Replace on_header, on_frame and on_lent, if a test sets them. On the loop's thread.
  std::function<Status(Connection&, const FrameHeader&, std::vector<iovec>&)> on_header_;
  std::function<Status(Connection&, const FrameHeader&)> on_frame_;
  std::function<Result<bool>(const FrameHeader&, std::shared_ptr<const std::byte>)> on_lent_;
  bool drops_ = false;  // whether it lets go of a connection that has ended, as most owners do

  // Only for the loop's thread: use call().
  std::vector<std::shared_ptr<TcpConnection>> connections_;
  std::vector<Received> frames_;
  std::vector<Status> closed_;
  size_t open_count_ = 0;
  uint64_t written_count_ = 0;  // of the frames of a connection, as its owner was told

  [[nodiscard]] TcpContext& context() { return context_; }

  // In place of shared memory.
  void use_fabric(const std::string& wanted) {
    test_fabric_library();
    call([&] {
      context_.shares_memory = false;
      context_.owns_lent_frames = true;
      context_.fabric = std::make_shared<FabricChoice>(wanted, log_);
    });
  }
  EventLog log_;

  void encrypt() {
    Result<std::shared_ptr<const CryptoLibrary>> crypto = CryptoLibrary::open();
    ASSERT_TRUE(crypto.ok()) << crypto.status().message();
    call([&] { context_.crypto = *crypto; });
  }

  // Reads it on the loop's thread, which counts a frame after writing it: the other side may have the frame before.
  [[nodiscard]] uint64_t count_of(std::atomic<uint64_t> Counters::* counter) {
    return call([&] { return (context_.counters.get()->*counter).load(); });
  }

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
  Result<bool> on_lent(Connection&, const FrameHeader& header,
                       const std::shared_ptr<const std::byte>& payload) override {
    return on_lent_ ? on_lent_(header, payload) : false;
  }
  void on_written(Connection& connection) override { written_count_ = connection.written_frame_count(); }
  void on_close(Connection& connection, const Status& why) override {
    closed_.push_back(why);
    if (drops_) std::erase_if(connections_, [&](const auto& each) { return each.get() == &connection; });
  }

  LoopThread thread_;
  TcpContext context_;
  std::unique_ptr<TcpListener> listener_;
  std::map<Connection*, Bytes> coming_;
};

// A peer that does not run our code: a blocking socket.
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

  // Reads `count` bytes, or fewer if the other side closes.
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

  // A client's whole handshake. This pins its bytes.
  void prove_token(const std::string& token) {
    const Bytes client = hello(kProtocolVersion, {std::byte{1}, std::byte{2}});
    send(client);
    const Bytes answer = read(8 + 4 + 32 + 32);
    ASSERT_EQ(answer.size(), 76u);
    const Bytes server(answer.begin(), answer.begin() + 44);
    Nonce nonce;
    std::copy_n(server.begin() + 12, nonce.size(), nonce.begin());
    EXPECT_EQ(server, hello(kProtocolVersion, nonce));
    const Digest proof = prove(bytes_of(token), "server", client, server);
    EXPECT_TRUE(std::equal(proof.begin(), proof.end(), answer.begin() + 44));
    send(prove(bytes_of(token), "client", client, server));
  }

  Fd socket_;
};

// A server that does not run our code.
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

inline Bytes frame_bytes(FrameHeader header, std::span<const std::byte> payload) {
  header.payload_bytes = static_cast<uint32_t>(payload.size());
  const EncodedHeader encoded = encode(header);
  Bytes bytes(encoded.size() + payload.size());
  std::ranges::copy(encoded, bytes.begin());
  std::ranges::copy(payload, bytes.begin() + encoded.size());
  return bytes;
}

inline FrameHeader header_of(FrameType type, uint64_t op = 0) {
  FrameHeader header;
  header.type = type;
  header.op = op;
  return header;
}

// A push of `count` bytes, which may be larger than a control frame.
inline FrameHeader push_of(uint64_t offset, uint32_t count) {
  FrameHeader header = header_of(FrameType::kPush);
  header.offset = offset;
  header.count = count;
  header.payload_bytes = count;
  return header;
}

// How the frames of a connection travel.
enum class Way : uint8_t { kSocket, kMemory, kFabric, kSealed, kSealedThenMemory };
inline constexpr std::array kWays = {Way::kSocket, Way::kMemory, Way::kFabric, Way::kSealed, Way::kSealedThenMemory};
inline void PrintTo(Way way, std::ostream* out) {
  *out << std::array{"socket", "memory", "fabric", "sealed", "sealed_then_memory"}[static_cast<size_t>(way)];
}

class TransportTest : public testing::Test {
 protected:
  void open(Way way = Way::kSocket) {
    if (way == Way::kSealed || way == Way::kSealedThenMemory) {
      for (Side* side : {&client_, &server_}) side->encrypt();
    }
    client_.connect(server_.listen());
    ASSERT_TRUE(client_.wait_open());
    ASSERT_TRUE(server_.wait_open());
    if (way == Way::kSocket || way == Way::kSealed) return;
    if (way == Way::kFabric) {
      client_.use_fabric(test_provider());
      server_.use_fabric("");
    }
    client_.call([&] { client_.connections_[0]->offer_carrier(); });
    for (Side* side : {&client_, &server_}) {
      ASSERT_TRUE(side->wait([&] {
        const Counters& counters = *side->context().counters;
        return counters.shared_connection_count + counters.fabric_connection_count == 1;
      }));
    }
  }

  // The server receives a frame.
  void expect_works(Side& client, size_t connection = 0) {
    const size_t before = server_.call([&] { return server_.frames_.size(); });
    client.send(OutFrame::control(FrameType::kDescribe, bytes_of("still here")), connection);
    ASSERT_TRUE(server_.wait_frames(before + 1));
    EXPECT_EQ(server_.call([&] { return server_.frames_.back().payload; }), bytes_of("still here"));
  }

  Side server_;
  Side client_;
};

class EitherWayTest : public TransportTest, public testing::WithParamInterface<Way> {};

}  // namespace jaxhetero
