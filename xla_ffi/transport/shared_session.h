// Shared memory under one connection: how two processes of one host agree on it, the frames that go through it, and the
// payloads that are lent instead of copied.
//
// The agreement, in frames of the connection's socket:
//   kShare   the side that connected offers a ring (a SharedOffer).
//   kShared  the other side opened it. Its later frames are in the ring. With a SharedOffer, it also lends payloads.
//            The first side echoes kShared, and its later frames are in the ring as well.
//   kReads   I opened the memory that you lend: send me places in it.
// If any step fails, the side that failed does not answer, and frames stay on the socket, or payloads in the ring.
//
// Each direction moves on its own. Once both sides' kShared are through, the socket carries only single bytes that wake
// a sleeping peer, and its end tells that the peer is gone.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "xla_ffi/base/fd.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/connection.h"
#include "xla_ffi/transport/lent_memory.h"
#include "xla_ffi/transport/shared_ring.h"
#include "xla_ffi/transport/tcp_context.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {

// Part of a TcpConnection, and used by it alone, on the loop's thread. Nothing here blocks, and nothing calls back: the
// connection sends what the session returns.
class SharedSession {
 public:
  // Both outlive the session. `socket` is the connection's.
  SharedSession(TcpContext& context, const Fd& socket) : context_(context), socket_(socket) {}

  // --- The agreement.

  // The kShare frame to send; none if the peer is on another host, an offer was made before, or there is no memory.
  std::optional<OutFrame> offer();

  // Frames in answer to one of the peer's, in the order in which they are to be sent.
  struct Replies {
    std::optional<OutFrame> last_on_socket;  // kShared; after it the connection calls leave_socket()
    std::optional<OutFrame> reads;           // kReads
  };
  // Whether frames of this type are the session's, not the connection's owner's.
  [[nodiscard]] static bool handles(FrameType type) {
    return type == FrameType::kShare || type == FrameType::kShared || type == FrameType::kReads;
  }
  // Where the payload of such a frame goes; then on_frame() takes it from there.
  std::span<std::byte> place_for(size_t payload_bytes);
  Status on_frame(FrameType type, Replies& replies);

  // --- Frames in the ring.

  // Whether our frames go into the ring, and whether the peer's come out of it.
  [[nodiscard]] bool sends() const { return sends_; }
  [[nodiscard]] bool receives() const { return receives_; }
  // Our kShared is written: from now on sends().
  void leave_socket();

  // Moves as many bytes as it can. 0: none now, and the peer will wake us. An error ends the connection.
  Result<size_t> write(std::span<const iovec> pieces);
  Result<size_t> read(std::span<const iovec> pieces);
  // Gives the room of the bytes that were read back to the peer. Only after their frames were handled: payloads that
  // frames refer to stay lent until then.
  void release_read() { ring_->release(); }
  // Wakes the peer if it sleeps until there is room.
  void wake_writer();
  // The socket is readable: takes the peer's wake-up bytes off it, and notes whether it has ended. read() reports the
  // end after the last byte of the ring.
  void drain_socket();

  // --- Payloads that are lent.

  [[nodiscard]] bool lends() const { return lends_; }
  // If the peer can read the frame's payload in place, takes it out of the frame and puts its place into the header.
  void lend(OutFrame& frame);
  // The frame is written: keeps the payload that it lends until the peer has read the frame.
  void keep_lent(OutFrame& frame);
  // Lets go of the payloads whose frames the peer has read.
  void drop_read();
  // The connection has ended: hands over to the context what the peer may still read.
  void abandon_lent();
  // The payload at a place in the peer's memory; null if the peer lends no such memory. Keeps that memory mapped.
  [[nodiscard]] std::shared_ptr<const std::byte> borrow(uint32_t place, size_t bytes) const;

  // Bytes, lent ones included, that we have written and the peer has not read.
  [[nodiscard]] uint64_t unread_bytes() const;

 private:
  // A payload, lent by a frame that ends at this position of the ring.
  struct Lent {
    uint64_t written_bytes;
    size_t bytes;
    std::shared_ptr<const void> owner;
  };

  Status on_share(Replies& replies);
  Status on_shared(Replies& replies);
  Status on_reads();
  void adopt(std::unique_ptr<SharedRing> ring);
  OutFrame announce();
  void wake_peer();

  TcpContext& context_;
  const Fd& socket_;
  Bytes message_;  // the payload of the session's frame that is coming in

  std::unique_ptr<SharedRing> ring_;
  bool has_announced_ = false;  // our kShared is queued, or sent
  bool sends_ = false;
  bool receives_ = false;
  bool owes_wakeup_ = false;  // true until leave_socket(), because the peer would take a wake-up byte for a frame
  Status socket_end_;         // the end of the socket; ok while it has not ended

  bool lends_ = false;  // the peer has opened our lent memory
  std::deque<Lent> lent_;
  std::vector<iovec> pieces_;  // the pieces of the payload that lend() looks at
  std::shared_ptr<const BorrowedMemory> borrowed_memory_;
};

}  // namespace jaxhetero
