// A fabric under one connection: how two processes agree on it, and the frames that go over it as messages.
//
// The agreement, in frames of the connection's socket:
//   kFabric    the side that connected opened an endpoint, and a session there that only this connection knows.
//   kOnFabric  so did the other side. Its later frames are messages. The first side echoes kOnFabric, and its later
//              frames are messages as well.
//   kNoFabric  or it did not, and says why. Frames stay on the socket.
//
// A message carries frames, numbered from 1 on, as they would follow one another in a socket. Messages may come in any
// order. Each one tells how many the sender has consumed: this opens the window of the other side. As long as there is
// nothing to send, a message of number 0 tells it.
//
// When a side has written its last frame, it writes the number of its messages to the socket, and ends that: so the
// other side knows for what to wait. A connection that ends early writes the number of those that are delivered, and a
// process that dies writes none.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "xla_ffi/base/fd.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/fabric/endpoint.h"
#include "xla_ffi/transport/carrier.h"
#include "xla_ffi/transport/tcp_context.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

class FabricSession final : public Carrier, private FabricListener {
 public:
  // May end the connection, and with it the session.
  struct Callbacks {
    std::function<void()> on_progress;  // read() and write() are worth another try
    std::function<void(const Status&)> on_broken;
  };
  // `context` and `socket`, which is the connection's, outlive the session.
  FabricSession(TcpContext& context, const Fd& socket, Callbacks callbacks)
      : context_(context), loop_(context.loop), socket_(socket), callbacks_(std::move(callbacks)) {}
  ~FabricSession() override { close(); }
  FabricSession(const FabricSession&) = delete;
  FabricSession& operator=(const FabricSession&) = delete;

  // The kFabric frame to send; none if this process wants no fabric, or has none.
  std::optional<OutFrame> offer() override;
  [[nodiscard]] static bool handles_type(FrameType type) {
    return type == FrameType::kFabric || type == FrameType::kOnFabric || type == FrameType::kNoFabric;
  }
  [[nodiscard]] bool handles(FrameType type) const override { return handles_type(type); }
  Status on_frame(FrameType type, const Bytes& payload, Replies& replies) override;

  [[nodiscard]] bool sends() const override { return sends_; }
  [[nodiscard]] bool receives() const override { return receives_; }
  void leave_socket() override;

  Result<size_t> write(std::span<const iovec> pieces, const OutFrame& front) override;
  void forget_unwritten() override;
  Result<size_t> read(std::span<const iovec> pieces) override;
  void release_read() override {}
  void wake_writer() override;
  void drain_socket() override;
  void take_from_socket(std::span<const std::byte> bytes) override;
  [[nodiscard]] uint64_t undelivered_frame_count() const override;
  void finish() override;

  [[nodiscard]] bool lends() const override { return false; }
  std::shared_ptr<const std::byte> borrow(const FrameHeader& header) override;
  [[nodiscard]] uint64_t unread_bytes() const override;
  void close() override;

 private:
  // A message that is filled and not sent.
  struct Unsent {
    FabricSlot* slot;
    size_t bytes;         // in the slot; what is sent in place comes behind them
    size_t taken_bytes;   // of the connection's
    size_t payload_left;  // of the last frame in it, that the next message goes on with
    size_t frame_count;   // how many frames end in it
  };
  // One that was sent and whose send is not complete, or that of an earlier one.
  struct UnderWay {
    size_t frame_count;
    bool is_complete = false;
  };

  Status open(const std::string& provider);
  [[nodiscard]] FabricOffer own_offer() const;
  Status on_fabric(const Bytes& payload, Replies& replies);
  Status on_moved(const Bytes& payload, Replies& replies);
  Status take_offer(const FabricOffer& offer);

  Status fill(std::span<const iovec> pieces, const OutFrame& front);
  bool fill_in_place(FabricSlot& slot, const OutFrame& frame);
  Result<bool> post(FabricSlot& slot, size_t bytes, uint64_t number);
  void consume(size_t bytes);
  [[nodiscard]] Result<size_t> none_or_end() const;

  void on_message(FabricMessage message) override;
  void on_sent(uint64_t number) override;
  Status check(const FabricMessage& message) const;
  void on_progress() override;
  void on_broken(const Status& why) override;

  TcpContext& context_;
  EventLoop& loop_;  // the context's, which lives longer
  const Fd& socket_;
  const Callbacks callbacks_;

  std::shared_ptr<FabricEndpoint> endpoint_;
  uint64_t session_ = 0;  // ours
  FabricOffer peer_;
  fi::Address address_ = 0;  // the peer's
  bool sends_ = false;
  bool receives_ = false;
  bool has_finished_ = false;
  Status broken_;

  std::optional<Unsent> unsent_;
  size_t payload_left_ = 0;         // of the frame that the next message goes on with
  uint64_t sent_count_ = 0;         // the number of the last message that was sent
  uint64_t peer_consumed_ = 0;      // how many of them the peer has consumed
  std::deque<size_t> sent_bytes_;   // the sizes of the others
  uint64_t delivered_count_ = 0;    // how many of them are delivered, in their order
  std::deque<UnderWay> under_way_;  // the others

  std::map<uint64_t, FabricMessage> messages_;  // those that have come, keyed by number
  uint64_t consumed_ = 0;                       // how many messages are read
  uint64_t told_ = 0;                           // and of how many of them the peer was told
  size_t read_bytes_ = 0;                       // of the next message

  Status socket_end_;                                     // the end of the socket; ok while it has not ended
  std::array<std::byte, sizeof(uint64_t)> last_words_{};  // how many messages there are, as the socket tells at its end
  size_t last_word_bytes_ = 0;
  EventLoop::TimerId deadline_ = 0;  // by which they have come
};

}  // namespace jaxhetero
