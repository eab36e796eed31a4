// The ends of channels, driven as their connection drives them: two workers that tell the truth to each other, and a
// peer that says to either whatever it likes. Messages arrive as they were sent, and no byte is written elsewhere.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/channel/receiver.h"
#include "xla_ffi/channel/sender.h"
#include "xla_ffi/channel/transfer.h"
#include "xla_ffi/wire/frame.h"

namespace {

using namespace jaxhetero;

constexpr uint32_t kChannels = 3;
constexpr std::byte kUntouched{0xee};

struct Posted {
  std::shared_ptr<Transfer> transfer;
  std::unique_ptr<Bytes> memory;
};

void expect(bool holds) {
  if (!holds) std::abort();
}

class Pair {
 public:
  explicit Pair(FuzzedDataProvider& input) : input_(input) {}

  void act() {
    now_ += std::chrono::milliseconds(10);
    switch (input_.ConsumeIntegralInRange(0, 5)) {
      case 0:
        return send();
      case 1:
        return receive();
      case 2:
        return give_credit();
      case 3:
        return lie_to_receiver();
      default:
        return move();
    }
  }
  void end() const {
    for (const Posted& posted : received_) {
      const bool is_whole = std::ranges::count(*posted.memory, kUntouched) == 0;
      expect(!posted.transfer->is_done() || is_whole);
    }
  }

 private:
  // What a message is follows from its place, so that both sides mostly agree; sometimes they do not.
  Posted post(Transfer::Direction direction, std::vector<uint64_t>& counts, std::byte fill) {
    const auto channel = input_.ConsumeIntegralInRange<uint32_t>(0, kChannels - 1);
    const uint64_t number = counts[channel]++;
    const bool strays = input_.ConsumeIntegralInRange(0, 15) == 0;
    const size_t bytes = (7 * number + channel) % 11 + (number % 5 == 4 ? 300'000 : 0) + (strays ? 1 : 0);
    Posted posted{nullptr, std::make_unique<Bytes>(bytes, fill)};
    Transfer::Message message{1, channel, number, "x", {}};
    message.memory.append(posted.memory->data(), bytes / 2);
    message.memory.append(posted.memory->data() + bytes / 2, bytes - bytes / 2);
    posted.transfer = std::make_shared<Transfer>(direction, std::move(message));
    return posted;
  }

  void send() {
    sent_.push_back(post(Transfer::Direction::kSend, send_counts_, std::byte{1}));
    note(sender_.add(sent_.back().transfer, now_));
  }

  void receive() {
    received_.push_back(post(Transfer::Direction::kReceive, receive_counts_, kUntouched));
    std::optional<OutFrame> credit = receiver_.add(received_.back().transfer, now_);
    if (credit.has_value()) credits_.push_back(std::move(*credit));
  }

  void give_credit() {
    if (is_over_) return;
    if (input_.ConsumeIntegralInRange(0, 7) == 0) {
      FrameHeader lie;
      lie.type = FrameType::kCredit;
      lie.count = input_.ConsumeIntegralInRange<uint32_t>(0, kChannels);
      lie.round = input_.ConsumeIntegralInRange<uint64_t>(0, 8);
      lie.offset = input_.ConsumeIntegral<uint64_t>() >> input_.ConsumeIntegralInRange(0, 63);
      lie.op = input_.ConsumeIntegralInRange<uint64_t>(0, 8);
      note(sender_.take_credit(lie, "a lie", now_));
      is_over_ = true;  // what follows need not fit
    } else if (!credits_.empty()) {
      note(sender_.take_credit(*decode(credits_.front().header), "x", now_));
      credits_.pop_front();
    }
  }

  void lie_to_receiver() const {
    FrameHeader lie;
    lie.type = FrameType::kMessage;
    lie.last = input_.ConsumeBool();
    lie.payload_bytes = input_.ConsumeIntegralInRange<uint32_t>(0, 1 << 20);
    lie.count = input_.ConsumeIntegralInRange<uint32_t>(0, kChannels);
    lie.op = input_.ConsumeIntegralInRange<uint64_t>(0, 8);
    lie.round = input_.ConsumeIntegralInRange<uint64_t>(0, 8);
    lie.offset = input_.ConsumeIntegral<uint64_t>() >> input_.ConsumeIntegralInRange(0, 63);
    std::vector<iovec> into;
    if (receiver_.start(lie, into).ok()) expect(is_in_posted_memory(into) && total_bytes(into) == lie.payload_bytes);
  }

  void move() {
    std::optional<OutFrame> frame = sender_.next_frame(frame_count_ + 1);
    if (!frame.has_value()) return;
    const FrameHeader header = *decode(frame->header);
    ++frame_count_;
    std::vector<iovec> from;
    frame->append_payload(from);
    expect(total_bytes(from) == header.payload_bytes);
    std::vector<iovec> into;
    if (receiver_.start(header, into).ok()) {
      expect(is_in_posted_memory(into) && total_bytes(into) == header.payload_bytes);
      for (const iovec& piece : into) std::fill_n(static_cast<std::byte*>(piece.iov_base), piece.iov_len, std::byte{1});
      receiver_.finish(header, now_);
    } else {
      expect(is_over_);
    }
    if (input_.ConsumeBool()) note(sender_.note_written(frame_count_, now_));
  }

  [[nodiscard]] bool is_in_posted_memory(const std::vector<iovec>& pieces) const {
    return std::ranges::all_of(pieces, [this](const iovec& piece) {
      const auto* first = static_cast<const std::byte*>(piece.iov_base);
      return std::ranges::any_of(received_, [&](const Posted& posted) {
        const Bytes& memory = *posted.memory;
        return !posted.transfer->is_done() && first >= memory.data() &&
               first + piece.iov_len <= memory.data() + memory.size();
      });
    });
  }

  void note(const Status& status) {
    if (status.ok()) return;
    is_over_ = true;
    sender_.give_up(status);
    expect(sender_.is_empty());
    for (const Posted& posted : sent_) expect(posted.transfer->is_done());
  }

  FuzzedDataProvider& input_;
  Sender sender_{"rank 0 (host a)", "rank 1 (host b)"};
  Receiver receiver_{"rank 0 (host a)"};
  std::vector<uint64_t> send_counts_ = std::vector<uint64_t>(kChannels);
  std::vector<uint64_t> receive_counts_ = std::vector<uint64_t>(kChannels);
  std::deque<Posted> sent_;
  std::deque<Posted> received_;
  std::deque<OutFrame> credits_;
  uint64_t frame_count_ = 0;
  MessageQueue::Clock::time_point now_{};
  bool is_over_ = false;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  Pair pair(input);
  while (input.remaining_bytes() > 0) pair.act();
  pair.end();
  return 0;
}
