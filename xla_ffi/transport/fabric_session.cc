#include "xla_ffi/transport/fabric_session.h"

#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/transport/tcp_address.h"

namespace jaxhetero {
namespace {

// The peer is told what was consumed at the latest when it is so much.
constexpr uint64_t kConsumedAtOnce = kSlotsPerSession / 2;
constexpr size_t kLeastBorrowedBytes = 16384;  // below this size, copying is cheaper than another slot
// Likewise for sending: frames below this size share a message.
constexpr size_t kLeastInPlaceBytes = 65536;
constexpr size_t kBorrowedAlignment = 8;  // the size of the largest element

std::string own_host(const Fd& socket) {
  TcpAddress own;
  own.length = sizeof own.storage;
  return getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own.storage), &own.length) == 0 ? own.host() : "";
}

// One endpoint for all connections of an event loop, opened with the first.
Result<std::shared_ptr<FabricEndpoint>> endpoint_of(TcpContext& context, const Fd& socket,
                                                    const std::string& provider) {
  if (auto endpoint = context.endpoint.lock()) {
    if (endpoint->provider() == provider) return endpoint;
    return Status(Code::kInvalidArgument, "it is on the fabric of " + endpoint->provider() + ", not on " + provider);
  }
  Result<std::shared_ptr<const FabricLibrary>> library = context.fabric->library();
  if (!library.ok()) return library.status();
  Result<std::shared_ptr<FabricEndpoint>> endpoint =
      FabricEndpoint::open(context.loop, *library, provider, own_host(socket), context.strand, context.counters);
  if (!endpoint.ok()) return endpoint;
  context.endpoint = *endpoint;
  if (!context.owns_lent_frames) return endpoint;
  // Without it, messages are copied.
  if (Result<LongLived> memory = context.lent_memory->keep_pages(); memory.ok()) {
    context.long_lived.emplace(memory->bytes.data(), *memory);
  }
  return endpoint;
}

}  // namespace

// --- The agreement.

Status FabricSession::open(const std::string& provider) {
  Result<std::shared_ptr<FabricEndpoint>> endpoint = endpoint_of(context_, socket_, provider);
  if (!endpoint.ok()) return endpoint.status();
  Result<uint64_t> session = (*endpoint)->open_session(*this);
  if (!session.ok()) return session.status();
  endpoint_ = std::move(*endpoint);
  session_ = *session;
  return {};
}

FabricOffer FabricSession::own_offer() const {
  FabricOffer offer{endpoint_->provider(), session_, kSlotsPerSession, kSlotBytes, {}};
  for (const std::byte byte : endpoint_->name()) offer.name.push_back(static_cast<uint8_t>(byte));
  return offer;
}

std::optional<OutFrame> FabricSession::offer() {
  if (!context_.fabric) return std::nullopt;
  Status status;
  for (const std::string& provider : context_.fabric->providers()) {
    status = open(provider);
    if (status.ok()) return OutFrame::control(FrameType::kFabric, encode(own_offer()));
  }
  if (!status.ok()) context_.fabric->tell(status.message());
  return std::nullopt;
}

Status FabricSession::on_frame(FrameType type, const Bytes& payload, Replies& replies) {
  if (type == FrameType::kFabric) return on_fabric(payload, replies);
  if (type == FrameType::kOnFabric) return on_moved(payload, replies);
  // An offer that we have accepted is its own: our answer is under way, and with it we leave the socket.
  if (!endpoint_ || peer_.session != 0) return {Code::kProtocol, "it refused a fabric that it was not offered"};
  context_.fabric->tell("the other side: " + decode_text(payload));
  close();
  return {};
}

Status FabricSession::on_fabric(const Bytes& payload, Replies& replies) {
  Result<FabricOffer> offer = decode_fabric_offer(payload);
  if (!offer.ok()) return offer.status();
  if (endpoint_) return {Code::kProtocol, "it offered a fabric twice"};
  Status status = context_.fabric && context_.fabric->accepts() ? open(offer->provider)
                                                                : Status(Code::kInvalidArgument, "it wants none");
  if (status.ok()) status = take_offer(*offer);
  if (!status.ok()) {
    close();
    replies.next = OutFrame::control(FrameType::kNoFabric, encode(std::string_view(status.message())));
    return {};
  }
  replies.last_on_socket = OutFrame::control(FrameType::kOnFabric, encode(own_offer()));
  return {};
}

