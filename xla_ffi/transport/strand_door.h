// Finds out which strand of this process a new connection is for: the hello that a peer sends first says so.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>

#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/fd.h"
#include "xla_ffi/transport/tcp_address.h"

namespace jaxhetero {

// Used on the loop's thread. Never blocks.
class StrandDoor {
 public:
  // `patience` is what the wait for the hello has left of the time that a handshake may take.
  using OnKnown = std::function<void(size_t strand, Fd socket, const TcpAddress& peer,
                                     const std::shared_ptr<void>& admission, std::chrono::milliseconds patience)>;

  // The loop outlives the door. `on_known` gets the sockets with their hellos still to be read.
  StrandDoor(EventLoop& loop, size_t strand_count, OnKnown on_known)
      : loop_(loop), strand_count_(strand_count), on_known_(std::move(on_known)) {}

  // A socket that was just accepted. One whose hello does not come, or names no strand of ours, goes to the first
  // strand, where the handshake refuses it and says why.
  void enter(Fd socket, const TcpAddress& peer, const std::shared_ptr<void>& admission);

 private:
  struct Visitor;
  void let_in(const std::shared_ptr<Visitor>& visitor);

  EventLoop& loop_;
  const size_t strand_count_;
  const OnKnown on_known_;
};

}  // namespace jaxhetero
