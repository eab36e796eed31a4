// A connection on a fabric, and a peer that knows the token and then says what it likes: in frames of the socket, and
// in messages of any session, number and content, the right ones among them. Nothing is read that the peer did not
// send, nobody takes memory from an operation, and as long as the peer tells no lie, all that it sends arrives, and all
// that we send. The stand-in is seeded, so that an input does the same again.
#include <fuzzer/FuzzedDataProvider.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "lab/fake_fabric/fake_fabric.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/fd.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/fabric/endpoint.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/handshake.h"
#include "xla_ffi/wire/messages.h"

namespace {

using namespace jaxhetero;

constexpr size_t kTurnsToArrive = 3000;
constexpr size_t kTurnsToEnd = 50;
constexpr std::array<size_t, 6> kSizes = {0, 8, 4000, 16384, 100'000, size_t{256} << 10};

const Bytes& token() {
  static const Bytes token(16, std::byte{'t'});
  return token;
}

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

template <typename Value>
Value must(Result<Value> value) {
  expect(value.ok(), value.status().message().c_str());
  return std::move(*value);
}

// What the nth frame carries, so that the receiver knows it.
OutFrame nth_frame(uint64_t n, size_t bytes) {
  FrameHeader header;
  header.type = FrameType::kPush;
  header.op = n;
  auto payload = std::make_shared<const Bytes>(bytes, static_cast<std::byte>(n));
  return OutFrame::of(header, *payload, payload);
}

void check_nth(const FrameHeader& header, std::span<const std::byte> payload, uint64_t n) {
  expect(header.type == FrameType::kPush && header.op == n, "frames come in their order");
  expect(std::ranges::all_of(payload, [&](std::byte byte) { return byte == static_cast<std::byte>(n); }),
         "a frame has the payload it was sent with");
}

// Both ends of a socket that needs no port.
struct Sockets {
  Fd ours;
  Fd peers;
  static Sockets pair() {
    std::array<int, 2> ends{};
    expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()) == 0, "there are sockets");
    return {Fd(ends[0]), Fd(ends[1])};
  }
};

class Listener {
 public:
  Listener() : socket_(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    address_.length = sizeof(sa_family_t);
    address_.storage.ss_family = AF_UNIX;
    auto* const address = reinterpret_cast<sockaddr*>(&address_.storage);
    expect(bind(socket_.get(), address, address_.length) == 0, "the kernel names a socket");  // a name of its choice
    expect(listen(socket_.get(), 8) == 0, "it listens");
    address_.length = sizeof address_.storage;
    getsockname(socket_.get(), address, &address_.length);
  }
  [[nodiscard]] const TcpAddress& address() const { return address_; }
  Fd accept() { return Fd(::accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)); }

 private:
  Fd socket_;
  TcpAddress address_;
};

class Both : private ConnectionOwner, private FabricListener {
 public:
  explicit Both(FuzzedDataProvider& input)
      : input_(input),
        loop_(must(EventLoop::create())),
        context_(*loop_, token()),
        connects_(input.ConsumeBool()),
        handshake_(connects_ ? Handshake::Side::kServer : Handshake::Side::kClient, token(), Nonce{}, "ours") {
    static Listener listener;
    context_.shares_memory = false;
    context_.fabric = std::make_shared<FabricChoice>(connects_ ? "fake" : "", log_);
    endpoint_ = must(
        FabricEndpoint::open(*loop_, must(context_.fabric->library()), "fake", "", 1, std::make_shared<Counters>()));
    session_ = must(endpoint_->open_session(*this));
    if (connects_) {
      connection_ = TcpConnection::connect(context_, listener.address(), *this, std::chrono::milliseconds(5000));
      socket_ = listener.accept();
    } else {
      Sockets sockets = Sockets::pair();
      socket_ = std::move(sockets.peers);
      connection_ = TcpConnection::accept(context_, std::move(sockets.ours), listener.address(), *this, nullptr);
    }
    expect(socket_.valid(), "the peer has a socket");
  }
  ~Both() override {
    connection_->close();
    messages_.clear();
    lent_.clear();
    endpoint_->close_session(session_);
  }