Status FabricSession::take_offer(const FabricOffer& offer) {
  Bytes name(offer.name.size());
  std::ranges::transform(offer.name, name.begin(), [](uint8_t byte) { return std::byte{byte}; });
  if (offer.session == 0 || offer.slot_count == 0 || offer.slot_bytes < kSlotBytes) {
    return {Code::kProtocol, "it offered a fabric without room for messages"};
  }
  Result<fi::Address> address = endpoint_->add_peer(name);
  if (!address.ok()) return address.status();
  address_ = *address;
  peer_ = offer;
  peer_.slot_count = std::min(offer.slot_count, uint32_t{kSlotsPerSession});  // as many as we should have to keep
  return {};
}

Status FabricSession::on_moved(const Bytes& payload, Replies& replies) {
  if (!endpoint_ || receives_) return {Code::kProtocol, "it moved to a fabric twice, or without an offer"};
  receives_ = true;
  ++context_.counters->fabric_connection_count;
  if (peer_.session != 0) return {};  // the echo
  Result<FabricOffer> offer = decode_fabric_offer(payload);
  if (!offer.ok()) return offer.status();
  if (Status status = take_offer(*offer); !status.ok()) return status;
  replies.last_on_socket = OutFrame::control(FrameType::kOnFabric, {});
  return {};
}

// The peer may have filled our slots by now. As long as we had nothing to tell it with, nobody else will.
void FabricSession::leave_socket() {
  sends_ = true;
  wake_writer();
}

// --- Writing.

Result<size_t> FabricSession::write(std::span<const iovec> pieces, const OutFrame& front) {
  if (!broken_.ok()) return broken_;
  if (!unsent_.has_value()) {
    if (sent_count_ - peer_consumed_ >= peer_.slot_count) return size_t{0};
    if (Status status = fill(pieces, front); !status.ok()) return status;
  }
  Result<bool> posted = post(*unsent_->slot, unsent_->bytes, sent_count_ + 1);
  if (!posted.ok()) return posted.status();
  if (!*posted) return size_t{0};
  ++sent_count_;
  sent_bytes_.push_back(unsent_->taken_bytes);
  under_way_.push_back({unsent_->frame_count});
  payload_left_ = unsent_->payload_left;
  const size_t taken_bytes = unsent_->taken_bytes;
  unsent_.reset();
  return taken_bytes;
}

// A message of as many frames as fit. One that does not fit beside others starts a message of its own: so the peer has
// its payload in one piece.
Status FabricSession::fill(std::span<const iovec> pieces, const OutFrame& front) {
  Result<FabricSlot*> slot = endpoint_->take_slot();
  if (!slot.ok()) return slot.status();
  if (payload_left_ == 0 && fill_in_place(**slot, front)) return {};
  const std::span<std::byte> room = (*slot)->bytes.subspan(kPrefixBytes);
  Unsent unsent{*slot, kPrefixBytes, 0, payload_left_, 0};
  size_t& taken = unsent.taken_bytes;
  for (const iovec& piece : pieces) {
    const std::span<const std::byte> bytes = bytes_of(piece);
    size_t part = std::min(bytes.size(), room.size() - taken);
    if (unsent.payload_left > 0) {
      unsent.payload_left -= part;
    } else {
      EncodedHeader encoded;
      std::ranges::copy(bytes, encoded.begin());
      Result<FrameHeader> header = decode(encoded);
      if (!header.ok()) return header.status();
      if (part < bytes.size() || (taken > 0 && header->payload_bytes > room.size() - taken - part)) break;
      unsent.payload_left = header->payload_bytes;
    }
    std::memcpy(room.data() + taken, bytes.data(), part);
    taken += part;
    if (unsent.payload_left == 0) ++unsent.frame_count;
    if (part < bytes.size()) break;
  }
  unsent.bytes += taken;
  unsent_ = unsent;
  return {};
}

