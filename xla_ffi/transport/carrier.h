// What carries the frames of a connection once they have left its socket: memory that both sides share, or a fabric.
//
// The two sides agree on it in frames of the socket. Each direction moves on its own, behind a last frame there. Then
// the socket tells of its end, and so of the peer's. If any step of the agreement fails, frames stay on the socket.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/connection.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {

// Part of a TcpConnection, and used by it alone, on the loop's thread. Nothing here blocks.
class Carrier {
 public:
  virtual ~Carrier() = default;

  // --- The agreement.

  // The frame that offers to move; none if there is nothing to move to.
  virtual std::optional<OutFrame> offer() = 0;

  // Frames in answer to one of the peer's, in the order in which they are to be sent.
  struct Replies {
    std::optional<OutFrame> last_on_socket;  // after it the connection calls leave_socket()
    std::optional<OutFrame> next;
  };
  // Whether frames of this type are the agreement's, not the connection's owner's.
  [[nodiscard]] virtual bool handles(FrameType type) const = 0;
  // Such a frame has come.
  virtual Status on_frame(FrameType type, const Bytes& payload, Replies& replies) = 0;

  // Whether our frames go here, and whether the peer's come from here.
  [[nodiscard]] virtual bool sends() const = 0;
  [[nodiscard]] virtual bool receives() const = 0;
  // Our last frame on the socket is written: from now on sends().
  virtual void leave_socket() = 0;

  // Whether frames go through memory that both processes share.
  [[nodiscard]] virtual bool shares_memory() const { return false; }

  // --- Frames.

  // Moves as many bytes of whole headers and parts of payloads as it can, and returns how many. 0: none now, and the
  // peer, or progress, will call for another try. An error ends the connection. `front` is the frame that the first of
  // them belong to.
  virtual Result<size_t> write(std::span<const iovec> pieces, const OutFrame& front) = 0;
  // What write() has looked at and not moved is no longer to be sent.
  virtual void forget_unwritten() {}
  // Moves as many bytes as there are, or as fit.
  virtual Result<size_t> read(std::span<const iovec> pieces) = 0;
  // The frames that were read are handled: gives their room back to the peer, and tells it if it waits for some.
  virtual void release_read() = 0;
  virtual void wake_writer() = 0;
  // The socket is readable: takes what it carries, and notes whether it has ended. read() reports the end after the
  // last byte. Bytes that came with the last frame on the socket were taken off it already.
  virtual void drain_socket() = 0;
  virtual void take_from_socket(std::span<const std::byte> /*bytes*/) {}
  // How many of the written frames are not delivered: see Connection::delivered_frame_count().
  [[nodiscard]] virtual uint64_t undelivered_frame_count() const { return 0; }
  // Nothing more is written: whatever the peer is to know about it before the socket ends.
  virtual void finish() {}

  // --- Payloads in place.

  // Whether the peer gets payloads from our lent memory without another copy.
  [[nodiscard]] virtual bool lends() const = 0;
  // A frame is queued. If its payload is lent, takes that out of the frame and puts its place into the header.
  virtual void lend(OutFrame& /*frame*/) {}
  // The frame is written: keeps the payload that it lends until the peer has read the frame.
  virtual void keep_lent(OutFrame& /*frame*/) {}
  // Lets go of the payloads whose frames the peer has read.
  virtual void drop_read() {}
  // The header of a frame was read. If its payload can be read where it is, takes it out of what read() returns; null
  // if not. The pointer keeps it there.
  virtual std::shared_ptr<const std::byte> borrow(const FrameHeader& header) = 0;

  // Bytes, lent ones included, that we have written and the peer has not read.
  [[nodiscard]] virtual uint64_t unread_bytes() const = 0;

  // The connection has ended.
  virtual void close() = 0;
};

}  // namespace jaxhetero