  void run() {
    say(handshake_.opening());
    const auto poller = loop_->add_poller([this] {
      turn();
      return true;
    });
    loop_->run();
    loop_->remove_poller(poller);
  }

 private:
  // --- One of both acts in each turn of the loop.

  void turn() {
    if (!handshake_.is_done()) return shake_hands();
    hear();
    if (is_open_ && !has_closed_ && input_.remaining_bytes() > 0) return act();
    flush_honest();
    const size_t patience = ours_closes_ || is_lying_ ? kTurnsToEnd : kTurnsToArrive;
    if (has_closed_ || (!is_lying_ && has_all()) || ++turns_ > patience) end();
  }

  void end() {
    const bool must_arrive = !has_closed_ && !ours_closes_ && !is_lying_;
    expect(!must_arrive || has_all(), "all that both have sent arrives");
    loop_->stop();
  }

  [[nodiscard]] bool has_all() const {
    return made_.empty() && rest_.empty() && heard_frames_ == made_frames_ && peer_heard_frames_ == our_frames_;
  }
  // Messages may overtake frames on the socket: the peer sends some before the word that it does.
  [[nodiscard]] bool has_moved() const { return peer_.session != 0 && address_ != fi::kAnyAddress; }

  void act() {
    switch (input_.ConsumeIntegralInRange(0, 12)) {
      case 0:
        return agree();
      case 1:
        return make_message();
      case 2:
      case 3:
        return send_message();
      case 4:
        return lie();
      case 5:
      case 6:
        return our_send();
      case 7:
        return tell_consumed();
      case 8:
        lent_.clear();
        return;
      case 9:
        return lie_on_socket();
      case 10:
        return our_close();
      case 11:
        is_patient_ = input_.ConsumeBool();  // then lent payloads stay
        return;
      default:
        return;  // a turn for the others
    }
  }

  // --- The peer, on its socket.

  void shake_hands() {
    const std::span<std::byte> wanted = handshake_.wanted();
    const ssize_t got = ::recv(socket_.get(), wanted.data(), wanted.size(), MSG_DONTWAIT);
    if (got <= 0) return;
    Bytes reply;
    expect(handshake_.take(static_cast<size_t>(got), reply).ok(), "the peer knows the token");
    say(reply);
  }