// A message of one frame, whose payload is sent from where it lies, if it is worth it and that can be.
bool FabricSession::fill_in_place(FabricSlot& slot, const OutFrame& frame) {
  if (!frame.owner || frame.payload_bytes < kLeastInPlaceBytes) return false;
  if (frame.payload_bytes > kSlotBytes - kPrefixBytes - kHeaderBytes) return false;
  std::vector<iovec> payload;
  frame.append_payload(payload);
  if (payload.size() != 1) return false;
  Result<bool> attached = endpoint_->attach(slot, bytes_of(payload.front()), frame.owner, context_.long_lived);
  if (!attached.ok()) context_.fabric->warn("messages over the fabric are copied: " + attached.status().message());
  if (!attached.ok() || !*attached) return false;
  std::ranges::copy(frame.header, slot.bytes.begin() + kPrefixBytes);
  unsent_ = Unsent{&slot, kPrefixBytes + kHeaderBytes, kHeaderBytes + frame.payload_bytes, 0, 1};
  context_.counters->lent_bytes += frame.payload_bytes;
  return true;
}

Result<bool> FabricSession::post(FabricSlot& slot, size_t bytes, uint64_t number) {
  static_assert(std::endian::native == std::endian::little, "as all numbers on the wire");
  const std::array<uint64_t, 3> prefix = {peer_.session, number, consumed_};
  static_assert(sizeof prefix == kPrefixBytes);
  std::memcpy(slot.bytes.data(), prefix.data(), kPrefixBytes);
  slot.number = number;
  Result<bool> posted = endpoint_->send(slot, bytes, address_, session_);
  if (posted.ok() && *posted) told_ = consumed_;
  return posted;
}

void FabricSession::forget_unwritten() {
  if (unsent_.has_value()) endpoint_->give_back(*unsent_->slot);
  unsent_.reset();
}

void FabricSession::on_sent(uint64_t number) {
  if (number == 0) return;
  under_way_[number - delivered_count_ - 1].is_complete = true;
  for (; !under_way_.empty() && under_way_.front().is_complete; ++delivered_count_) under_way_.pop_front();
}

uint64_t FabricSession::undelivered_frame_count() const {
  uint64_t count = 0;
  for (const UnderWay& message : under_way_) count += message.frame_count;
  return count;
}

void FabricSession::finish() {
  if (!sends_ || std::exchange(has_finished_, true)) return;
  // The socket carries nothing else: it always has room.
  [[maybe_unused]] const ssize_t sent =
      ::send(socket_.get(), &delivered_count_, sizeof delivered_count_, MSG_NOSIGNAL | MSG_DONTWAIT);
}

uint64_t FabricSession::unread_bytes() const {
  uint64_t unread = 0;
  for (const size_t bytes : sent_bytes_) unread += bytes;
  return unread;
}

// --- Reading.

void FabricSession::on_message(FabricMessage message) {
  if (!broken_.ok()) return;
  broken_ = check(message);
  if (!broken_.ok()) return;
  for (; peer_consumed_ < message.consumed; ++peer_consumed_) sent_bytes_.pop_front();
  if (message.number > 0) messages_.emplace(message.number, std::move(message));
}

Status FabricSession::check(const FabricMessage& message) const {
  if (message.consumed > sent_count_) return {Code::kProtocol, "it claims to have read more messages than we sent"};
  if (message.number == 0) {
    return message.bytes == 0 ? Status() : Status(Code::kProtocol, "it sent a message without a number");
  }
  if (message.bytes == 0) return {Code::kProtocol, "it sent an empty message"};
  if (message.number <= consumed_ || message.number > consumed_ + kSlotsPerSession ||
      messages_.contains(message.number)) {
    return {Code::kProtocol, "it sent a message twice, or more than there is room for"};
  }
  return {};
}

Result<size_t> FabricSession::read(std::span<const iovec> pieces) {
  if (!broken_.ok()) return broken_;
  size_t got = 0;
  for (const iovec& piece : pieces) {
    for (size_t done = 0; done < piece.iov_len;) {
      const auto next = messages_.find(consumed_ + 1);
      if (next == messages_.end()) return got > 0 ? Result<size_t>(got) : none_or_end();
      const FabricMessage& message = next->second;
      const size_t part = std::min(piece.iov_len - done, message.bytes - read_bytes_);
      std::memcpy(static_cast<std::byte*>(piece.iov_base) + done, message.memory.get() + read_bytes_, part);
      done += part;
      got += part;
      consume(part);
    }
  }
  return got;
}

