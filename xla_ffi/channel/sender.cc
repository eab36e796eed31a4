#include "xla_ffi/channel/sender.h"

#include <algorithm>
#include <utility>

namespace jaxhetero {
namespace {

constexpr size_t kPartBytes = size_t{128} << 10;
constexpr size_t kMostUnwritten = 8;  // a small message waits for so many parts of large ones at most

}  // namespace

Status Sender::add(std::shared_ptr<Transfer> transfer, Clock::time_point now) {
  const uint32_t number = transfer->message().channel;
  Channel& channel = channels_[number];
  const bool is_front = channel.queue.is_empty();
  channel.queue.add(std::move(transfer), now);
  ++open_count_;
  return is_front ? start_front(number, channel) : Status();
}

Status Sender::take_credit(const FrameHeader& header, std::string text, Clock::time_point now) {
  if (credit_count_ == kMostCredits) {
    return {Code::kProtocol, "it has given more than " + std::to_string(kMostCredits) + " credits"};
  }
  Channel& channel = channels_[header.count];
  if (header.round != channel.queue.number() + channel.credits.size()) {
    return {Code::kProtocol, "it gave a credit out of order"};
  }
  channel.credits.push_back({header.offset, header.op, std::move(text)});
  ++credit_count_;
  if (channel.credits.size() > 1 || channel.queue.is_empty()) return {};
  channel.queue.note_progress(0, now);
  return start_front(header.count, channel);
}

// Lets the front message go, if it is there and has a credit.
Status Sender::start_front(uint32_t number, Channel& channel) {
  if (channel.queue.is_empty() || channel.credits.empty()) return {};
  const Transfer& transfer = *channel.queue.front();
  const Credit& credit = channel.credits.front();
  if (credit.bytes == transfer.bytes() && credit.tag == transfer.message().tag) {
    ready_.push_back(number);
    return {};
  }
  const auto described = [](const std::string& text, uint64_t bytes, uint64_t tag) {
    return "\"" + text + "\", " + std::to_string(bytes) + " bytes with the tag " + std::to_string(tag);
  };
  return {Code::kMismatch, "message " + std::to_string(channel.queue.number()) + " of channel " +
                               std::to_string(number) + ": " + own_name_ + " sends " +
                               described(transfer.message().text, transfer.bytes(), transfer.message().tag) + ", but " +
                               peer_name_ + " expects " + described(credit.text, credit.bytes, credit.tag) +
                               "; do both run the same program?"};
}

std::optional<OutFrame> Sender::next_frame(uint64_t frame_number) {
  if (ready_.empty() || unwritten_.size() == kMostUnwritten) return std::nullopt;
  const uint32_t number = ready_.front();
  ready_.pop_front();
  Channel& channel = channels_[number];
  const std::shared_ptr<Transfer>& transfer = channel.queue.front();
  const size_t offset = channel.sent_bytes;
  const size_t bytes = std::min(kPartBytes, transfer->bytes() - offset);
  channel.sent_bytes += bytes;
  FrameHeader header;
  header.type = FrameType::kMessage;
  header.last = channel.sent_bytes == transfer->bytes();
  header.payload_bytes = static_cast<uint32_t>(bytes);
  header.count = number;
  header.op = transfer->message().tag;
  header.round = channel.queue.number();
  header.offset = offset;
  if (!header.last) ready_.push_back(number);
  unwritten_.push_back({frame_number, number, bytes, header.last});
  OutFrame frame = OutFrame::gather(header, transfer->message().memory, offset);
  frame.owner = transfer;
  return frame;
}

Status Sender::note_written(uint64_t frame_count, Clock::time_point now) {
  while (!unwritten_.empty() && unwritten_.front().frame_number <= frame_count) {
    const UnwrittenFrame written = unwritten_.front();
    unwritten_.pop_front();
    Channel& channel = channels_[written.channel];
    channel.queue.note_progress(written.bytes, now);
    if (!written.is_last) continue;
    channel.queue.finish_front();
    channel.credits.pop_front();
    channel.sent_bytes = 0;
    --credit_count_;
    --open_count_;
    if (Status status = start_front(written.channel, channel); !status.ok()) return status;
  }
  return {};
}

std::optional<std::string> Sender::find_late(Clock::time_point now, const ChannelPatience& patience) {
  for (auto& [number, channel] : channels_) {
    const auto late = channel.queue.lateness(now, patience);
    if (late.count() == 0) continue;
    const Transfer& transfer = *channel.queue.front();
    const bool is_awaited = !channel.credits.empty();
    std::string text = peer_name_ + (is_awaited ? " has taken nothing of " : " has not asked for ");
    text += transfer.name() + " for " + std::to_string(late.count()) + " ms";
    if (!is_awaited) return text;
    return text + ", after " + std::to_string(channel.queue.moved_bytes()) + " of " + std::to_string(transfer.bytes()) +
           " bytes";
  }
  return std::nullopt;
}

void Sender::give_up(const Status& why) {
  for (auto& [number, channel] : channels_) channel.queue.give_up(why);
  channels_.clear();
  ready_.clear();
  unwritten_.clear();
  credit_count_ = open_count_ = 0;
}

}  // namespace jaxhetero
