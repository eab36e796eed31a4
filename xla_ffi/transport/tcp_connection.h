// TCP: connecting, the handshake that proves the job token, and frames. Between two processes of one host the frames
// may leave the socket for memory that both share, and payloads stay where they are.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/base/counters.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/connection.h"
#include "xla_ffi/transport/lent_memory.h"
#include "xla_ffi/transport/shared_ring.h"
#include "xla_ffi/transport/tcp_address.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/handshake.h"

namespace jaxhetero {

// What every connection of a process has in common.
struct TcpContext {
  TcpContext(EventLoop& loop, Bytes token, bool checksums = false)
      : loop(loop), token(std::move(token)), checksums(checksums) {}
  // A copy would end the lent_memory that it has in common with this.
  TcpContext(const TcpContext&) = delete;
  TcpContext& operator=(const TcpContext&) = delete;
  ~TcpContext() { lent_memory->end(); }

  EventLoop& loop;
  Bytes token;
  // Send one with every frame, and take no chunk without one.
  bool checksums;
  // Where connections that we make come from: the address of one interface. Otherwise the routes decide.
  std::optional<TcpAddress> source = std::nullopt;
  std::shared_ptr<Counters> counters = std::make_shared<Counters>();
  // What its connections lend lies here.
  std::shared_ptr<LentMemory> lent_memory = std::make_shared<LentMemory>();
  // What they had lent when they ended, and the peer had not read, for as long as it might.
  std::vector<std::shared_ptr<const void>> unread = {};
};

class TcpConnection final : public Connection, public std::enable_shared_from_this<TcpConnection> {
 public:
  // Connects, proves, and calls owner.on_open; or owner.on_close when that failed or took longer than `patience`.
  static std::shared_ptr<TcpConnection> connect(TcpContext& context, const TcpAddress& address, ConnectionOwner& owner,
                                                std::chrono::milliseconds patience);
  // The other side of that, for a socket that was just accepted. `admission` is dropped once the peer has proved
  // itself.
  static std::shared_ptr<TcpConnection> accept(TcpContext& context, Fd socket, const TcpAddress& peer,
                                               ConnectionOwner& owner, std::shared_ptr<void> admission);

  // Offers the peer to go on in shared memory, if it is on this host; for the side that connected, once. What the peer
  // cannot reach it leaves alone, and the socket carries on.
  void offer_memory();

  void send(OutFrame frame) override;
  [[nodiscard]] uint64_t queued_frame_count() const override { return queued_frame_count_; }
  [[nodiscard]] uint64_t written_frame_count() const override { return written_frame_count_; }
  void close() override;
  void close_after_flush() override;
  void close_with(OutFrame last) override;
  [[nodiscard]] const std::string& peer() const override { return peer_; }
  [[nodiscard]] const std::string& peer_host() const override { return peer_host_; }
  // What has gone over it either way: what was received, and what the peer's host has acknowledged.
  [[nodiscard]] uint64_t passed_bytes() const;

 private:
  enum class Phase : uint8_t { kConnecting, kHandshake, kOpen, kFlushing, kClosed };

  TcpConnection(TcpContext& context, const TcpAddress& peer, ConnectionOwner& owner);
  void start(uint32_t epoll_events, std::chrono::milliseconds patience);
  void on_events(uint32_t epoll_events);
  void finish_connecting();

  Status begin_handshake(Handshake::Side side);
  void read_handshake();
  void open();

  // In tcp_shared_memory.cc.
  [[nodiscard]] bool is_on_this_host() const;
  Status take_offer();
  void share_lent_memory();
  void send_shared();
  Status take_shared();
  Status borrow_memory();
  Status take_reads();
  void leave_socket();
  void hear_calls();
  void call_peer();
  size_t receive_shared(std::span<const iovec> pieces);
  void release_read();
  size_t transmit_shared();
  void lend(OutFrame& frame);
  void drop_returned();
  Status take_lent();

  void read_frames();
  size_t receive(std::span<const iovec> pieces);
  void consume(size_t bytes);
  Status begin_frame();
  Status find_place();
  Status finish_frame();
  void discard_input();

  void write_queued();
  void collect_output();
  size_t transmit();
  void wait_for_room(bool waits);
  void finish_flushing();
  void end(const Status& why);
  void send_raw(std::span<const std::byte> bytes);

  TcpContext& context_;
  ConnectionOwner* owner_;
  std::string peer_;
  std::string peer_host_;
  Fd socket_;
  Phase phase_ = Phase::kClosed;
  EventLoop::TimerId deadline_ = 0;
  std::shared_ptr<void> admission_;

  std::optional<Handshake> handshake_;  // until it is done

  // Shared memory. Each direction moves there for itself, behind the frame that says so; from then on what comes over
  // the socket is only calls to look.
  std::unique_ptr<SharedRing> shared_;
  Bytes offer_bytes_;
  uint64_t last_socket_frame_ = 0;  // the number of that frame of ours; 0 without one
  bool sends_shared_ = false;
  bool receives_shared_ = false;
  bool owes_call_ = false;  // the peer would take it for a frame
  Status hung_up_;          // what the socket says; there may be more in the memory

  struct Lent {
    uint64_t written_bytes;  // of the channel, when the frame was in it
    size_t bytes;
    std::shared_ptr<const void> owner;
  };
  bool lends_ = false;  // the peer reads our lent_memory
  std::deque<Lent> lent_;
  std::shared_ptr<const BorrowedMemory> borrowed_memory_;

  EncodedHeader header_bytes_{};
  size_t header_received_ = 0;
  FrameHeader header_;       // of the frame whose payload is coming in
  uint32_t checksum_ = 0;    // of what came of that frame
  std::vector<iovec> into_;  // what is still to be filled of that payload
  size_t into_begin_ = 0;    // first piece of into_ that is not full
  bool in_payload_ = false;

  std::deque<OutFrame> queue_;
  size_t front_written_ = 0;
  std::vector<iovec> output_;
  bool flush_planned_ = false;
  bool waits_for_room_ = false;
  uint64_t queued_frame_count_ = 0;
  uint64_t written_frame_count_ = 0;
  uint64_t received_bytes_ = 0;
  uint64_t sent_bytes_ = 0;
};

}  // namespace jaxhetero
