// The two ends of channels without a connection: frames of the one are handed to the other by the test.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/messages_of_channels.h"
#include "tests/cc/printing.h"
#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/channel/message_queue.h"
#include "xla_ffi/channel/receiver.h"
#include "xla_ffi/channel/sender.h"
#include "xla_ffi/channel/transfer.h"
#include "xla_ffi/transport/connection.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr size_t kPartBytes = size_t{128} << 10;
constexpr ChannelPatience kTimeouts{milliseconds(500), milliseconds(100)};

bool has(const std::string& text, const char* word) { return text.find(word) != std::string::npos; }

FrameHeader header_of(const OutFrame& frame) { return *decode(frame.header); }

std::string text_of(const OutFrame& frame) { return decode_text(frame.payload); }

// Rank 0 sends to rank 1.
class ChannelEndsTest : public testing::Test {
 protected:
  static std::shared_ptr<Transfer> transfer(Transfer::Direction direction, Transfer::Message message) {
    return std::make_shared<Transfer>(direction, std::move(message));
  }
  std::shared_ptr<Transfer> send(MessageMemory& memory, uint32_t channel = 0, uint64_t tag = 7,
                                 const std::string& text = "what is sent") {
    auto sent = transfer(Transfer::Direction::kSend, memory.message(1, channel, tag, text));
    status_ = sender_.add(sent, now_);
    return sent;
  }
  // The credit goes to the sender at once, or by deliver_credits().
  std::shared_ptr<Transfer> receive(MessageMemory& memory, uint32_t channel = 0, uint64_t tag = 7,
                                    const std::string& text = "what is awaited") {
    auto received = transfer(Transfer::Direction::kReceive, memory.message(0, channel, tag, text));
    std::optional<OutFrame> credit = receiver_.add(received, now_);
    if (credit.has_value()) credits_.push_back(std::move(*credit));
    return received;
  }
  Status deliver_credits() {
    for (; !credits_.empty(); credits_.pop_front()) {
      const OutFrame& credit = credits_.front();
      if (Status status = sender_.take_credit(header_of(credit), text_of(credit), now_); !status.ok()) return status;
    }
    return {};
  }
  // The sender's next frame, as the receiver gets it; nothing if there is none.
  std::optional<FrameHeader> move_frame() {
    std::optional<OutFrame> frame = sender_.next_frame(++frame_count_);
    if (!frame.has_value()) {
      --frame_count_;
      return std::nullopt;
    }
    const FrameHeader header = header_of(*frame);
    std::vector<iovec> from;
    frame->append_payload(from);
    std::vector<iovec> into;
    const Status status = receiver_.start(header, into);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(total_bytes(into), header.payload_bytes);
    Bytes payload;
    for (const iovec& piece : from) {
      payload.insert(payload.end(), static_cast<std::byte*>(piece.iov_base),
                     static_cast<std::byte*>(piece.iov_base) + piece.iov_len);
    }
    size_t offset = 0;
    for (const iovec& piece : into) {
      std::memcpy(piece.iov_base, payload.data() + offset, piece.iov_len);
      offset += piece.iov_len;
    }
    receiver_.finish(header, now_);
    EXPECT_TRUE(sender_.note_written(frame_count_, now_).ok());
    return header;
  }
  static bool succeeded(Transfer& transfer) {
    const std::optional<Status> result = transfer.wait(milliseconds(0));
    return result.has_value() && result->ok();
  }

  Sender sender_{"rank 0 (host a)", "rank 1 (host b)"};
  Receiver receiver_{"rank 0 (host a)"};
  MessageQueue::Clock::time_point now_{};
  Status status_;
  std::deque<OutFrame> credits_;
  uint64_t frame_count_ = 0;
};

TEST_F(ChannelEndsTest, AMessageGoesOnceBothSidesHavePostedIt) {
  for (const bool sends_first : {false, true}) {
    MessageMemory from({5, 0, 1000}, 1);
    MessageMemory into({1000, 5});
    std::shared_ptr<Transfer> sent;
    if (sends_first) sent = send(from);
    EXPECT_FALSE(sender_.next_frame(1).has_value());
    const auto received = receive(into);
    EXPECT_TRUE(deliver_credits().ok());
    if (!sends_first) sent = send(from);
    EXPECT_FALSE(sender_.is_empty());
    EXPECT_FALSE(receiver_.is_empty());
    ASSERT_TRUE(move_frame().has_value());
    EXPECT_TRUE(succeeded(*sent));
    EXPECT_TRUE(succeeded(*received));
    EXPECT_EQ(into.contents(), from.contents());
    EXPECT_TRUE(sender_.is_empty());
    EXPECT_TRUE(receiver_.is_empty());
  }
}

