#include "xla_ffi/transport/tcp_connection.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "xla_ffi/base/counters.h"
#include "xla_ffi/transport/fabric_session.h"
#include "xla_ffi/transport/shared_session.h"
#include "xla_ffi/wire/auth.h"

// Frames that come in are in tcp_connection_reading.cc, those that go out in tcp_connection_writing.cc.
namespace jaxhetero {
namespace {

constexpr std::chrono::milliseconds kFlushPatience{2000};  // for a peer that takes nothing

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
    context.loop.at_end_of_turn([self, error] { self->end({Code::kInternal, std::strerror(error)}); });
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
    end({Code::kInternal, std::strerror(error)});
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
    end(got == 0 ? why : Status(why.code(), std::strerror(errno)));
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

void TcpConnection::close_after_flush() {
  if (phase_ == Phase::kFlushing || phase_ == Phase::kClosed) return;
  if (phase_ != Phase::kOpen) {
    end({});
    return;
  }
  phase_ = Phase::kFlushing;
  const auto self = shared_from_this();
  flush_for_a_while();
  context_.loop.at_end_of_turn([self] {
    if (self->phase_ != Phase::kFlushing) return;
    self->write_queued();
    if (self->phase_ == Phase::kFlushing && self->has_flushed()) self->finish_flushing();
  });
}

void TcpConnection::flush_for_a_while() {
  deadline_ = context_.loop.after_running(kFlushPatience, [self = shared_from_this(), before = passed_bytes()] {
    self->passed_bytes() > before ? self->flush_for_a_while() : self->end({});
  });
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
