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
#include "xla_ffi/transport/carrier.h"
#include "xla_ffi/transport/connection.h"
#include "xla_ffi/transport/lent_memory.h"
#include "xla_ffi/transport/shared_ring.h"
#include "xla_ffi/transport/tcp_context.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {

class SharedSession final : public Carrier {
 public:
  // Both outlive the session. `socket` is the connection's.
  SharedSession(TcpContext& context, const Fd& socket) : context_(context), socket_(socket) {}

  // The kShare frame to send; none if the peer is on another host, or there is no memory.
  std::optional<OutFrame> offer() override;
  [[nodiscard]] static bool handles_type(FrameType type) {
    return type == FrameType::kShare || type == FrameType::kShared || type == FrameType::kReads;
  }
  [[nodiscard]] bool handles(FrameType type) const override { return handles_type(type); }
  Status on_frame(FrameType type, const Bytes& payload, Replies& replies) override;

  [[nodiscard]] bool sends() const override { return sends_; }
  [[nodiscard]] bool receives() const override { return receives_; }
  void leave_socket() override;
  [[nodiscard]] bool shares_memory() const override { return sends_; }

  Result<size_t> write(std::span<const iovec> pieces, const OutFrame& front) override;
  Result<size_t> read(std::span<const iovec> pieces) override;
  // Only after the frames were handled: payloads that they refer to stay lent until then.
  void release_read() override { ring_->release(); }
  void wake_writer() override;
  // Takes the peer's wake-up bytes off it.
  void drain_socket() override;

  [[nodiscard]] bool lends() const override { return lends_; }
  void lend(OutFrame& frame) override;
  void keep_lent(OutFrame& frame) override;
  void drop_read() override;
  // Null if the peer lends no such memory.
  [[nodiscard]] std::shared_ptr<const std::byte> borrow(const FrameHeader& header) override;
  [[nodiscard]] uint64_t unread_bytes() const override;
  // Hands over to the context what the peer may still read.
  void close() override;

 private:
  // A payload, lent by a frame that ends at this position of the ring.
  struct Lent {
    uint64_t written_bytes;
    size_t bytes;
    std::shared_ptr<const void> owner;
  };

  Status on_share(const Bytes& payload, Replies& replies);
  Status on_shared(const Bytes& payload, Replies& replies);
  Status on_reads(const Bytes& payload);
  void adopt(std::unique_ptr<SharedRing> ring);
  OutFrame announce();
  void wake_peer();

  TcpContext& context_;
  const Fd& socket_;
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