TEST_F(ChannelEndsTest, AMessageMayBeEmpty) {
  MessageMemory nothing({0, 0});
  const auto received = receive(nothing);
  ASSERT_TRUE(deliver_credits().ok());
  const auto sent = send(nothing);
  ASSERT_TRUE(move_frame().has_value());
  EXPECT_TRUE(succeeded(*sent));
  EXPECT_TRUE(succeeded(*received));
}

TEST_F(ChannelEndsTest, MessagesOfAChannelGoInTheOrderOfTheirPosts) {
  std::deque<MessageMemory> from;
  std::deque<MessageMemory> into;
  std::vector<std::shared_ptr<Transfer>> received;
  for (uint32_t i = 0; i < 4; ++i) {
    from.emplace_back(std::vector<size_t>{8}, i);
    into.emplace_back(std::vector<size_t>{8});
    send(from[i], 0, i);
    received.push_back(receive(into[i], 0, i));
  }
  ASSERT_TRUE(deliver_credits().ok());
  for (uint32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(move_frame()->round, i);
    EXPECT_TRUE(succeeded(*received[i]));
    EXPECT_EQ(into[i].contents(), from[i].contents());
  }
}

// The second message of channel 0 is not awaited yet: channel 1 does not wait for it.
TEST_F(ChannelEndsTest, ChannelsDoNotWaitForEachOther) {
  MessageMemory memory({8}, 1);
  MessageMemory into({8});
  send(memory, 0);
  const auto sent = send(memory, 1);
  const auto received = receive(into, 1);
  ASSERT_TRUE(deliver_credits().ok());
  EXPECT_EQ(move_frame()->count, 1u);
  EXPECT_TRUE(succeeded(*sent));
  EXPECT_TRUE(succeeded(*received));
  EXPECT_FALSE(move_frame().has_value());
}

TEST_F(ChannelEndsTest, LargeMessagesTakeTurns) {
  MessageMemory large({3 * kPartBytes - 1, 2}, 1);
  MessageMemory small({10}, 2);
  MessageMemory into_large({3 * kPartBytes + 1});
  MessageMemory into_small({10});
  send(large, 0);
  send(small, 1);
  receive(into_large, 0);
  receive(into_small, 1);
  ASSERT_TRUE(deliver_credits().ok());
  std::vector<std::pair<uint32_t, uint32_t>> moved;
  while (const std::optional<FrameHeader> header = move_frame()) {
    moved.emplace_back(header->count, header->payload_bytes);
  }
  const auto part = static_cast<uint32_t>(kPartBytes);
  const std::vector<std::pair<uint32_t, uint32_t>> expected = {{0, part}, {1, 10}, {0, part}, {0, part}, {0, 1}};
  EXPECT_EQ(moved, expected);
  EXPECT_EQ(into_large.contents(), large.contents());
  EXPECT_EQ(into_small.contents(), small.contents());
}

TEST_F(ChannelEndsTest, OnlyAFewFramesWaitToBeWritten) {
  MessageMemory memory({100 * kPartBytes});
  const auto sent = send(memory);
  receive(memory);
  ASSERT_TRUE(deliver_credits().ok());
  uint64_t frames = 0;
  while (sender_.next_frame(frames + 1).has_value()) ++frames;
  EXPECT_LT(frames, 100u);
  EXPECT_TRUE(sender_.has_more());
  EXPECT_TRUE(sender_.note_written(frames, now_).ok());
  EXPECT_TRUE(sender_.next_frame(frames + 1).has_value());
  EXPECT_FALSE(sent->is_done());
}

// The peer may be told of its credits anew, when it makes the connection later.
TEST_F(ChannelEndsTest, CreditsAreTheSameForALaterConnection) {
  MessageMemory memory({8});
  for (uint32_t channel : {0u, 0u, 9u}) receive(memory, channel);
  std::vector<OutFrame> again = receiver_.credits();
  ASSERT_EQ(again.size(), 3u);
  for (OutFrame& credit : again) credits_.push_back(std::move(credit));
  credits_.erase(credits_.begin(), credits_.begin() + 3);
  EXPECT_TRUE(deliver_credits().ok());
}

