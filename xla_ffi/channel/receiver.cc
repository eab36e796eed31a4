#include "xla_ffi/channel/receiver.h"

#include "xla_ffi/channel/sender.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

OutFrame credit_for(const Transfer& transfer, uint64_t number) {
  const Transfer::Message& message = transfer.message();
  FrameHeader header;
  header.count = message.channel;
  header.op = message.tag;
  header.round = number;
  header.offset = transfer.bytes();
  return OutFrame::control(FrameType::kCredit, encode(message.text), header);
}

}  // namespace

std::optional<OutFrame> Receiver::add(std::shared_ptr<Transfer> transfer, Clock::time_point now) {
  if (open_count_ == kMostCredits) {
    transfer->fail({Code::kInvalidArgument, "more than " + std::to_string(kMostCredits) + " receives from " +
                                                peer_name_ + " are posted; wait for some before you post more"});
    return std::nullopt;
  }
  MessageQueue& queue = channels_[transfer->message().channel];
  OutFrame credit = credit_for(*transfer, queue.number() + queue.posted().size());
  queue.add(std::move(transfer), now);
  ++open_count_;
  return credit;
}

std::vector<OutFrame> Receiver::credits() const {
  std::vector<OutFrame> frames;
  for (const auto& [channel, queue] : channels_) {
    uint64_t number = queue.number();
    for (const auto& transfer : queue.posted()) frames.push_back(credit_for(*transfer, number++));
  }
  return frames;
}

Status Receiver::start(const FrameHeader& header, std::vector<iovec>& into) const {
  const auto found = channels_.find(header.count);
  if (found == channels_.end() || found->second.is_empty()) {
    return {Code::kProtocol, "it sent a message that nobody waits for"};
  }
  const MessageQueue& queue = found->second;
  const size_t left_bytes = queue.left_bytes();
  const bool moves = header.payload_bytes > 0 || left_bytes == 0;
  if (header.round != queue.number() || header.op != queue.front()->message().tag ||
      header.offset != queue.moved_bytes() || header.payload_bytes > left_bytes || !moves ||
      header.last != (header.payload_bytes == left_bytes)) {
    return {Code::kProtocol, "it sent a part of a message that is not the next one of " + queue.front()->name()};
  }
  queue.front()->message().memory.slice(header.offset, header.payload_bytes, into);
  return {};
}

void Receiver::finish(const FrameHeader& header, Clock::time_point now) {
  MessageQueue& queue = channels_[header.count];
  queue.note_progress(header.payload_bytes, now);
  if (!header.last) return;
  queue.finish_front();
  --open_count_;
}

std::optional<std::string> Receiver::find_late(Clock::time_point now, const ChannelPatience& patience) {
  for (auto& [channel, queue] : channels_) {
    const auto late = queue.lateness(now, patience);
    if (late.count() == 0) continue;
    return peer_name_ + " has sent nothing of " + queue.front()->name() + " for " + std::to_string(late.count()) +
           " ms, after " + std::to_string(queue.moved_bytes()) + " of " + std::to_string(queue.front()->bytes()) +
           " bytes";
  }
  return std::nullopt;
}

void Receiver::give_up(const Status& why) {
  for (auto& [channel, queue] : channels_) queue.give_up(why);
  channels_.clear();
  open_count_ = 0;
}

}  // namespace jaxhetero
