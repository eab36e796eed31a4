// What the communicator, the reducer server and the coordinator ask of a transport. TCP is the first one; libfabric can
// stand behind the same two classes.
//
// Everything here belongs to the thread of one event loop.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {

// A frame on its way out. The payload is either one range of memory or a slice of a bucket's leaves; it is read when
// the socket takes it, never copied. Whoever queues a frame keeps its memory alive, by `owner` or otherwise, until it
// is sent, and longer if it may be lent (see lent_memory.h): `owner` until the peer has read it.
struct OutFrame {
  EncodedHeader header;
  size_t payload_bytes = 0;
  std::span<const std::byte> payload;
  const Leaves* leaves = nullptr;
  size_t leaves_offset = 0;
  std::shared_ptr<const void> owner;
  size_t lent_bytes = 0;  // of a payload that stays where it is

  // A header with a payload in one piece; header.payload_bytes is set from it.
  static OutFrame of(FrameHeader header, std::span<const std::byte> payload, std::shared_ptr<const void> owner) {
    header.payload_bytes = static_cast<uint32_t>(payload.size());
    return {encode(header), payload.size(), payload, nullptr, 0, std::move(owner), 0};
  }

  static OutFrame control(FrameType type, Bytes payload, FrameHeader header = {}) {
    header.type = type;
    auto owner = std::make_shared<const Bytes>(std::move(payload));
    return of(header, *owner, owner);
  }

  // header.payload_bytes bytes of `leaves`, from `offset`.
  static OutFrame gather(const FrameHeader& header, const Leaves& leaves, size_t offset) {
    return {encode(header), header.payload_bytes, {}, &leaves, offset, nullptr, 0};
  }

  // The memory that makes up what of the payload is to be sent.
  void append_payload(std::vector<iovec>& pieces) const {
    if (leaves != nullptr) {
      leaves->slice(leaves_offset, payload_bytes, pieces);
    } else if (payload_bytes > 0) {
      // iovec is not const-correct; sendmsg only reads.
      pieces.push_back({const_cast<std::byte*>(payload.data()), payload_bytes});
    }
  }
};

class Connection;

// Who owns connections hears of them through this. Callbacks may close any connection, also the one they are about.
class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;

  // Both sides have proved that they know the job token.
  virtual void on_open(Connection& connection) = 0;

  // A frame's header is here: append to `into` the memory that takes its payload, header.payload_bytes in all.
  virtual Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) = 0;

  // The payload is where on_header wanted it.
  virtual Status on_frame(Connection& connection, const FrameHeader& header) = 0;

  // A frame whose payload is in memory that the peer lends, and leaves as it is until it has the answer to this frame.
  // True if the owner reads it there. Otherwise it is copied, as if it had come over the network.
  virtual Result<bool> on_lent(Connection& /*connection*/, const FrameHeader& /*header*/,
                               const std::shared_ptr<const std::byte>& /*payload*/) {
    return false;
  }

  // The connection ended; called once, except after close(). `why` is ok when close_after_flush() ran to its end, else
  // what went wrong, or the Status that a callback returned.
  virtual void on_close(Connection& connection, const Status& why) = 0;
};

class Connection {
 public:
  virtual ~Connection() = default;

  virtual void send(OutFrame frame) = 0;
  // How many frames were ever given to send(), and how many of those the operating system has taken whole.
  [[nodiscard]] virtual uint64_t queued_frame_count() const = 0;
  [[nodiscard]] virtual uint64_t written_frame_count() const = 0;

  // Ends at once, without a callback.
  virtual void close() = 0;
  // Reads no more frames, sends what is queued, waits a moment for the peer to close as well, and ends.
  virtual void close_after_flush() = 0;
  // Drops what is queued, so that its memory may go, and sends only `last`; where a frame is half sent already, behind
  // a copy of its rest.
  virtual void close_with(OutFrame last) = 0;

  [[nodiscard]] virtual const std::string& peer() const = 0;       // "10.0.0.3:41234"
  [[nodiscard]] virtual const std::string& peer_host() const = 0;  // "10.0.0.3"
};

}  // namespace jaxhetero
