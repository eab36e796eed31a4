#include "xla_ffi/transport/tcp_listener.h"

#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>

namespace jaxhetero {
namespace {

constexpr std::chrono::milliseconds kAcceptPause{100};
constexpr size_t kMaxUnproved = 256;

}  // namespace

Result<std::unique_ptr<TcpListener>> TcpListener::bind(EventLoop& loop, const TcpAddress& address,
                                                       std::string purpose) {
  const auto failed = [&](const char* call) {
    const Code code = errno == EADDRINUSE || errno == EADDRNOTAVAIL ? Code::kAddressInUse : Code::kInternal;
    return Status(code,
                  "cannot listen on " + address.text() + " for " + purpose + ": " + call + ": " + std::strerror(errno));
  };
  Fd socket([&] { return ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  if (!socket.valid()) return failed("socket");
  const int on = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);  // without it, a restart has to wait
  const int off = 0;
  if (address.is_any_ipv6()) setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length) != 0) {
    return failed("bind");
  }
  if (::listen(socket.get(), 1024) != 0) return failed("listen");
  TcpAddress bound;
  bound.length = sizeof bound.storage;
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.length) != 0) {
    return failed("getsockname");
  }
  return std::unique_ptr<TcpListener>(new TcpListener(loop, std::move(socket), bound.port()));
}

Status TcpListener::start(OnAccept on_accept) {
  on_accept_ = std::move(on_accept);
  return loop_.watch(socket_.get(), EPOLLIN, [this](uint32_t) { accept_ready(); });
}

void TcpListener::stop() {
  loop_.unwatch(socket_.get());
  socket_.shut_down();
}

// Leaves new connections in the backlog for a moment: retrying at once would spin.
void TcpListener::pause() {
  loop_.unwatch(socket_.get());
  loop_.after(kAcceptPause, [this] {
    if (socket_.valid()) static_cast<void>(start(std::move(on_accept_)));
  });
}

void TcpListener::accept_ready() {
  // Too many unproved peers: newcomers wait in the backlog, and nobody is refused.
  if (*unproved_count_ >= kMaxUnproved) return pause();
  TcpAddress peer;
  peer.length = sizeof peer.storage;
  Fd socket([&] {
    return ::accept4(socket_.get(), reinterpret_cast<sockaddr*>(&peer.storage), &peer.length,
                     SOCK_NONBLOCK | SOCK_CLOEXEC);
  });
  if (!socket.valid()) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) pause();
    return;
  }
  ++*unproved_count_;
  const std::shared_ptr<void> admission(nullptr, [count = unproved_count_](void*) { --*count; });
  on_accept_(std::move(socket), peer, admission);
}

}  // namespace jaxhetero