TEST_F(ChannelEndsTest, AnotherMessageThanTheAwaitedOneIsAMismatch) {
  MessageMemory from({8});
  for (const bool sends_first : {false, true}) {
    uint32_t channel = sends_first ? 10 : 20;
    for (const auto& [bytes, tag] : {std::pair<size_t, uint64_t>{9, 7}, {8, 8}}) {
      ++channel;
      MessageMemory into({bytes});
      if (sends_first) send(from, channel);
      receive(into, channel, tag);
      Status status = deliver_credits();
      credits_.clear();
      if (!sends_first) {
        EXPECT_TRUE(status.ok());
        send(from, channel);
        status = status_;
      }
      EXPECT_EQ(status.code(), Code::kMismatch);
      const std::string sent = "rank 0 (host a) sends \"what is sent\", 8 bytes with the tag 7";
      const std::string awaited = "rank 1 (host b) expects \"what is awaited\", " + std::to_string(bytes) +
                                  " bytes with the tag " + std::to_string(tag);
      for (const std::string& word : {sent, awaited, "message 0 of channel " + std::to_string(channel)}) {
        EXPECT_TRUE(has(status.message(), word.c_str())) << status.message();
      }
    }
  }
}

TEST_F(ChannelEndsTest, AMismatchOfALaterMessageIsFoundInItsTurn) {
  MessageMemory memory({8});
  MessageMemory other({9});
  for (MessageMemory* from : {&memory, &memory}) send(*from);
  for (MessageMemory* into : {&memory, &other}) receive(*into);
  ASSERT_TRUE(deliver_credits().ok());
  ASSERT_TRUE(sender_.next_frame(1).has_value());
  EXPECT_EQ(sender_.note_written(1, now_).code(), Code::kMismatch);
}

TEST_F(ChannelEndsTest, CreditsComeInOrderAndNotWithoutEnd) {
  FrameHeader credit;
  credit.type = FrameType::kCredit;
  credit.round = 1;
  EXPECT_EQ(sender_.take_credit(credit, "", now_).code(), Code::kProtocol);
  for (credit.round = 0; credit.round < kMostCredits; ++credit.round) {
    ASSERT_TRUE(sender_.take_credit(credit, "", now_).ok()) << credit.round;
  }
  EXPECT_EQ(sender_.take_credit(credit, "", now_).code(), Code::kProtocol);
}

TEST_F(ChannelEndsTest, AReceiverPostsNoMoreThanItsPeerMayTake) {
  MessageMemory memory({1});
  for (size_t i = 0; i < kMostCredits; ++i) receive(memory);
  const auto too_many = receive(memory);
  EXPECT_EQ(too_many->wait(milliseconds(0))->code(), Code::kInvalidArgument);
  EXPECT_EQ(credits_.size(), kMostCredits);
}

// A message of 100 bytes, of which 40 have come.
struct Lie {
  std::string name;
  std::function<void(FrameHeader&)> change;  // of the right header for the rest
};

class LyingSenderTest : public ChannelEndsTest, public testing::WithParamInterface<Lie> {};

TEST_P(LyingSenderTest, GetsNoMemory) {
  MessageMemory memory({100});
  receive(memory, 3);
  FrameHeader header;
  header.type = FrameType::kMessage;
  header.count = 3;
  header.op = 7;
  header.payload_bytes = 40;
  std::vector<iovec> into;
  ASSERT_TRUE(receiver_.start(header, into).ok());
  receiver_.finish(header, now_);
  header.offset = 40;
  header.payload_bytes = 60;
  header.last = true;
  FrameHeader lie = header;
  GetParam().change(lie);
  into.clear();
  EXPECT_EQ(receiver_.start(lie, into).code(), Code::kProtocol);
  EXPECT_TRUE(into.empty());
  EXPECT_TRUE(receiver_.start(header, into).ok()) << "the truth is still believed";
}

