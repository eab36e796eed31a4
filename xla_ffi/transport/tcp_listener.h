// Where TCP connections come in, from anybody: so many strangers, who have not proved the job token yet, and no more
// are let in at once.
#pragma once

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

class TcpListener {
 public:
  // The peer counts as a stranger for as long as somebody has `admission`.
  using OnAccept = std::function<void(Fd socket, const TcpAddress& peer, std::shared_ptr<void> admission)>;

  // Binds and listens; accepting starts with start(), on the loop's thread.
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
  std::shared_ptr<size_t> unproved_count_ = std::make_shared<size_t>(0);
};

}  // namespace jaxhetero
