#include "xla_ffi/transport/tcp_connection.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/checksum.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {
namespace {

constexpr std::chrono::milliseconds kHandshakePatience{5000};
constexpr std::chrono::milliseconds kFlushPatience{2000};
constexpr size_t kMaxPieces = 256;              // of one sendmsg or readv; IOV_MAX is 1024
constexpr size_t kTurnBytes = size_t{1} << 20;  // what one connection may move before the others have their turn

std::string error_text(int error) { return std::strerror(error); }

// Drops `bytes` from the front of `pieces[begin..]`; returns the new begin. `checksum`, if any, goes over them first.
size_t advance(std::vector<iovec>& pieces, size_t begin, size_t bytes, uint32_t* checksum = nullptr) {
  while (bytes > 0) {
    iovec& piece = pieces[begin];
    const size_t part = std::min(bytes, piece.iov_len);
    if (checksum != nullptr) *checksum = crc32c(*checksum, bytes_of(piece).first(part));
    piece.iov_base = static_cast<std::byte*>(piece.iov_base) + part;
    piece.iov_len -= part;
    bytes -= part;
    if (piece.iov_len == 0) ++begin;
  }
  return begin;
}

void add_checksum(OutFrame& frame) {
  std::vector<iovec> pieces;
  frame.append_payload(pieces);
  uint32_t checksum = start_checksum(frame.header);
  for (const iovec& piece : pieces) checksum = crc32c(checksum, bytes_of(piece));
  set_checksum(frame.header, checksum);
}

// Makes the frame independent of the memory that it was to be read from.
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

// Frames of the connection itself, of which its owner hears nothing.
bool is_about_memory(FrameType type) {
  return type == FrameType::kShare || type == FrameType::kShared || type == FrameType::kReads;
}

void set_option(int fd, int level, int name) {
  const int on = 1;
  setsockopt(fd, level, name, &on, sizeof on);  // an optimisation: a socket without it still works
}

// What is under way is bounded by our own window, and flows pause whenever others are behind. Congestion control that
// paces by what a flow sent lately, as bbr does, takes the pauses for the path and slows down: six times, see
// docs/notebook/connections.md. Where cubic is not to be had the system's choice stays.
void set_congestion_control(int fd) {
  constexpr std::string_view kName = "cubic";
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kName.data(), kName.size());
}

// The error number of that, or 0. The port is chosen when we connect: so many connections can share one.
int bind_source(int fd, const TcpAddress& source) {
  set_option(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT);
  const auto* address = reinterpret_cast<const sockaddr*>(&source.storage);
  return ::bind(fd, address, source.length) == 0 ? 0 : errno;
}

}  // namespace

TcpConnection::TcpConnection(TcpContext& context, const TcpAddress& peer, ConnectionOwner& owner)
    : context_(context), owner_(&owner), peer_(peer.text()), peer_host_(peer.host()) {}

std::shared_ptr<TcpConnection> TcpConnection::connect(TcpContext& context, const TcpAddress& address,
                                                      ConnectionOwner& owner, std::chrono::milliseconds patience) {
  const std::shared_ptr<TcpConnection> self(new TcpConnection(context, address, owner));
  self->phase_ = Phase::kConnecting;
  self->socket_ = Fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  int error = self->socket_.valid() ? 0 : errno;
  if (error == 0 && context.source.has_value()) error = bind_source(self->socket_.get(), *context.source);
  if (error == 0 &&
      ::connect(self->socket_.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length) != 0 &&
      errno != EINPROGRESS) {
    error = errno;
  }
  if (error != 0) {
    // The owner does not know this connection yet: let it hear of the failure after we have returned.
    context.loop.at_end_of_turn([self, error] { self->end({Code::kInternal, error_text(error)}); });
    return self;
  }
  self->start(EPOLLOUT, patience);
  return self;
}

std::shared_ptr<TcpConnection> TcpConnection::accept(TcpContext& context, Fd socket, const TcpAddress& peer,
                                                     ConnectionOwner& owner, std::shared_ptr<void> admission) {
  const std::shared_ptr<TcpConnection> self(new TcpConnection(context, peer, owner));
  self->socket_ = std::move(socket);
  self->admission_ = std::move(admission);
  set_option(self->socket_.get(), IPPROTO_TCP, TCP_NODELAY);
  set_congestion_control(self->socket_.get());
  if (const Status status = self->begin_handshake(Handshake::Side::kServer); !status.ok()) {
    context.loop.at_end_of_turn([self, status] { self->end(status); });
    return self;
  }
  self->start(EPOLLIN, kHandshakePatience);
  return self;
}