void FabricSession::consume(size_t bytes) {
  const auto next = messages_.find(consumed_ + 1);
  read_bytes_ += bytes;
  if (read_bytes_ < next->second.bytes) return;
  messages_.erase(next);
  ++consumed_;
  read_bytes_ = 0;
}

// A payload that is in one message as a whole.
std::shared_ptr<const std::byte> FabricSession::borrow(const FrameHeader& header) {
  const size_t bytes = header.payload_bytes;
  if (!receives_ || bytes < kLeastBorrowedBytes || header.has_checksum || header.is_lent) return nullptr;
  const auto next = messages_.find(consumed_ + 1);
  if (next == messages_.end() || next->second.bytes - read_bytes_ < bytes) return nullptr;
  const FabricMessage& message = next->second;
  const std::byte* const payload = message.memory.get() + read_bytes_;
  if (reinterpret_cast<uintptr_t>(payload) % kBorrowedAlignment != 0) return nullptr;
  if (!endpoint_->keep(message).ok()) return nullptr;
  std::shared_ptr<const std::byte> borrowed(message.memory, payload);
  consume(bytes);
  return borrowed;
}

void FabricSession::wake_writer() {
  if (!sends_ || consumed_ - told_ < kConsumedAtOnce || unsent_.has_value()) return;
  Result<FabricSlot*> slot = endpoint_->take_slot();
  if (!slot.ok()) return;
  Result<bool> posted = post(**slot, kPrefixBytes, 0);
  if (!posted.ok() || !*posted) endpoint_->give_back(**slot);  // the next progress, or error, calls again
}

// --- The end.

void FabricSession::drain_socket() {
  if (!socket_end_.ok()) return;
  std::array<std::byte, 64> words;
  const ssize_t got = ::recv(socket_.get(), words.data(), words.size(), MSG_DONTWAIT);
  if (got > 0) return take_from_socket(std::span(words).first(static_cast<size_t>(got)));
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  socket_end_ = {Code::kInternal, got == 0 ? "it closed the connection" : std::strerror(errno)};
  loop_.unwatch(socket_.get());  // it would be readable for ever
  if (last_word_bytes_ < last_words_.size()) return;
  deadline_ = loop_.after_running(context_.message_patience, [this] {
    deadline_ = 0;
    callbacks_.on_broken({Code::kInternal, "its last messages over the fabric did not come"});
  });
}

void FabricSession::take_from_socket(std::span<const std::byte> bytes) {
  const size_t part = std::min(bytes.size(), last_words_.size() - last_word_bytes_);
  std::ranges::copy(bytes.first(part), last_words_.begin() + static_cast<std::ptrdiff_t>(last_word_bytes_));
  last_word_bytes_ += part;
  if (part < bytes.size()) broken_ = {Code::kProtocol, "it sent bytes over a socket that it had left"};
}

// There is nothing to read now: 0, or why there will not be any more.
Result<size_t> FabricSession::none_or_end() const {
  if (socket_end_.ok()) return size_t{0};
  uint64_t message_count = 0;
  std::memcpy(&message_count, last_words_.data(), sizeof message_count);
  const bool waits = last_word_bytes_ == last_words_.size() && consumed_ < message_count;
  return waits ? Result<size_t>(0) : socket_end_;
}

void FabricSession::close() {
  if (!endpoint_) return;
  finish();
  loop_.cancel(std::exchange(deadline_, 0));
  forget_unwritten();
  messages_.clear();
  endpoint_->close_session(session_);
  endpoint_.reset();
  sends_ = receives_ = false;
}

void FabricSession::on_progress() {
  wake_writer();
  callbacks_.on_progress();
}

void FabricSession::on_broken(const Status& why) {
  broken_ = why;
  callbacks_.on_broken(why);
}

}  // namespace jaxhetero
