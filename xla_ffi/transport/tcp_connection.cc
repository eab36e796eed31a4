#include "xla_ffi/transport/tcp_connection.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/counters.h"
#include "xla_ffi/transport/fabric_session.h"
#include "xla_ffi/transport/shared_session.h"
#include "xla_ffi/wire/auth.h"
#include "xla_ffi/wire/checksum.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {
namespace {

constexpr std::chrono::milliseconds kFlushPatience{2000};
constexpr size_t kMaxPieces = 256;  // the pieces of one sendmsg or readv; IOV_MAX is 1024
constexpr size_t kLargeFrameBytes = 4096;
constexpr size_t kTurnBytes = size_t{1} << 20;  // one connection may move so many before the others have their turn

std::string error_text(int error) { return std::strerror(error); }

// Cuts `bytes` off the front of `pieces`, from index `first` on, and returns the index of the first piece that has any
// left. Updates `checksum`, if given, with the bytes cut off.
size_t advance(std::vector<iovec>& pieces, size_t first, size_t bytes, uint32_t* checksum = nullptr) {
  while (bytes > 0) {
    iovec& piece = pieces[first];
    const size_t part = std::min(bytes, piece.iov_len);
    if (checksum != nullptr) *checksum = crc32c(*checksum, bytes_of(piece).first(part));
    piece.iov_base = static_cast<std::byte*>(piece.iov_base) + part;
    piece.iov_len -= part;
    bytes -= part;
    if (piece.iov_len == 0) ++first;
  }
  return first;
}

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

void set_option(int fd, int level, int name) {
  const int on = 1;
  setsockopt(fd, level, name, &on, sizeof on);  // an optimisation, whose failure does not matter
}

// Our window bounds the bytes under way, and a flow pauses whenever others are behind. Congestion control that paces by
// a flow's recent rate, such as bbr, takes these pauses for a slow path and sends up to six times slower: see
// notebook/links.md. If the kernel has no cubic, its default stays.
void set_congestion_control(int fd) {
  constexpr std::string_view kName = "cubic";
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kName.data(), kName.size());
}