void TcpConnection::start(uint32_t epoll_events, std::chrono::milliseconds patience) {
  const auto self = shared_from_this();
  deadline_ = context_.loop.after(patience, [self] {
    self->end({Code::kInternal, self->phase_ == Phase::kConnecting ? "no answer" : "no answer in the handshake"});
  });
  const Status status =
      context_.loop.watch(socket_.get(), epoll_events, [self](uint32_t events) { self->on_events(events); });
  if (!status.ok()) context_.loop.at_end_of_turn([self, status] { self->end(status); });
}

void TcpConnection::on_events(uint32_t epoll_events) {
  if (phase_ == Phase::kConnecting) {
    finish_connecting();
    return;
  }
  if ((epoll_events & EPOLLOUT) != 0) write_queued();
  if ((epoll_events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0) return;
  switch (phase_) {
    case Phase::kOpen:
      if (receives_shared_) hear_calls();
      read_frames();
      break;
    case Phase::kFlushing:
      discard_input();
      if (sends_shared_) write_queued();
      break;
    case Phase::kHandshake:
      read_handshake();
      break;
    case Phase::kConnecting:
    case Phase::kClosed:
      break;
  }
}

void TcpConnection::finish_connecting() {
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) {
    end({Code::kInternal, error_text(error)});
    return;
  }
  set_option(socket_.get(), IPPROTO_TCP, TCP_NODELAY);
  set_congestion_control(socket_.get());
  Status status = begin_handshake(Handshake::Side::kClient);
  if (status.ok()) status = context_.loop.change(socket_.get(), EPOLLIN);
  if (!status.ok()) end(status);
}

Status TcpConnection::begin_handshake(Handshake::Side side) {
  phase_ = Phase::kHandshake;
  const std::optional<Nonce> nonce = fresh_nonce();
  if (!nonce.has_value()) return {Code::kInternal, "the system gives no random numbers"};
  handshake_.emplace(side, context_.token, *nonce, peer_);
  send_raw(handshake_->opening());
  return {};
}

void TcpConnection::read_handshake() {
  const std::span<std::byte> wanted = handshake_->wanted();
  const ssize_t got = ::recv(socket_.get(), wanted.data(), wanted.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) {
    const Status why = handshake_->hung_up();
    end(got == 0 ? why : Status(why.code(), error_text(errno)));
    return;
  }
  context_.counters->received_bytes += static_cast<uint64_t>(got);
  Bytes reply;
  const Status status = handshake_->take(static_cast<size_t>(got), reply);
  send_raw(reply);
  if (!status.ok()) return end(status);
  if (handshake_->is_done()) open();
}

void TcpConnection::open() {
  phase_ = Phase::kOpen;
  handshake_.reset();
  context_.loop.cancel(deadline_);
  admission_.reset();
  owner_->on_open(*this);
}

void TcpConnection::read_frames() {
  for (const uint64_t begin = received_bytes_; phase_ == Phase::kOpen;) {
    if (received_bytes_ - begin >= kTurnBytes) {
      // The socket calls us again by itself.
      if (receives_shared_) context_.loop.post([self = shared_from_this()] { self->read_frames(); });
      return;
    }
    // One call reads the rest of a payload to where it belongs and the header of the frame behind it.
    std::array<iovec, kMaxPieces + 1> pieces;
    size_t count = 0;
    for (size_t i = into_begin_; in_payload_ && i < into_.size() && count < kMaxPieces; ++i) pieces[count++] = into_[i];
    if (!in_payload_ || into_.size() - into_begin_ == count) {
      pieces[count++] = {header_bytes_.data() + header_received_, kHeaderBytes - header_received_};
    }
    const bool from_socket = !receives_shared_;
    const auto wanted = std::span(pieces).first(count);
    const size_t got = from_socket ? receive(wanted) : receive_shared(wanted);
    if (got == 0) return;
    received_bytes_ += got;
    context_.counters->received_bytes += got;
    consume(got);
    if (!from_socket) release_read();
    if (!receives_shared_ && got < total_bytes(wanted)) return;  // the socket is empty
  }
}

// What there is; 0 where there is nothing now, or the connection has ended over it.
size_t TcpConnection::receive(std::span<const iovec> pieces) {
  ssize_t got = 0;
  do {
    got = ::readv(socket_.get(), pieces.data(), static_cast<int>(pieces.size()));
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno == EAGAIN) return 0;
  if (got <= 0) {
    end({Code::kInternal, got == 0 ? "it closed the connection" : error_text(errno)});
    return 0;
  }
  return static_cast<size_t>(got);
}