INSTANTIATE_TEST_SUITE_P(All, LyingSenderTest,
                         testing::Values(Lie{"of_another_channel", [](FrameHeader& h) { h.count = 4; }},
                                         Lie{"of_the_next_message", [](FrameHeader& h) { h.round = 1; }},
                                         Lie{"with_another_tag", [](FrameHeader& h) { h.op = 8; }},
                                         Lie{"once_more", [](FrameHeader& h) { h.offset = 0; }},
                                         Lie{"behind_its_place", [](FrameHeader& h) { h.offset = 41; }},
                                         Lie{"far_behind", [](FrameHeader& h) { h.offset = ~uint64_t{0} - 20; }},
                                         Lie{"longer_than_the_rest", [](FrameHeader& h) { h.payload_bytes = 61; }},
                                         Lie{"the_rest_but_not_the_last", [](FrameHeader& h) { h.last = false; }},
                                         Lie{"the_last_but_not_the_rest", [](FrameHeader& h) { h.payload_bytes = 59; }},
                                         Lie{"that_moves_nothing",
                                             [](FrameHeader& h) {
                                               h.payload_bytes = 0;
                                               h.last = false;
                                             }}),
                         [](const auto& info) { return info.param.name; });

TEST_F(ChannelEndsTest, WhoeverIsLateIsNamedWithTheMessage) {
  MessageMemory memory({3 * kPartBytes});
  for (const char* text : {"first", "second"}) {
    for (const auto& transfer : {send(memory, 5, 7, text), receive(memory, 5, 7, text)}) {
      EXPECT_FALSE(transfer->wait(milliseconds(0)).has_value());
    }
  }
  now_ += kTimeouts.later;
  EXPECT_FALSE(receiver_.find_late(now_, kTimeouts).has_value()) << "the first one may take longer";
  now_ += kTimeouts.first;
  EXPECT_TRUE(has(*sender_.find_late(now_, kTimeouts), "rank 1 (host b) has not asked for \"first\" (channel 5) for "));
  EXPECT_TRUE(has(*receiver_.find_late(now_, kTimeouts), "rank 0 (host a) has sent nothing of \"first\" (channel 5)"));
  ASSERT_TRUE(deliver_credits().ok());
  EXPECT_FALSE(sender_.find_late(now_, kTimeouts).has_value()) << "the credit is progress";
  for (int part = 0; part < 3; ++part) ASSERT_TRUE(move_frame().has_value());
  now_ += kTimeouts.later - milliseconds(1);
  ASSERT_TRUE(move_frame().has_value());
  now_ += kTimeouts.later - milliseconds(1);
  EXPECT_FALSE(sender_.find_late(now_, kTimeouts).has_value());
  EXPECT_FALSE(receiver_.find_late(now_, kTimeouts).has_value());
  now_ += milliseconds(1);
  EXPECT_TRUE(has(*sender_.find_late(now_, kTimeouts),
                  "has taken nothing of \"second\" (channel 5) for 100 ms, after "
                  "131072 of 393216 bytes"));
  EXPECT_TRUE(has(*receiver_.find_late(now_, kTimeouts), "has sent nothing of \"second\""));
}

TEST_F(ChannelEndsTest, NobodyIsLateForWhatNobodyWaitsFor) {
  MessageMemory memory({8});
  const auto sent = send(memory, 5, 7, "gradients");
  now_ += 10 * kTimeouts.first;
  EXPECT_FALSE(sender_.find_late(now_, kTimeouts).has_value());
  EXPECT_FALSE(sent->wait(milliseconds(0)).has_value());
  EXPECT_FALSE(sender_.find_late(now_, kTimeouts).has_value()) << "the time begins now";
  now_ += kTimeouts.first;
  EXPECT_TRUE(sender_.find_late(now_, kTimeouts).has_value());
}

TEST_F(ChannelEndsTest, WhoeverLeavesWaitsForAll) {
  MessageMemory memory({8});
  send(memory, 5, 7, "gradients");
  now_ += kTimeouts.first;
  EXPECT_TRUE(sender_.find_late(now_, {kTimeouts.first, kTimeouts.later, true}).has_value());
}

TEST_F(ChannelEndsTest, WhatIsGivenUpSaysWhatItWas) {
  MessageMemory memory({8});
  const auto sent = send(memory, 2, 7, "gradients");
  const auto received = receive(memory, 2, 7, "activations");
  sender_.give_up({Code::kWorkerLost, "rank 2 was lost"});
  receiver_.give_up({Code::kWorkerLost, "rank 2 was lost"});
  EXPECT_EQ(sent->wait(milliseconds(0))->message(),
            "rank 2 was lost; this ended the transfer of \"gradients\" (channel 2) to rank 1");
  EXPECT_EQ(received->wait(milliseconds(0))->message(),
            "rank 2 was lost; this ended the transfer of \"activations\" (channel 2) from rank 0");
  EXPECT_TRUE(sender_.is_empty());
  EXPECT_TRUE(receiver_.is_empty());
}

}  // namespace
}  // namespace jaxhetero
