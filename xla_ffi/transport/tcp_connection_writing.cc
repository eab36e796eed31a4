// How a connection writes its frames.
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/counters.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/wire/checksum.h"

namespace jaxhetero {
namespace {

constexpr size_t kLargeFrameBytes = 4096;

void add_checksum(OutFrame& frame) {
  std::vector<iovec> pieces;
  frame.append_payload(pieces);
  uint32_t checksum = start_checksum(frame.header);
  for (const iovec& piece : pieces) checksum = crc32c(checksum, bytes_of(piece));
  set_checksum(frame.header, checksum);
}

// Copies the payload, so that the frame no longer needs the memory it was to be sent from.
void own_payload(OutFrame& frame) {
  std::vector<iovec> pieces;
  frame.append_payload(pieces);
  auto copy = std::make_shared<Bytes>();
  copy->reserve(frame.payload_bytes);
  for (const iovec& piece : pieces) {
    const auto bytes = bytes_of(piece);
    copy->insert(copy->end(), bytes.begin(), bytes.end());
  }
  frame.leaves = nullptr;
  frame.payload = *copy;
  frame.owner = std::move(copy);
}

}  // namespace

void TcpConnection::send(OutFrame frame) {
  if (phase_ != Phase::kOpen) return;
  if (context_.checksums) add_checksum(frame);
  if (carrier_) carrier_->lend(frame);
  queue_.push_back(std::move(frame));
  ++queued_frame_count_;
  if (flush_planned_ || waits_for_room_) return;
  // At the end of the turn, so that one system call writes the frames that several callbacks have queued.
  flush_planned_ = true;
  context_.loop.at_end_of_turn([self = shared_from_this()] {
    self->flush_planned_ = false;
    self->write_queued();
  });
}

uint64_t TcpConnection::passed_bytes() const {
  uint64_t under_way = 0;
  int unacknowledged = 0;
  if (sends_off_socket()) {
    under_way = carrier_->unread_bytes();
  } else if (ioctl(socket_.get(), SIOCOUTQ, &unacknowledged) == 0) {
    under_way = static_cast<uint64_t>(unacknowledged);
  }
  return received_bytes_ + sent_bytes_ - std::min(sent_bytes_, under_way);
}

void TcpConnection::write_queued() {
  if (carrier_) carrier_->drop_read();
  for (size_t turn_bytes = 0; !queue_.empty();) {
    if (!may_write()) return;
    if (turn_bytes >= kTurnBytes) {
      // epoll reports a socket with room again by itself.
      if (sends_off_socket()) context_.loop.post([self = shared_from_this()] { self->write_queued(); });
      break;
    }
    collect_output();
    const Result<size_t> written = sends_off_socket() ? carrier_->write(output_, queue_.front())
                                   : seal_            ? write_sealed()
                                                      : write_socket(output_);
    if (!written.ok()) return end_after_reading(written.status());
    if (written.value() == 0) break;
    turn_bytes += written.value();
    pop_written(written.value());
  }
  if (!may_write()) return;
  wait_for_room(!queue_.empty());
  tell_written();
}

void TcpConnection::tell_written() {
  if (phase_ == Phase::kFlushing && has_flushed()) finish_flushing();
  const uint64_t reached = written_frame_count_ + delivered_frame_count();
  if (phase_ == Phase::kOpen && reached > std::exchange(told_frame_count_, reached)) owner_->on_written(*this);
}

// Returns 0 if there is no room now.
Result<size_t> TcpConnection::write_socket(std::span<iovec> pieces) {
  msghdr message{};
  message.msg_iov = pieces.data();
  message.msg_iovlen = pieces.size();
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0 && errno != EAGAIN) return Status(Code::kInternal, std::strerror(errno));
  return static_cast<size_t>(std::max<ssize_t>(sent, 0));
}

// A large frame ends its record, so that nobody waits for the next frame to read it. Small ones share a record.
Result<size_t> TcpConnection::write_sealed() {
  if (seal_->unsent().empty()) {
    const size_t front_bytes = kHeaderBytes + queue_.front().payload_bytes;
    const bool is_large = front_bytes >= kLargeFrameBytes;
    if (Status status = seal_->close(output_, is_large ? front_bytes - front_written_bytes_ : Seal::kMostBytes);
        !status.ok()) {
      return status;
    }
  }
  const std::span<const std::byte> unsent = seal_->unsent();
  std::array<iovec, 1> piece = {iovec{const_cast<std::byte*>(unsent.data()), unsent.size()}};  // only read
  const Result<size_t> sent = write_socket(piece);
  return sent.ok() ? seal_->note_sent(sent.value()) : sent;
}

void TcpConnection::pop_written(size_t bytes) {
  sent_bytes_ += bytes;
  context_.counters->sent_bytes += bytes;
  front_written_bytes_ += bytes;
  while (!queue_.empty() && front_written_bytes_ >= kHeaderBytes + queue_.front().payload_bytes) {
    OutFrame& frame = queue_.front();
    front_written_bytes_ -= kHeaderBytes + frame.payload_bytes;
    sent_bytes_ += frame.lent_bytes;
    context_.counters->sent_bytes += frame.lent_bytes;
    context_.counters->lent_bytes += frame.lent_bytes;
    if (carrier_) carrier_->keep_lent(frame);
    queue_.pop_front();
    ++written_frame_count_;
  }
  if (!sends_off_socket() && last_socket_frame_ > 0 && written_frame_count_ == last_socket_frame_) {
    wait_for_room(false);
    carrier_->leave_socket();
  }
}

void TcpConnection::wait_for_room(bool waits) {
  if (waits == std::exchange(waits_for_room_, waits) || sends_off_socket()) return;
  const Status status = context_.loop.change(socket_.get(), waits ? EPOLLIN | EPOLLOUT : EPOLLIN);
  if (!status.ok()) end(status);
}

void TcpConnection::collect_output() {
  output_.clear();
  uint64_t number = written_frame_count_;
  for (OutFrame& frame : queue_) {
    output_.push_back({frame.header.data(), frame.header.size()});
    frame.append_payload(output_);
    if (output_.size() >= kMaxPieces || ++number == last_socket_frame_) break;
  }
  const size_t written_pieces = cut_front(output_, 0, front_written_bytes_, [](std::span<const std::byte>) {});
  output_.erase(output_.begin(), output_.begin() + static_cast<std::ptrdiff_t>(written_pieces));
  if (output_.size() > kMaxPieces) output_.resize(kMaxPieces);
}

void TcpConnection::close_with(OutFrame last) {
  if (phase_ != Phase::kOpen) {
    close();
    return;
  }
  if (carrier_) carrier_->forget_unwritten();
  // A frame that is half sent must be completed, or the peer would take `last` for the rest of it; and so must those of
  // a record that is half sent.
  const size_t begun_bytes = front_written_bytes_ + (seal_ ? seal_->unsent_frame_bytes() : 0);
  size_t kept = 0;
  for (size_t bytes = 0; bytes < begun_bytes; bytes += kHeaderBytes + queue_[kept++].payload_bytes) {
    own_payload(queue_[kept]);
  }
  queue_.resize(kept);
  queued_frame_count_ = written_frame_count_ + queue_.size();
  if (last_socket_frame_ > queued_frame_count_)
    last_socket_frame_ = 0;  // our kShared is dropped: we stay on the socket
  send(std::move(last));
  close_after_flush();
}

}  // namespace jaxhetero
