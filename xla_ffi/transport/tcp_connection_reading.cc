// How a connection reads its frames.
#include <sys/socket.h>
#include <sys/uio.h>

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

void TcpConnection::read_frames() {
  const uint64_t before = received_bytes_;
  while (phase_ == Phase::kOpen) {
    if (received_bytes_ - before >= kTurnBytes) {
      // epoll reports a readable socket again by itself, and knows nothing of what was taken off it.
      if ((receives_off_socket() || seal_) && !std::exchange(read_planned_, true)) {
        context_.loop.post([self = shared_from_this()] {
          self->read_planned_ = false;
          self->read_frames();
        });
      }
      return;
    }
    std::array<iovec, kMaxPieces + 1> pieces;
    const auto wanted = std::span(pieces).first(collect_input(pieces));
    const bool from_carrier = receives_off_socket();
    const Result<size_t> got = from_carrier ? carrier_->read(wanted)
                               : seal_      ? read_sealed(wanted)
                                            : read_socket(wanted);
    if (!got.ok()) return end(got.status());
    if (got.value() == 0) return;
    received_bytes_ += got.value();
    context_.counters->received_bytes += got.value();
    consume(got.value());
    if (from_carrier) {
      carrier_->release_read();
      if (phase_ == Phase::kOpen) carrier_->wake_writer();
    }
    if (!receives_off_socket() && !seal_ && got.value() < total_bytes(wanted)) return;  // the socket is empty
  }
}

// The memory for the next bytes: the rest of the current payload, and the header of the frame behind it. Returns the
// number of pieces.
size_t TcpConnection::collect_input(std::span<iovec> pieces) {
  Incoming& in = incoming_;
  size_t count = 0;
  if (in.in_payload) {
    const auto rest = std::span(in.into).subspan(in.first_piece);
    count = std::min(rest.size(), kMaxPieces);
    std::ranges::copy(rest.first(count), pieces.begin());
    if (count < rest.size()) return count;
  }
  pieces[count++] = {in.header_bytes.data() + in.header_received_bytes, kHeaderBytes - in.header_received_bytes};
  return count;
}

// Returns 0 if there are no bytes now.
Result<size_t> TcpConnection::read_socket(std::span<const iovec> pieces) {
  ssize_t got = 0;
  do {
    got = ::readv(socket_.get(), pieces.data(), static_cast<int>(pieces.size()));
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno == EAGAIN) return size_t{0};
  if (got <= 0) return Status(Code::kInternal, got == 0 ? "it closed the connection" : std::strerror(errno));
  return static_cast<size_t>(got);
}

Result<size_t> TcpConnection::read_sealed(std::span<const iovec> pieces) {
  while (true) {
    Result<size_t> opened = seal_->open(pieces);
    if (opened.status().code() == Code::kProtocol) ++context_.counters->checksum_mismatch_count;
    if (!opened.ok() || *opened > 0) return opened;
    const std::span<std::byte> room = seal_->room();
    const std::array<iovec, 1> into = {iovec{room.data(), room.size()}};
    Result<size_t> got = read_socket(into);
    if (!got.ok() || *got == 0) return got;
    seal_->note_received(*got);
  }
}

void TcpConnection::consume(size_t bytes) {
  Incoming& in = incoming_;
  Status status;
  if (in.in_payload) {
    const size_t payload_left = total_bytes(std::span(in.into).subspan(in.first_piece));
    const size_t payload_part = std::min(bytes, payload_left);
    in.first_piece = cut_front(in.into, in.first_piece, payload_part, [&in](std::span<const std::byte> part) {
      if (in.header.has_checksum) in.checksum = crc32c(in.checksum, part);
    });
    bytes -= payload_part;
    if (payload_part == payload_left) {
      in.in_payload = false;
      const bool from_socket = !receives_off_socket();
      status = finish_frame();
      if (from_socket && receives_off_socket()) {  // what came behind is no header
        carrier_->take_from_socket(std::span(in.header_bytes).first(std::exchange(bytes, 0)));
        if (seal_) carrier_->take_from_socket(seal_->rest());
      }
    }
  }
  in.header_received_bytes += bytes;
  if (status.ok() && phase_ == Phase::kOpen && in.header_received_bytes == kHeaderBytes) status = start_frame();
  if (!status.ok() && phase_ == Phase::kOpen) end(status);
}