// Returns 0 or the error number. The kernel chooses the port when we connect, so that connections to different peers
// can share one. An address of IPv4 is no source of a connection over IPv6: then the routing table decides.
int bind_source(int fd, const TcpAddress& source, const TcpAddress& target) {
  if (source.storage.ss_family != target.storage.ss_family) return 0;
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
  self->is_connecting_ = true;
  ++context.connecting_count;
  self->socket_ =
      Fd([&] { return ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  int error = self->socket_.valid() ? 0 : errno;
  if (error == 0 && context.source.has_value()) {
    error = bind_source(self->socket_.get(), *context.source, address);
  }
  if (error == 0 &&
      ::connect(self->socket_.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length) != 0 &&
      errno != EINPROGRESS) {
    error = errno;
  }
  if (error != 0) {
    // The owner does not have this connection yet: report the failure after we have returned.
    context.loop.at_end_of_turn([self, error] { self->end({Code::kInternal, error_text(error)}); });
    return self;
  }
  self->start_watching(EPOLLOUT, patience);
  return self;
}

std::shared_ptr<TcpConnection> TcpConnection::accept(TcpContext& context, Fd socket, const TcpAddress& peer,
                                                     ConnectionOwner& owner, std::shared_ptr<void> admission,
                                                     std::chrono::milliseconds patience) {
  const std::shared_ptr<TcpConnection> self(new TcpConnection(context, peer, owner));
  self->socket_ = std::move(socket);
  self->admission_ = std::move(admission);
  set_option(self->socket_.get(), IPPROTO_TCP, TCP_NODELAY);
  set_congestion_control(self->socket_.get());
  if (const Status status = self->start_handshake(Handshake::Side::kServer); !status.ok()) {
    context.loop.at_end_of_turn([self, status] { self->end(status); });
    return self;
  }
  self->start_watching(EPOLLIN, patience);
  return self;
}

void TcpConnection::start_watching(uint32_t epoll_events, std::chrono::milliseconds patience) {
  const auto self = shared_from_this();
  deadline_ = context_.loop.after_running(patience, [self] {
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
      if (receives_off_socket()) {
        carrier_->drain_socket();
        if (waits_for_room_) write_queued();
      }
      read_frames();
      break;
    case Phase::kFlushing:
      discard_input();
      if (sends_off_socket()) write_queued();
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
  Status status = start_handshake(Handshake::Side::kClient);
  if (status.ok()) status = context_.loop.change(socket_.get(), EPOLLIN);
  if (!status.ok()) end(status);
}

Status TcpConnection::start_handshake(Handshake::Side side) {
  phase_ = Phase::kHandshake;
  const std::optional<Nonce> nonce = fresh_nonce();
  if (!nonce.has_value()) return {Code::kInternal, "the kernel gave no random numbers"};
  handshake_.emplace(side, context_.token, *nonce, peer_, context_.strand, context_.crypto != nullptr);
  send_handshake(handshake_->opening());
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
  send_handshake(reply);
  if (!status.ok()) return end(status);
  if (handshake_->is_done()) open();
}

// A handshake is a hundred bytes, and the socket's buffer is empty: they always fit.
void TcpConnection::send_handshake(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent > 0) context_.counters->sent_bytes += static_cast<uint64_t>(sent);
}

void TcpConnection::open() {
  phase_ = Phase::kOpen;
  if (context_.crypto) seal_ = std::make_unique<Seal>(context_.crypto, handshake_->keys());
  handshake_.reset();
  context_.loop.cancel(deadline_);
  admission_.reset();
  owner_->on_open(*this);
  leave_handshake();
}

// The last connection that does lets those that are open make their offers: once the turn has sent what its handshake
// and theirs were to say.
void TcpConnection::leave_handshake() {
  if (!std::exchange(is_connecting_, false) || --context_.connecting_count > 0) return;
  for (const std::weak_ptr<TcpConnection>& weak : std::exchange(context_.offering, {})) {
    context_.loop.at_end_of_turn([weak] {
      if (const auto connection = weak.lock()) connection->offer_carrier();
    });
  }
}

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
  if (got <= 0) return Status(Code::kInternal, got == 0 ? "it closed the connection" : error_text(errno));
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
    in.first_piece = advance(in.into, in.first_piece, payload_part, in.header.has_checksum ? &in.checksum : nullptr);
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

bool TcpConnection::is_of_carrier(FrameType type) {
  return SharedSession::handles_type(type) || FabricSession::handles_type(type);
}

// The carrier that frames of this type agree on.
std::unique_ptr<Carrier> TcpConnection::make_carrier(FrameType type) {
  if (SharedSession::handles_type(type)) return std::make_unique<SharedSession>(context_, socket_);
  return std::make_unique<FabricSession>(context_, socket_,
                                         FabricSession::Callbacks{
                                             .on_progress = [this] { on_progress(); },
                                             .on_broken = [this](const Status& why) { end_after_reading(why); },
                                         });
}

void TcpConnection::offer_carrier() {
  if (phase_ != Phase::kOpen || carrier_) return;
  for (const FrameType type : {FrameType::kShare, FrameType::kFabric}) {
    if (type == FrameType::kFabric && context_.connecting_count > 0) {
      carrier_.reset();
      return context_.offering.push_back(weak_from_this());
    }
    carrier_ = make_carrier(type);
    if (std::optional<OutFrame> offer = carrier_->offer(); offer.has_value()) return send(std::move(*offer));
  }
  carrier_.reset();
}

// The carrier has room, or bytes.
void TcpConnection::on_progress() {
  const auto self = shared_from_this();  // the owner may drop us
  waits_for_room_ ? write_queued() : tell_written();
  if (phase_ == Phase::kOpen && receives_off_socket()) read_frames();
}

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
    const Result<size_t> written = sends_off_socket() ? carrier_->write(output_)
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
  if (sent < 0 && errno != EAGAIN) return Status(Code::kInternal, error_text(errno));
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
  const size_t written_pieces = advance(output_, 0, front_written_bytes_);
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

void TcpConnection::close_after_flush() {
  if (phase_ == Phase::kFlushing || phase_ == Phase::kClosed) return;
  if (phase_ != Phase::kOpen) {
    end({});
    return;
  }
  phase_ = Phase::kFlushing;
  const auto self = shared_from_this();
  deadline_ = context_.loop.after_running(kFlushPatience, [self] { self->end({}); });
  context_.loop.at_end_of_turn([self] {
    if (self->phase_ != Phase::kFlushing) return;
    self->write_queued();
    if (self->phase_ == Phase::kFlushing && self->has_flushed()) self->finish_flushing();
  });
}

void TcpConnection::discard_input() {
  std::array<std::byte, 16384> waste;
  const ssize_t got = ::recv(socket_.get(), waste.data(), waste.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) end({});
}

void TcpConnection::finish_flushing() {
  if (carrier_) carrier_->finish();
  ::shutdown(socket_.get(), SHUT_WR);
}

// Nothing can be written any more. What the peer sent before it went may say why: all that is in the socket's buffer.
void TcpConnection::end_after_reading(const Status& why) {
  const auto self = shared_from_this();  // the owner may drop us
  uint64_t before = 0;
  do {
    before = received_bytes_;
    read_frames();
  } while (received_bytes_ > before && !receives_off_socket());
  end(why);
}

void TcpConnection::end(const Status& why) {
  if (phase_ == Phase::kClosed) return;
  const auto self = shared_from_this();  // the owner may drop us
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
  if (carrier_) carrier_->close();
  context_.loop.unwatch(socket_.get());
  socket_.shut_down();
  queue_.clear();
  incoming_.into.clear();
  incoming_.in_payload = false;
  admission_.reset();
  leave_handshake();
}

}  // namespace jaxhetero