  void say(std::span<const std::byte> bytes) {
    [[maybe_unused]] const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  void say(const OutFrame& frame) {
    say(frame.header);
    say(frame.payload);
  }

  void hear() {
    std::array<std::byte, 65536> some;
    const ssize_t got = ::recv(socket_.get(), some.data(), some.size(), MSG_DONTWAIT);
    if (got <= 0 || is_lying_) return;
    heard_.insert(heard_.end(), some.begin(), some.begin() + got);
    while (heard_.size() >= kHeaderBytes) {
      const Result<FrameHeader> header = decode(std::span(heard_).first<kHeaderBytes>());
      if (!header.ok() || heard_.size() < kHeaderBytes + header.value().payload_bytes) return;
      hear_frame(header.value(), std::span(heard_).subspan(kHeaderBytes, header.value().payload_bytes));
      heard_.erase(heard_.begin(),
                   heard_.begin() + static_cast<std::ptrdiff_t>(kHeaderBytes + header.value().payload_bytes));
    }
  }
  // Other frames are those with which we close.
  void hear_push(const FrameHeader& header, std::span<const std::byte> payload) {
    if (header.type == FrameType::kPush) check_nth(header, payload, peer_heard_frames_++);
  }
  void hear_frame(const FrameHeader& header, std::span<const std::byte> payload) {
    hear_push(header, payload);
    if (header.type != FrameType::kFabric && header.type != FrameType::kOnFabric) return;
    if (!payload.empty()) {
      peer_ = must(decode_fabric_offer(payload));
      Bytes name;
      for (const uint8_t byte : peer_.name) name.push_back(std::byte{byte});
      address_ = must(endpoint_->add_peer(name));
    }
    we_have_moved_ = header.type == FrameType::kOnFabric;
    read_ours();
  }

  // The next frame of the agreement, as it is right.
  void agree() {
    if (agreed_frames_ == 0 && (!connects_ || has_moved())) {
      say(OutFrame::control(connects_ ? FrameType::kOnFabric : FrameType::kFabric, encode(offer())));
    } else if (agreed_frames_ == 1 && !connects_ && has_moved()) {
      say(OutFrame::control(FrameType::kOnFabric, {}));
    } else {
      return;
    }
    ++agreed_frames_;
  }
  [[nodiscard]] FabricOffer offer() const {
    FabricOffer offer{"fake", session_, kSlotsPerSession, kSlotBytes, {}};
    for (const std::byte byte : endpoint_->name()) offer.name.push_back(static_cast<uint8_t>(byte));
    return offer;
  }

  void lie_on_socket() {
    is_lying_ = true;
    FabricOffer offer = this->offer();
    switch (input_.ConsumeIntegralInRange(0, 5)) {
      case 0:
        ::shutdown(socket_.get(), SHUT_WR);
        peer_closes_ = true;
        return;
      case 1: {  // how many messages there are, or anything else
        const auto bytes = input_.ConsumeBytes<uint8_t>(input_.ConsumeIntegralInRange<size_t>(0, 80));
        return say(std::as_bytes(std::span(bytes)));
      }
      case 2: {
        const auto bytes = input_.ConsumeBytes<uint8_t>(input_.ConsumeIntegralInRange<size_t>(0, 80));
        const auto type = static_cast<FrameType>(input_.ConsumeIntegralInRange(1, static_cast<int>(kLastFrameType)));
        const auto payload = std::as_bytes(std::span(bytes));
        return say(OutFrame::control(type, {payload.begin(), payload.end()}));
      }
      case 3:
        offer.session = input_.ConsumeIntegralInRange<uint64_t>(0, 2);
        break;
      case 4:
        offer.slot_count = input_.ConsumeIntegral<uint32_t>();
        offer.slot_bytes = input_.ConsumeIntegral<uint32_t>();
        break;
      default:
        offer.name.resize(input_.ConsumeIntegralInRange<size_t>(0, 80), 7);
    }
    const std::array types = {FrameType::kFabric, FrameType::kOnFabric, FrameType::kNoFabric};
    say(OutFrame::control(input_.PickValueInArray(types), encode(offer)));
  }

  // --- The peer, on the fabric.

  // One of a few frames, the last of which may go on in the next message.
  void make_message() {
    if (!has_moved() || made_count_ - our_consumed_ >= kSlotsPerSession) return;
    Bytes bytes = std::exchange(rest_, {});
    for (int frames = input_.ConsumeIntegralInRange(bytes.empty() ? 1 : 0, 3); frames > 0; --frames) {
      const OutFrame frame = nth_frame(made_frames_++, input_.PickValueInArray(kSizes));
      bytes.insert(bytes.end(), frame.header.begin(), frame.header.end());
      bytes.insert(bytes.end(), frame.payload.begin(), frame.payload.end());
    }
    size_t count = std::min(bytes.size(), kSlotBytes - kPrefixBytes);
    if (input_.ConsumeBool()) count = std::min(count, input_.ConsumeIntegralInRange<size_t>(1, count));
    rest_.assign(bytes.begin() + static_cast<std::ptrdiff_t>(count), bytes.end());
    bytes.resize(count);
    made_.emplace_back(++made_count_, std::move(bytes));
  }

  void send_message() {
    if (made_.empty()) return;
    const auto chosen =
        made_.begin() + input_.ConsumeIntegralInRange<std::ptrdiff_t>(0, static_cast<std::ptrdiff_t>(made_.size()) - 1);
    if (send(peer_.session, chosen->first, consumed_, chosen->second)) made_.erase(chosen);
  }

  void flush_honest() {
    if (is_lying_ || has_closed_) return;
    agree();
    if (!has_moved()) return;
    if (made_.empty() && !rest_.empty() && made_count_ - our_consumed_ < kSlotsPerSession) {
      const size_t count = std::min(rest_.size(), kSlotBytes - kPrefixBytes);
      const auto cut = rest_.begin() + static_cast<std::ptrdiff_t>(count);
      made_.emplace_back(++made_count_, Bytes(rest_.begin(), cut));
      rest_.erase(rest_.begin(), cut);
    }
    if (!made_.empty() && send(peer_.session, made_.front().first, consumed_, made_.front().second)) made_.pop_front();
    if (made_.empty()) tell_consumed();
    lent_.clear();
  }

  void lie() {
    if (address_ == fi::kAnyAddress) return;
    const std::array<uint64_t, 4> sessions = {peer_.session, peer_.session, session_, 0};
    const std::array<uint64_t, 4> consumed = {consumed_, consumed_ + 1, uint64_t{1} << 63, 0};
    const uint64_t session = input_.PickValueInArray(sessions);
    is_lying_ = is_lying_ || session == peer_.session;
    const uint64_t number = input_.ConsumeBool() ? input_.ConsumeIntegral<uint64_t>()
                                                 : made_count_ + input_.ConsumeIntegralInRange<uint64_t>(0, 4) - 2;
    const uint64_t told = input_.PickValueInArray(consumed);
    const auto said = input_.ConsumeBytes<uint8_t>(input_.ConsumeIntegralInRange<size_t>(0, 100));
    const auto bytes = std::as_bytes(std::span(said));
    send(session, number, told, {bytes.begin(), bytes.end()}, input_.ConsumeIntegralInRange<size_t>(0, 24));
  }

  // What we consumed, in a message without a number.
  void tell_consumed() {
    if (has_moved() && told_ < consumed_ && send(peer_.session, 0, consumed_, {})) told_ = consumed_;
  }

  // `prefix_bytes`: a message may be too short for its prefix.
  bool send(uint64_t session, uint64_t number, uint64_t consumed, const Bytes& bytes,
            size_t prefix_bytes = kPrefixBytes) {
    FabricSlot& slot = *must(endpoint_->take_slot());
    const std::array<uint64_t, 3> prefix = {session, number, consumed};
    std::memcpy(slot.bytes.data(), prefix.data(), kPrefixBytes);
    std::ranges::copy(bytes, slot.bytes.begin() + kPrefixBytes);
    const size_t total = bytes.empty() ? prefix_bytes : kPrefixBytes + bytes.size();
    const Result<bool> sent = endpoint_->send(slot, total, address_, session_);
    if (!sent.ok() || !sent.value()) endpoint_->give_back(slot);
    return sent.ok() && sent.value();
  }

  void on_message(FabricMessage message) override {
    if (is_lying_) return;
    expect(message.consumed <= made_count_, "we have consumed what was sent");
    our_consumed_ = std::max(our_consumed_, message.consumed);
    if (message.number == 0) return;
    expect(message.number > consumed_ && message.number <= consumed_ + kSlotsPerSession, "we keep to the window");
    messages_.emplace(message.number, std::move(message));
    for (auto next = messages_.find(consumed_ + 1); next != messages_.end(); next = messages_.find(consumed_ + 1)) {
      const auto bytes = std::span(next->second.memory.get(), next->second.bytes);
      unread_.insert(unread_.end(), bytes.begin(), bytes.end());
      messages_.erase(next);
      ++consumed_;
    }
    read_ours();
  }
  void read_ours() {
    while (we_have_moved_ && unread_.size() >= kHeaderBytes) {
      const FrameHeader header = must(decode(std::span(unread_).first<kHeaderBytes>()));
      if (unread_.size() < kHeaderBytes + header.payload_bytes) return;
      hear_push(header, std::span(unread_).subspan(kHeaderBytes, header.payload_bytes));
      unread_.erase(unread_.begin(),
                    unread_.begin() + static_cast<std::ptrdiff_t>(kHeaderBytes + header.payload_bytes));
    }
  }
  void on_sent(uint64_t /*number*/) override {}
  void on_progress() override {}
  void on_broken(const Status& why) override { expect(false, why.message().c_str()); }

  // --- Ours.

  void our_send() { connection_->send(nth_frame(our_frames_++, input_.PickValueInArray(kSizes))); }

  void our_close() {
    ours_closes_ = true;
    switch (input_.ConsumeIntegralInRange(0, 2)) {
      case 0:
        has_closed_ = true;
        return connection_->close();
      case 1:
        return connection_->close_after_flush();
      default:
        return connection_->close_with(OutFrame::control(FrameType::kFault, {}));
    }
  }

  void on_open(Connection& /*connection*/) override {
    is_open_ = true;
    if (connects_) connection_->offer_carrier();
  }
  Status on_header(Connection& /*connection*/, const FrameHeader& header, std::vector<iovec>& into) override {
    coming_.assign(header.payload_bytes, std::byte{0xee});
    into = as_pieces(coming_);
    return {};
  }
  Status on_frame(Connection& /*connection*/, const FrameHeader& header) override {
    if (!is_lying_) check_nth(header, coming_, heard_frames_);
    ++heard_frames_;
    return {};
  }
  Result<bool> on_lent(Connection& /*connection*/, const FrameHeader& header,
                       const std::shared_ptr<const std::byte>& payload) override {
    const std::span<const std::byte> bytes(payload.get(), header.payload_bytes);
    if (!is_lying_) check_nth(header, bytes, heard_frames_);
    if (!is_patient_) {  // it is copied, as if it had come over a socket
      return false;
    }
    ++heard_frames_;
    lent_.push_back(payload);
    return true;
  }
  void on_close(Connection& /*connection*/, const Status& why) override {
    expect(is_lying_ || ours_closes_ || peer_closes_, why.message().c_str());  // a connection ends for a reason
    has_closed_ = true;
  }

  FuzzedDataProvider& input_;
  EventLog log_;
  const std::unique_ptr<EventLoop> loop_;
  TcpContext context_;
  const bool connects_;  // ours, to the peer
  std::shared_ptr<TcpConnection> connection_;
  Bytes coming_;
  std::vector<std::shared_ptr<const std::byte>> lent_;
  uint64_t heard_frames_ = 0;
  uint64_t our_frames_ = 0;
  bool is_open_ = false;
  bool is_patient_ = false;
  bool has_closed_ = false;
  bool ours_closes_ = false;

  // The peer.
  Handshake handshake_;
  Fd socket_;
  Bytes heard_;  // on the socket
  std::shared_ptr<FabricEndpoint> endpoint_;
  uint64_t session_ = 0;
  FabricOffer peer_;  // ours, as it heard
  fi::Address address_ = fi::kAnyAddress;
  int agreed_frames_ = 0;
  std::deque<std::pair<uint64_t, Bytes>> made_;  // messages to send
  Bytes rest_;                                   // of the last frame that was made
  uint64_t made_count_ = 0;
  uint64_t made_frames_ = 0;
  uint64_t our_consumed_ = 0;
  std::map<uint64_t, FabricMessage> messages_;
  Bytes unread_;
  uint64_t consumed_ = 0;
  uint64_t told_ = 0;
  uint64_t peer_heard_frames_ = 0;
  bool is_lying_ = false;
  bool peer_closes_ = false;
  bool we_have_moved_ = false;  // so the peer has heard
  size_t turns_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  fake_fabric_seed(input.ConsumeIntegral<uint16_t>());
  {
    Both(input).run();
  }
  expect(fake_fabric_open_count() == 0, "all is closed");
  return 0;
}