void TcpConnection::consume(size_t bytes) {
  Status status;
  if (in_payload_) {
    const size_t payload_left = total_bytes(std::span(into_).subspan(into_begin_));
    const size_t payload_part = std::min(bytes, payload_left);
    into_begin_ = advance(into_, into_begin_, payload_part, header_.has_checksum ? &checksum_ : nullptr);
    bytes -= payload_part;
    if (payload_part == payload_left) {
      in_payload_ = false;
      status = finish_frame();
    }
  }
  header_received_ += bytes;
  if (status.ok() && phase_ == Phase::kOpen && header_received_ == kHeaderBytes) status = begin_frame();
  if (!status.ok() && phase_ == Phase::kOpen) end(status);
}

Status TcpConnection::begin_frame() {
  header_received_ = 0;
  Result<FrameHeader> header = decode(header_bytes_);
  if (!header.ok()) return header.status();
  header_ = *header;
  const bool carries_data = header_.type == FrameType::kPush || header_.type == FrameType::kResult;
  if (context_.checksums && carries_data && !header_.has_checksum) {
    return {Code::kProtocol, "it sends no checksums, which this job asks for"};
  }
  if (header_.is_lent) return take_lent();
  checksum_ = header_.has_checksum ? start_checksum(header_bytes_) : 0;
  if (Status status = find_place(); !status.ok() || phase_ != Phase::kOpen) return status;
  if (header_.payload_bytes == 0) return finish_frame();
  in_payload_ = true;
  return {};
}

Status TcpConnection::find_place() {
  into_.clear();
  into_begin_ = 0;
  if (is_about_memory(header_.type)) {
    offer_bytes_.resize(header_.payload_bytes);
    into_ = as_pieces(offer_bytes_);
  } else if (Status status = owner_->on_header(*this, header_, into_); !status.ok()) {
    return status;
  }
  const bool fits = phase_ != Phase::kOpen || total_bytes(into_) == header_.payload_bytes;
  return fits ? Status() : Status(Code::kInternal, "a frame has no place for its payload");
}

Status TcpConnection::finish_frame() {
  if (header_.has_checksum && checksum_ != header_.checksum) {
    ++context_.counters->checksum_mismatch_count;
    return {Code::kProtocol, "a frame of type " + std::to_string(static_cast<int>(header_.type)) + " and " +
                                 std::to_string(header_.payload_bytes) +
                                 " bytes came damaged: its checksum is not the one that was sent"};
  }
  if (header_.type == FrameType::kShare) return take_offer();
  if (header_.type == FrameType::kShared) return take_shared();
  if (header_.type == FrameType::kReads) return take_reads();
  return owner_->on_frame(*this, header_);
}

void TcpConnection::discard_input() {
  std::array<std::byte, 16384> waste;
  const ssize_t got = ::recv(socket_.get(), waste.data(), waste.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) end({});
}

void TcpConnection::send(OutFrame frame) {
  if (phase_ != Phase::kOpen) return;
  if (context_.checksums) add_checksum(frame);
  if (lends_) lend(frame);
  queue_.push_back(std::move(frame));
  ++queued_frame_count_;
  if (flush_planned_ || waits_for_room_) return;
  // At the end of the turn, so that frames queued by several callbacks leave in one system call.
  flush_planned_ = true;
  context_.loop.at_end_of_turn([self = shared_from_this()] {
    self->flush_planned_ = false;
    self->write_queued();
  });
}

// The handshake is a hundred bytes on an empty socket buffer: it always fits.
void TcpConnection::send_raw(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent > 0) context_.counters->sent_bytes += static_cast<uint64_t>(sent);
}

uint64_t TcpConnection::passed_bytes() const {
  uint64_t on_the_way = 0;
  int unacknowledged = 0;
  if (sends_shared_) {
    on_the_way = shared_->unread_bytes();
    const uint64_t read_bytes = shared_->written_bytes() - on_the_way;
    for (const Lent& lent : lent_) on_the_way += lent.written_bytes > read_bytes ? lent.bytes : 0;
  } else if (ioctl(socket_.get(), SIOCOUTQ, &unacknowledged) == 0) {
    on_the_way = static_cast<uint64_t>(unacknowledged);
  }
  return received_bytes_ + sent_bytes_ - std::min(sent_bytes_, on_the_way);
}

