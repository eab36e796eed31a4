#include "xla_ffi/transport/shared_session.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/transport/tcp_address.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

constexpr size_t kLeastLentBytes = 4096;  // below this size, copying is cheaper than lending

// Whether both ends of the socket have the same address.
bool is_on_this_host(const Fd& socket) {
  TcpAddress own;
  TcpAddress peer;
  own.length = peer.length = sizeof own.storage;
  return getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own.storage), &own.length) == 0 &&
         getpeername(socket.get(), reinterpret_cast<sockaddr*>(&peer.storage), &peer.length) == 0 &&
         own.host() == peer.host();
}

}  // namespace

// --- The agreement.

std::optional<OutFrame> SharedSession::offer() {
  if (!context_.shares_memory || !is_on_this_host(socket_)) return std::nullopt;
  Result<std::unique_ptr<SharedRing>> ring = SharedRing::create();
  if (!ring.ok()) return std::nullopt;
  adopt(std::move(*ring));
  return OutFrame::control(FrameType::kShare, encode(ring_->offer()));
}

Status SharedSession::on_frame(FrameType type, const Bytes& payload, Replies& replies) {
  if (type == FrameType::kShare) return on_share(payload, replies);
  if (type == FrameType::kShared) return on_shared(payload, replies);
  return on_reads(payload);
}

Status SharedSession::on_share(const Bytes& payload, Replies& replies) {
  Result<SharedOffer> offer = decode_shared_offer(payload);
  if (!offer.ok()) return offer.status();
  if (ring_) return {Code::kProtocol, "it offered shared memory twice"};
  Result<std::unique_ptr<SharedRing>> ring = SharedRing::open(*offer);
  if (!ring.ok()) return {};
  adopt(std::move(*ring));
  replies.last_on_socket = announce();
  return {};
}

Status SharedSession::on_shared(const Bytes& payload, Replies& replies) {
  if (!ring_ || receives_) return {Code::kProtocol, "it moved to shared memory twice, or without an offer"};
  receives_ = true;
  if (!has_announced_) replies.last_on_socket = announce();
  ring_->close_descriptor();
  ++context_.counters->shared_connection_count;
  if (payload.empty()) return {};
  Result<SharedOffer> offer = decode_shared_offer(payload);
  if (!offer.ok()) return offer.status();
  Result<std::shared_ptr<const BorrowedMemory>> memory = BorrowedMemory::open(*offer);
  if (!memory.ok()) return {};
  borrowed_memory_ = std::move(*memory);
  replies.next = OutFrame::control(FrameType::kReads, {});
  return {};
}

Status SharedSession::on_reads(const Bytes& payload) {
  if (!payload.empty()) return {Code::kProtocol, "malformed answer to an offer of memory"};
  if (!has_announced_) return {Code::kProtocol, "it reads memory that it was not offered"};
  lends_ = true;
  return {};
}

void SharedSession::adopt(std::unique_ptr<SharedRing> ring) {
  ring_ = std::move(ring);
  if (context_.checksums || !context_.lends) return;  // checksums want every byte to go through the ring
  // If this fails, payloads go through the ring as well.
  [[maybe_unused]] const Status status = context_.lent_memory->share();
}

OutFrame SharedSession::announce() {
  has_announced_ = true;
  const std::optional<SharedOffer> offer = context_.lent_memory->offer();
  return OutFrame::control(FrameType::kShared, offer.has_value() ? encode(*offer) : Bytes());
}

// --- Frames in the ring.

void SharedSession::leave_socket() {
  sends_ = true;
  if (owes_wakeup_) wake_peer();
}

Result<size_t> SharedSession::write(std::span<const iovec> pieces, const OutFrame& /*front*/) {
  do {
    Result<size_t> written = ring_->write(pieces);
    if (!written.ok()) return written;
    if (*written > 0) {
      if (ring_->reader_slept()) wake_peer();
      return written;
    }
  } while (!ring_->sleep_for_room());
  return size_t{0};
}

Result<size_t> SharedSession::read(std::span<const iovec> pieces) {
  do {
    Result<size_t> got = ring_->read(pieces);
    if (!got.ok() || *got > 0) return got;
    if (!socket_end_.ok()) return socket_end_;
  } while (!ring_->sleep_for_bytes());
  return size_t{0};
}

void SharedSession::wake_writer() {
  if (ring_->writer_slept()) wake_peer();
}

void SharedSession::wake_peer() {
  owes_wakeup_ = !sends_;
  if (owes_wakeup_) return;
  const std::byte wakeup{};
  // If the socket is full, its unread bytes wake the peer.
  [[maybe_unused]] const ssize_t sent = ::send(socket_.get(), &wakeup, sizeof wakeup, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void SharedSession::drain_socket() {
  std::array<std::byte, 64> wakeups;
  const ssize_t got = ::recv(socket_.get(), wakeups.data(), wakeups.size(), MSG_DONTWAIT);
  if (got == 0) socket_end_ = {Code::kInternal, "it closed the connection"};
  if (got < 0 && errno != EAGAIN && errno != EINTR) socket_end_ = {Code::kInternal, std::strerror(errno)};
}

// --- Payloads that are lent.

void SharedSession::lend(OutFrame& frame) {
  if (!lends_ || frame.payload_bytes < kLeastLentBytes) return;
  pieces_.clear();
  frame.append_payload(pieces_);
  if (pieces_.size() != 1) return;
  const std::optional<uint32_t> place = context_.lent_memory->place_of(bytes_of(pieces_.front()));
  if (!place.has_value()) return;
  set_place(frame.header, *place);
  frame.lent_bytes = std::exchange(frame.payload_bytes, 0);
  frame.payload = {};
  frame.leaves = nullptr;
}

void SharedSession::keep_lent(OutFrame& frame) {
  if (frame.lent_bytes == 0 || !frame.owner) return;
  lent_.push_back({ring_->written_bytes(), frame.lent_bytes, std::move(frame.owner)});
}

void SharedSession::drop_read() {
  if (lent_.empty()) return;
  const uint64_t read_bytes = ring_->written_bytes() - ring_->unread_bytes();
  while (!lent_.empty() && lent_.front().written_bytes <= read_bytes) lent_.pop_front();
}

void SharedSession::close() {
  for (Lent& lent : lent_) context_.unread.push_back(std::move(lent.owner));
  lent_.clear();
}

std::shared_ptr<const std::byte> SharedSession::borrow(const FrameHeader& header) {
  if (!header.is_lent || !borrowed_memory_) return nullptr;
  const std::optional<std::span<const std::byte>> payload = borrowed_memory_->at(header.place, header.payload_bytes);
  if (!payload.has_value()) return nullptr;
  return {borrowed_memory_, payload->data()};
}

uint64_t SharedSession::unread_bytes() const {
  uint64_t unread = ring_->unread_bytes();
  const uint64_t read_bytes = ring_->written_bytes() - unread;
  for (const Lent& lent : lent_) unread += lent.written_bytes > read_bytes ? lent.bytes : 0;
  return unread;
}

}  // namespace jaxhetero
