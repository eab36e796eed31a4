// Accepts TCP connections. Anybody on the network can connect, so the number of peers that have not yet proved that
// they know the job token is bounded.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/tcp_address.h"

namespace jaxhetero {

// Used on the loop's thread, except for bind(). Never blocks.
class TcpListener {
 public:
  // The peer counts as unproved for as long as `admission` is held, on any thread.
  using OnAccept = std::function<void(Fd socket, const TcpAddress& peer, std::shared_ptr<void> admission)>;

  // Binds and listens, on any thread. `purpose` is for error messages: "the coordinator".
  static Result<std::unique_ptr<TcpListener>> bind(EventLoop& loop, const TcpAddress& address, std::string purpose);
  ~TcpListener() { stop(); }
  TcpListener(const TcpListener&) = delete;
  TcpListener& operator=(const TcpListener&) = delete;

  Status start(OnAccept on_accept);
  void stop();
  [[nodiscard]] uint16_t port() const { return port_; }

 private:
  TcpListener(EventLoop& loop, Fd socket, uint16_t port) : loop_(loop), socket_(std::move(socket)), port_(port) {}
  void accept_ready();
  void pause();

  EventLoop& loop_;
  Fd socket_;
  uint16_t port_;
  OnAccept on_accept_;
  std::shared_ptr<std::atomic<size_t>> unproved_count_ = std::make_shared<std::atomic<size_t>>(0);
};

}  // namespace jaxhetero
