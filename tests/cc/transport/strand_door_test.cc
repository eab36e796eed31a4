#include "xla_ffi/transport/strand_door.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/loop_thread.h"
#include "xla_ffi/base/fd.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/tcp_address.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/handshake.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience{30000};

Bytes hello_for(uint16_t strand) {
  const Bytes token;
  return Handshake(Handshake::Side::kClient, token, Nonce{}, "a peer", strand).opening();
}

class StrandDoorTest : public testing::Test {
 protected:
  // A peer whose socket has come to the door.
  Fd enter() {
    const Fd listener(::socket(AF_INET, SOCK_STREAM, 0));
    TcpAddress address = *resolve("127.0.0.1", 0);
    auto* const name = reinterpret_cast<sockaddr*>(&address.storage);
    EXPECT_EQ(::bind(listener.get(), name, address.length), 0);
    EXPECT_EQ(::listen(listener.get(), 1), 0);
    EXPECT_EQ(getsockname(listener.get(), name, &address.length), 0);
    Fd peer(::socket(AF_INET, SOCK_STREAM, 0));
    EXPECT_EQ(::connect(peer.get(), name, address.length), 0);
    const int accepted = ::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK);
    thread_.call([&] { door_.enter(Fd(accepted), address, nullptr); });
    return peer;
  }
  static void send(const Fd& peer, std::span<const std::byte> bytes) {
    EXPECT_EQ(::send(peer.get(), bytes.data(), bytes.size(), 0), ssize_t(bytes.size()));
  }
  bool is_known(milliseconds patience) { return known_.wait_for(patience) == std::future_status::ready; }
  milliseconds left() {
    return thread_.call([this] { return left_; });
  }

  LoopThread thread_;
  std::promise<std::pair<size_t, Fd>> promise_;
  std::future<std::pair<size_t, Fd>> known_ = promise_.get_future();
  milliseconds left_{};  // of the time for the handshake
  StrandDoor door_{
      thread_.loop(), 4,
      [this](size_t strand, Fd socket, const TcpAddress&, const std::shared_ptr<void>&, milliseconds patience) {
        left_ = patience;
        promise_.set_value({strand, std::move(socket)});
      }};
};

TEST_F(StrandDoorTest, ReadsTheStrandAndLeavesTheHello) {
  const Fd peer = enter();
  const Bytes hello = hello_for(3);
  send(peer, hello);
  const auto [strand, socket] = known_.get();
  EXPECT_EQ(strand, 3u);
  Bytes read(100);
  read.resize(static_cast<size_t>(::recv(socket.get(), read.data(), read.size(), 0)));
  EXPECT_EQ(read, hello);
}

TEST_F(StrandDoorTest, SendsAPeerThatSaysNonsenseOrNothingToTheFirstStrand) {
  for (const auto& text :
       {std::string("GET / HTTP/1.1\r\nHost: example.org\r\nAccept: text/html\r\n\r\n"), std::string()}) {
    promise_ = {};
    known_ = promise_.get_future();
    {
      const Fd peer = enter();
      send(peer, std::as_bytes(std::span(text)));
    }
    EXPECT_EQ(known_.get().first, 0u);
  }
}

TEST_F(StrandDoorTest, SendsAPeerThatWantsAStrandWeDoNotHaveToTheFirst) {
  const Fd peer = enter();
  send(peer, hello_for(4));
  EXPECT_EQ(known_.get().first, 0u);
}

TEST_F(StrandDoorTest, WaitsForAHelloInPieces) {
  const Fd peer = enter();
  const Bytes hello = hello_for(2);
  send(peer, std::span(hello).first(20));
  EXPECT_FALSE(is_known(milliseconds(50)));
  send(peer, std::span(hello).subspan(20));
  ASSERT_TRUE(is_known(kPatience));
  EXPECT_EQ(known_.get().first, 2u);
}

// Its handshake will say that its time is over: silence at the door is part of that.
TEST_F(StrandDoorTest, HandsASilentPeerOnWithoutMoreTime) {
  const Fd peer = enter();
  ASSERT_TRUE(is_known(kPatience));
  EXPECT_EQ(known_.get().first, 0u);
  EXPECT_EQ(left(), milliseconds(0));
}

}  // namespace
}  // namespace jaxhetero