Status TcpConnection::start_frame() {
  Incoming& in = incoming_;
  in.header_received_bytes = 0;
  Result<FrameHeader> header = decode(in.header_bytes);
  if (!header.ok()) return header.status();
  in.header = *header;
  if (context_.checksums && carries_data(in.header.type) && !in.header.has_checksum) {
    return {Code::kProtocol, "it sends no checksums, which this job asks for"};
  }
  if (carrier_) {
    if (const auto payload = carrier_->borrow(in.header)) return take_lent(payload);
  }
  if (in.header.is_lent) return {Code::kProtocol, "it lends memory that it has not offered"};
  in.checksum = in.header.has_checksum ? start_checksum(in.header_bytes) : 0;
  if (Status status = find_place(); !status.ok() || phase_ != Phase::kOpen) return status;
  if (in.header.payload_bytes == 0) return finish_frame();
  in.in_payload = true;
  return {};
}

Status TcpConnection::find_place() {
  Incoming& in = incoming_;
  in.into.clear();
  in.first_piece = 0;
  if (is_of_carrier(in.header.type)) {
    carrier_payload_.resize(in.header.payload_bytes);
    in.into = as_pieces(carrier_payload_);
  } else if (Status status = owner_->on_header(*this, in.header, in.into); !status.ok()) {
    return status;
  }
  const bool fits = phase_ != Phase::kOpen || total_bytes(in.into) == in.header.payload_bytes;
  return fits ? Status() : Status(Code::kInternal, "a frame has no place for its payload");
}

Status TcpConnection::finish_frame() {
  const FrameHeader& header = incoming_.header;
  if (header.has_checksum && incoming_.checksum != header.checksum) {
    ++context_.counters->checksum_mismatch_count;
    return {Code::kProtocol, "a frame of type " + std::to_string(static_cast<int>(header.type)) + " and " +
                                 std::to_string(header.payload_bytes) +
                                 " bytes came damaged: its checksum does not match"};
  }
  if (is_of_carrier(header.type)) return finish_carrier_frame();
  return owner_->on_frame(*this, header);
}

Status TcpConnection::finish_carrier_frame() {
  const FrameType type = incoming_.header.type;
  if (!carrier_) carrier_ = make_carrier(type);
  if (!carrier_->handles(type)) return {Code::kProtocol, "it mixed shared memory with a fabric"};
  Carrier::Replies replies;
  if (Status status = carrier_->on_frame(type, carrier_payload_, replies); !status.ok()) return status;
  if (replies.last_on_socket.has_value()) {
    send(std::move(*replies.last_on_socket));
    last_socket_frame_ = queued_frame_count_;
  }
  if (replies.next.has_value()) send(std::move(*replies.next));
  // That there is room for what waits may have come together with this frame, as bytes that nobody looks at any more.
  if (receives_off_socket()) context_.loop.post([self = shared_from_this()] { self->write_queued(); });
  return {};
}

Status TcpConnection::take_lent(const std::shared_ptr<const std::byte>& payload) {
  const FrameHeader& header = incoming_.header;
  received_bytes_ += header.payload_bytes;
  context_.counters->received_bytes += header.payload_bytes;
  Result<bool> is_read = owner_->on_lent(*this, header, payload);
  if (!is_read.ok() || *is_read || phase_ != Phase::kOpen) return is_read.status();
  if (Status status = find_place(); !status.ok() || phase_ != Phase::kOpen) return status;
  size_t offset = 0;
  for (const iovec& piece : incoming_.into) {
    std::memcpy(piece.iov_base, payload.get() + offset, piece.iov_len);
    offset += piece.iov_len;
  }
  return finish_frame();
}

void TcpConnection::discard_input() {
  std::array<std::byte, 16384> waste;
  const ssize_t got = ::recv(socket_.get(), waste.data(), waste.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) end({});
}

}  // namespace jaxhetero
