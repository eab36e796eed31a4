#include "xla_ffi/transport/strand_door.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <span>
#include <utility>

#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/wire/handshake.h"

namespace jaxhetero {
namespace {

// From now on the socket counts as readable once so many bytes are there.
void set_least_readable(const Fd& socket, int bytes) {
  setsockopt(socket.get(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

}  // namespace

struct StrandDoor::Visitor {
  Fd socket;
  TcpAddress peer;
  std::shared_ptr<void> admission;
  EventLoop::Clock::time_point deadline = EventLoop::Clock::now() + TcpConnection::kHandshakePatience;
  EventLoop::TimerId timer = 0;
};

void StrandDoor::enter(Fd socket, const TcpAddress& peer, const std::shared_ptr<void>& admission) {
  if (strand_count_ == 1) return on_known_(0, std::move(socket), peer, admission, TcpConnection::kHandshakePatience);
  const auto visitor = std::make_shared<Visitor>(Visitor{std::move(socket), peer, admission});
  set_least_readable(visitor->socket, Handshake::kHelloBytes);
  visitor->timer = loop_.after(TcpConnection::kHandshakePatience, [this, visitor] { let_in(visitor); });
  const Status status =
      loop_.watch(visitor->socket.get(), EPOLLIN | EPOLLRDHUP, [this, visitor](uint32_t) { let_in(visitor); });
  if (!status.ok()) let_in(visitor);
}

void StrandDoor::let_in(const std::shared_ptr<Visitor>& visitor) {
  loop_.cancel(visitor->timer);
  loop_.unwatch(visitor->socket.get());
  std::array<std::byte, Handshake::kHelloBytes> hello{};
  const ssize_t bytes = ::recv(visitor->socket.get(), hello.data(), hello.size(), MSG_PEEK | MSG_DONTWAIT);
  set_least_readable(visitor->socket, 1);
  const size_t strand = bytes == ssize_t{hello.size()} ? Handshake::strand_of(hello) : 0;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(visitor->deadline - EventLoop::Clock::now());
  on_known_(strand < strand_count_ ? strand : 0, std::move(visitor->socket), visitor->peer, visitor->admission,
            std::max(left, std::chrono::milliseconds(0)));
}

}  // namespace jaxhetero
