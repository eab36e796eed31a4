// The interface of a transport, as the communicator, the reducer server and the coordinator use it: connections that
// carry frames, and their owners. TCP implements it; libfabric can, too.
//
// Everything here runs on the thread of one event loop, and nothing blocks.
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

// A frame to send. The payload is one range of memory, or a slice of a bucket's leaves. It is not copied, but read when
// the socket takes it. Whoever sends a frame keeps the payload's memory alive until the frame is written, through
// `owner` or otherwise. A payload that is lent (see lent_memory.h) must live until the peer has read it; the connection
// keeps its `owner`, if it has one, until then.
struct OutFrame {
  EncodedHeader header;
  size_t payload_bytes = 0;
  std::span<const std::byte> payload;
  const Leaves* leaves = nullptr;
  size_t leaves_offset = 0;
  std::shared_ptr<const void> owner;
  size_t lent_bytes = 0;  // the size of a payload that is lent, as the connection sets it

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

  // Appends the memory of the payload to `pieces`; nothing for a payload that is lent.
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

// The owner of connections is told of their events through this. Callbacks may close any connection, also the one that
// they are about.
class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;

  // Both sides have proved that they know the job token.
  virtual void on_open(Connection& connection) = 0;

  // A header has arrived. Append the memory for its payload to `into`, header.payload_bytes in all; it must stay valid
  // until on_frame(), or until the connection closes.
  virtual Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) = 0;

  // The payload is in the memory that on_header() gave.
  virtual Status on_frame(Connection& connection, const FrameHeader& header) = 0;

  // A frame has arrived whose payload is in memory that the peer lends. The peer does not change it before it has the
  // answer to this frame; the pointer keeps it mapped. Return true to read it there: neither on_header() nor on_frame()
  // follows. Return false to have it copied, as if it had come over the network.
  virtual Result<bool> on_lent(Connection& /*connection*/, const FrameHeader& /*header*/,
                               const std::shared_ptr<const std::byte>& /*payload*/) {
    return false;
  }

  // More frames are written, or delivered: see Connection::written_frame_count().
  virtual void on_written(Connection& /*connection*/) {}

  // The connection has ended. Called once, but never after close(). `why` is ok if close_after_flush() has finished;
  // else it is the error, or the Status that a callback returned.
  virtual void on_close(Connection& connection, const Status& why) = 0;
};

class Connection {
 public:
  virtual ~Connection() = default;

  virtual void send(OutFrame frame) = 0;
  // The number of frames given to send() so far, and how many of them are completely written to the kernel, the ring or
  // a message.
  [[nodiscard]] virtual uint64_t queued_frame_count() const = 0;
  [[nodiscard]] virtual uint64_t written_frame_count() const = 0;
  // How many of these come to the peer even if this process ends the connection now. A kernel, or a ring, sees to all
  // of them; a fabric only to those whose messages are complete.
  [[nodiscard]] virtual uint64_t delivered_frame_count() const = 0;

  // Ends at once, without on_close().
  virtual void close() = 0;
  // Reads no more frames, writes the queued ones, waits for the peer to close as well, and ends: at the latest when
  // the peer takes nothing for two seconds.
  virtual void close_after_flush() = 0;
  // Drops the queued frames, whose memory is then no longer needed, writes `last`, and ends like close_after_flush().
  // If a frame is half written, a copy of its rest goes first.
  virtual void close_with(OutFrame last) = 0;

  [[nodiscard]] virtual const std::string& peer() const = 0;       // "10.0.0.3:41234"
  [[nodiscard]] virtual const std::string& peer_host() const = 0;  // "10.0.0.3"
};

}  // namespace jaxhetero
