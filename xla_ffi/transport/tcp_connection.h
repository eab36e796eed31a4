// A TCP connection: connecting, the handshake that proves the job token, reading and writing frames, closing. Frames
// may move from the socket to shared memory, between two processes of one host, or to a fabric: see carrier.h. What
// goes over the socket after the handshake may be encrypted: see seal.h.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/fd.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/carrier.h"
#include "xla_ffi/transport/connection.h"
#include "xla_ffi/transport/seal.h"
#include "xla_ffi/transport/tcp_address.h"
#include "xla_ffi/transport/tcp_context.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/handshake.h"

namespace jaxhetero {

class TcpConnection final : public Connection, public std::enable_shared_from_this<TcpConnection> {
 public:
  // Connects, does the client's handshake, and calls owner.on_open; or owner.on_close, if that failed or took longer
  // than `patience`.
  static std::shared_ptr<TcpConnection> connect(TcpContext& context, const TcpAddress& address, ConnectionOwner& owner,
                                                std::chrono::milliseconds patience);
  // Does the server's handshake on a socket that was just accepted, and calls the owner likewise. Drops `admission`
  // once the peer has proved that it knows the token.
  static constexpr std::chrono::milliseconds kHandshakePatience{5000};
  static std::shared_ptr<TcpConnection> accept(TcpContext& context, Fd socket, const TcpAddress& peer,
                                               ConnectionOwner& owner, std::shared_ptr<void> admission,
                                               std::chrono::milliseconds patience = kHandshakePatience);

  // Offers to move to what the context allows: to shared memory if the peer is on this host, or to a fabric. Only for
  // the side that connected; a second call does nothing. If the peer cannot move there, frames stay on the socket. The
  // offer of a fabric waits as long as other connections of the context are in their handshakes.
  void offer_carrier();

  void send(OutFrame frame) override;
  // Whether the peer gets what lies in our lent memory without another copy.
  [[nodiscard]] bool lends() const { return carrier_ && carrier_->lends(); }
  // Whether frames go through memory that a peer on this host shares.
  [[nodiscard]] bool shares_memory() const { return carrier_ && carrier_->shares_memory(); }
  [[nodiscard]] uint64_t queued_frame_count() const override { return queued_frame_count_; }
  [[nodiscard]] uint64_t written_frame_count() const override { return written_frame_count_; }
  [[nodiscard]] uint64_t delivered_frame_count() const override {
    return written_frame_count_ - (carrier_ ? carrier_->undelivered_frame_count() : 0);
  }
  // Whether all is delivered, or will never be.
  [[nodiscard]] bool has_flushed() const {
    return phase_ == Phase::kClosed || delivered_frame_count() == queued_frame_count_;
  }
  void close() override;
  void close_after_flush() override;
  void close_with(OutFrame last) override;
  [[nodiscard]] const std::string& peer() const override { return peer_; }
  [[nodiscard]] const std::string& peer_host() const override { return peer_host_; }
  // Bytes that we have received, plus bytes sent that the peer's kernel has acknowledged (socket) or the peer has read
  // (shared memory).
  [[nodiscard]] uint64_t passed_bytes() const;

 private:
  enum class Phase : uint8_t { kConnecting, kHandshake, kOpen, kFlushing, kClosed };
  static constexpr size_t kMaxPieces = 256;  // the pieces of one sendmsg or readv; IOV_MAX is 1024
  // One connection may move so many before the others have their turn.
  static constexpr size_t kTurnBytes = size_t{1} << 20;

  // The frame that is coming in: first its header, then its payload.
  struct Incoming {
    EncodedHeader header_bytes{};
    size_t header_received_bytes = 0;
    FrameHeader header;       // decoded, while the payload is coming in
    bool in_payload = false;  // the payload of `header` is coming in; else the next header is
    std::vector<iovec> into;  // the memory for the payload; what is filled is cut off
    size_t first_piece = 0;   // the first piece of `into` that is not full
    uint32_t checksum = 0;    // the checksum of the bytes so far
  };

  TcpConnection(TcpContext& context, const TcpAddress& peer, ConnectionOwner& owner);

  // Connecting and the handshake.
  void start_watching(uint32_t epoll_events, std::chrono::milliseconds patience);
  void on_events(uint32_t epoll_events);
  void finish_connecting();
  Status start_handshake(Handshake::Side side);
  void read_handshake();
  void send_handshake(std::span<const std::byte> bytes);
  void open();
  void leave_handshake();

  // Reading frames.
  void read_frames();
  size_t collect_input(std::span<iovec> pieces);
  Result<size_t> read_socket(std::span<const iovec> pieces);
  Result<size_t> read_sealed(std::span<const iovec> pieces);
  void consume(size_t bytes);
  Status start_frame();
  Status find_place();
  Status finish_frame();
  Status finish_carrier_frame();
  Status take_lent(const std::shared_ptr<const std::byte>& payload);

  // Writing frames.
  void write_queued();
  void tell_written();
  void collect_output();
  Result<size_t> write_socket(std::span<iovec> pieces);
  Result<size_t> write_sealed();
  void pop_written(size_t bytes);
  void wait_for_room(bool waits);
  [[nodiscard]] bool may_write() const { return phase_ == Phase::kOpen || phase_ == Phase::kFlushing; }

  // The carrier.
  [[nodiscard]] static bool is_of_carrier(FrameType type);
  std::unique_ptr<Carrier> make_carrier(FrameType type);
  [[nodiscard]] bool sends_off_socket() const { return carrier_ && carrier_->sends(); }
  [[nodiscard]] bool receives_off_socket() const { return carrier_ && carrier_->receives(); }
  void on_progress();

  // Closing.
  void discard_input();
  void flush_for_a_while();
  void finish_flushing();
  void end_after_reading(const Status& why);
  void end(const Status& why);

  TcpContext& context_;
  ConnectionOwner* owner_;
  std::string peer_;
  std::string peer_host_;
  Fd socket_;
  Phase phase_ = Phase::kClosed;
  EventLoop::TimerId deadline_ = 0;
  std::shared_ptr<void> admission_;
  bool is_connecting_ = false;          // and counts as such in the context
  std::optional<Handshake> handshake_;  // empty once it is done
  std::unique_ptr<Seal> seal_;          // null where nothing is encrypted

  std::unique_ptr<Carrier> carrier_;
  Bytes carrier_payload_;  // the payload of the carrier's frame that is coming in
  // The number of the last frame that we write to the socket, our kShared or kOnFabric; 0 without one.
  uint64_t last_socket_frame_ = 0;

  Incoming incoming_;
  uint64_t received_bytes_ = 0;
  bool read_planned_ = false;

  std::deque<OutFrame> queue_;
  size_t front_written_bytes_ = 0;  // how much of the first frame in queue_ is written
  std::vector<iovec> output_;       // scratch: the pieces of the next write
  bool flush_planned_ = false;
  bool waits_for_room_ = false;
  uint64_t queued_frame_count_ = 0;
  uint64_t written_frame_count_ = 0;
  uint64_t sent_bytes_ = 0;
  uint64_t told_frame_count_ = 0;  // written and delivered ones together, when the owner was last told
};

}  // namespace jaxhetero