void TcpConnection::write_queued() {
  drop_returned();
  for (size_t turn_bytes = 0; !queue_.empty();) {
    if (phase_ != Phase::kOpen && phase_ != Phase::kFlushing) return;
    if (turn_bytes >= kTurnBytes) {
      if (sends_shared_) context_.loop.post([self = shared_from_this()] { self->write_queued(); });
      break;
    }
    collect_output();
    const size_t sent = sends_shared_ ? transmit_shared() : transmit();
    if (sent == 0) break;
    sent_bytes_ += sent;
    context_.counters->sent_bytes += sent;
    turn_bytes += sent;
    front_written_ += sent;
    while (!queue_.empty() && front_written_ >= kHeaderBytes + queue_.front().payload_bytes) {
      OutFrame& frame = queue_.front();
      front_written_ -= kHeaderBytes + frame.payload_bytes;
      sent_bytes_ += frame.lent_bytes;
      context_.counters->sent_bytes += frame.lent_bytes;
      context_.counters->lent_bytes += frame.lent_bytes;
      if (frame.lent_bytes > 0 && frame.owner) {
        lent_.push_back({shared_->written_bytes(), frame.lent_bytes, std::move(frame.owner)});
      }
      queue_.pop_front();
      ++written_frame_count_;
    }
    if (!sends_shared_ && last_socket_frame_ > 0 && written_frame_count_ == last_socket_frame_) leave_socket();
  }
  if (phase_ != Phase::kOpen && phase_ != Phase::kFlushing) return;
  wait_for_room(!queue_.empty());
  if (phase_ == Phase::kFlushing && queue_.empty()) finish_flushing();
}

// 0 where there is no room now, or the connection has ended over it.
size_t TcpConnection::transmit() {
  msghdr message{};
  message.msg_iov = output_.data();
  message.msg_iovlen = output_.size();
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0 && errno != EAGAIN) end({Code::kInternal, error_text(errno)});
  return static_cast<size_t>(std::max<ssize_t>(sent, 0));
}

void TcpConnection::wait_for_room(bool waits) {
  if (waits == std::exchange(waits_for_room_, waits) || sends_shared_) return;
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
  const size_t begin = advance(output_, 0, front_written_);
  output_.erase(output_.begin(), output_.begin() + static_cast<std::ptrdiff_t>(begin));
  if (output_.size() > kMaxPieces) output_.resize(kMaxPieces);
}

void TcpConnection::close_with(OutFrame last) {
  if (phase_ != Phase::kOpen) {
    close();
    return;
  }
  // The rest of a frame that is half sent must follow, or the peer would take `last` for it.
  queue_.resize(front_written_ > 0 ? 1 : 0);
  if (!queue_.empty()) own_payload(queue_.front());
  queued_frame_count_ = written_frame_count_ + queue_.size();
  if (last_socket_frame_ > queued_frame_count_) last_socket_frame_ = 0;  // it is dropped, and the socket stays
  send(std::move(last));
  close_after_flush();
}

void TcpConnection::close_after_flush() {
  if (phase_ == Phase::kFlushing || phase_ == Phase::kClosed) return;
  if (phase_ != Phase::kOpen) {
    end({});
    return;
  }
  phase_ = Phase::kFlushing;
  const auto self = shared_from_this();
  deadline_ = context_.loop.after(kFlushPatience, [self] { self->end({}); });
  context_.loop.at_end_of_turn([self] {
    if (self->phase_ != Phase::kFlushing) return;
    self->write_queued();
    if (self->phase_ == Phase::kFlushing && self->queue_.empty()) self->finish_flushing();
  });
}

void TcpConnection::finish_flushing() { ::shutdown(socket_.get(), SHUT_WR); }

void TcpConnection::end(const Status& why) {
  if (phase_ == Phase::kClosed) return;
  const auto self = shared_from_this();  // the owner may let go of us
  if (handshake_.has_value() && handshake_->side() == Handshake::Side::kServer) ++context_.counters->refused_count;
  if (phase_ == Phase::kOpen && why.code() == Code::kProtocol) ++context_.counters->bad_frame_count;
  close();
  owner_->on_close(*this, why);
}

void TcpConnection::close() {
  if (phase_ == Phase::kClosed) return;
  const auto self = shared_from_this();
  phase_ = Phase::kClosed;
  context_.loop.cancel(deadline_);
  context_.loop.unwatch(socket_.get());
  socket_.reset();
  queue_.clear();
  for (Lent& lent : lent_) context_.unread.push_back(std::move(lent.owner));
  lent_.clear();
  into_.clear();
  in_payload_ = false;
  admission_.reset();
}

}  // namespace jaxhetero
