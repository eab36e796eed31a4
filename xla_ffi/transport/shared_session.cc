// What a connection does in memory that the two processes share: agreeing on it, leaving the socket for the channel in
// it, and lending payloads that lie there.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

constexpr size_t kLeastLentBytes = 4096;  // less is copied sooner than found

}  // namespace

bool TcpConnection::is_on_this_host() const {
  TcpAddress own;
  TcpAddress peer;
  own.length = peer.length = sizeof own.storage;
  return getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&own.storage), &own.length) == 0 &&
         getpeername(socket_.get(), reinterpret_cast<sockaddr*>(&peer.storage), &peer.length) == 0 &&
         own.host() == peer.host();
}

void TcpConnection::offer_memory() {
  if (phase_ != Phase::kOpen || shared_ || !is_on_this_host()) return;
  Result<std::unique_ptr<SharedRing>> channel = SharedRing::create();
  if (!channel.ok()) return;
  shared_ = std::move(*channel);
  share_lent_memory();
  send(OutFrame::control(FrameType::kShare, encode(shared_->offer())));
}

Status TcpConnection::take_offer() {
  Result<SharedOffer> offer = decode_shared_offer(offer_bytes_);
  if (!offer.ok()) return offer.status();
  if (shared_) return {Code::kProtocol, "it offered memory that is shared already"};
  Result<std::unique_ptr<SharedRing>> channel = SharedRing::open(*offer);
  if (!channel.ok()) return {};
  shared_ = std::move(*channel);
  share_lent_memory();
  send_shared();
  return {};
}

// Where that fails, and where every byte is to have a checksum, payloads go through the channel.
void TcpConnection::share_lent_memory() {
  if (context_.checksums) return;
  [[maybe_unused]] const Status status = context_.lent_memory->share();
}

void TcpConnection::send_shared() {
  const std::optional<SharedOffer> offer = context_.lent_memory->offer();
  send(OutFrame::control(FrameType::kShared, offer.has_value() ? encode(*offer) : Bytes()));
  last_socket_frame_ = queued_frame_count_;
}

// The peer's frames come through the memory from now on.
Status TcpConnection::take_shared() {
  if (!shared_ || receives_shared_) return {Code::kProtocol, "it moved to shared memory that there is not"};
  receives_shared_ = true;
  if (last_socket_frame_ == 0) send_shared();
  shared_->close_descriptor();
  ++context_.counters->shared_connection_count;
  return offer_bytes_.empty() ? Status() : borrow_memory();
}

Status TcpConnection::borrow_memory() {
  Result<SharedOffer> offer = decode_shared_offer(offer_bytes_);
  if (!offer.ok()) return offer.status();
  Result<std::shared_ptr<const BorrowedMemory>> lent_memory = BorrowedMemory::open(*offer);
  if (!lent_memory.ok()) return {};
  borrowed_memory_ = std::move(*lent_memory);
  send(OutFrame::control(FrameType::kReads, {}));
  return {};
}

Status TcpConnection::take_reads() {
  if (!offer_bytes_.empty()) return {Code::kProtocol, "malformed answer to an offer of memory"};
  if (last_socket_frame_ == 0) return {Code::kProtocol, "it reads memory that it was not offered"};
  lends_ = true;
  return {};
}

void TcpConnection::leave_socket() {
  wait_for_room(false);
  sends_shared_ = true;
  if (owes_call_) call_peer();
}

// The socket says that there may be something in the shared memory, or room; or that the peer is gone.
void TcpConnection::hear_calls() {
  std::array<std::byte, 64> calls;
  const ssize_t got = ::recv(socket_.get(), calls.data(), calls.size(), MSG_DONTWAIT);
  if (got == 0) hung_up_ = {Code::kInternal, "it closed the connection"};
  if (got < 0 && errno != EAGAIN && errno != EINTR) hung_up_ = {Code::kInternal, std::strerror(errno)};
  if (waits_for_room_) write_queued();
}

// A full socket will wake it as well.
void TcpConnection::call_peer() {
  owes_call_ = !sends_shared_;
  if (owes_call_) return;
  const std::byte call{};
  [[maybe_unused]] const ssize_t sent = ::send(socket_.get(), &call, sizeof call, MSG_NOSIGNAL | MSG_DONTWAIT);
}

size_t TcpConnection::receive_shared(std::span<const iovec> pieces) {
  do {
    Result<size_t> got = shared_->read(pieces);
    if (!got.ok()) {
      end(got.status());
      return 0;
    }
    if (*got > 0) return *got;
    if (!hung_up_.ok()) {
      end(hung_up_);
      return 0;
    }
  } while (!shared_->sleep_for_bytes());
  return 0;
}

// Only now: the frame may have been about something that is lent until it is read.
void TcpConnection::release_read() {
  shared_->release();
  if (phase_ == Phase::kOpen && shared_->writer_slept()) call_peer();
}

size_t TcpConnection::transmit_shared() {
  do {
    Result<size_t> sent = shared_->write(output_);
    if (!sent.ok()) {
      end(sent.status());
      return 0;
    }
    if (*sent > 0) {
      if (shared_->reader_slept()) call_peer();
      return *sent;
    }
  } while (!shared_->sleep_for_room());
  return 0;
}

// Leaves the payload where it is, if the peer can read it there.
void TcpConnection::lend(OutFrame& frame) {
  if (frame.payload_bytes < kLeastLentBytes) return;
  output_.clear();
  frame.append_payload(output_);
  if (output_.size() != 1) return;
  const std::optional<uint32_t> place = context_.lent_memory->place_of(bytes_of(output_.front()));
  if (!place.has_value()) return;
  set_place(frame.header, *place);
  frame.lent_bytes = std::exchange(frame.payload_bytes, 0);
  frame.payload = {};
  frame.leaves = nullptr;
}

// What the peer has read is not lent any more.
void TcpConnection::drop_returned() {
  if (lent_.empty()) return;
  const uint64_t read_bytes = shared_->written_bytes() - shared_->unread_bytes();
  while (!lent_.empty() && lent_.front().written_bytes <= read_bytes) lent_.pop_front();
}

Status TcpConnection::take_lent() {
  std::optional<std::span<const std::byte>> payload;
  if (borrowed_memory_) payload = borrowed_memory_->at(header_.place, header_.payload_bytes);
  if (!payload.has_value()) return {Code::kProtocol, "it lends memory that it has not offered"};
  received_bytes_ += payload->size();
  context_.counters->received_bytes += payload->size();
  Result<bool> is_read = owner_->on_lent(*this, header_, {borrowed_memory_, payload->data()});
  if (!is_read.ok() || *is_read || phase_ != Phase::kOpen) return is_read.status();
  if (Status status = find_place(); !status.ok() || phase_ != Phase::kOpen) return status;
  for (const iovec& piece : into_) {
    std::memcpy(piece.iov_base, payload->data(), piece.iov_len);
    payload = payload->subspan(piece.iov_len);
  }
  return finish_frame();
}

}  // namespace jaxhetero
