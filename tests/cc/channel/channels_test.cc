// Messages between the workers of whole jobs, over real sockets and shared memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/cc/fake_peers.h"
#include "tests/cc/job.h"
#include "tests/cc/messages_of_channels.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/channel/transfer.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

Status end_of(Transfer& transfer) {
  return transfer.wait(kPatience).value_or(Status(Code::kInternal, "the test waited in vain"));
}

class ChannelsTest : public testing::Test {
 protected:
  void start(Shape shape = {.workers = 2, .reducers = 1}) {
    job_ = std::make_unique<Job>(shape);
    job_->start();
  }
  std::shared_ptr<Transfer> send(uint32_t from, uint32_t to, MessageMemory& memory, uint32_t channel = 0,
                                 uint64_t tag = 7, std::string text = "what is sent") {
    return job_->workers[from]->post(Transfer::Direction::kSend, memory.message(to, channel, tag, std::move(text)));
  }
  std::shared_ptr<Transfer> receive(uint32_t to, uint32_t from, MessageMemory& memory, uint32_t channel = 0,
                                    uint64_t tag = 7, std::string text = "what is awaited") {
    return job_->workers[to]->post(Transfer::Direction::kReceive, memory.message(from, channel, tag, std::move(text)));
  }
  // A message from rank 0 to rank 1.
  void expect_works(uint32_t channel = 99) {
    MessageMemory from({1000, 24}, 5);
    MessageMemory into({24, 1000});
    const auto received = receive(1, 0, into, channel);
    const auto sent = send(0, 1, from, channel);
    const Status status = end_of(*received);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(end_of(*sent).ok());
    EXPECT_EQ(into.contents(), from.contents());
  }

  // Of worker 0, once there are so many: it may hear that a peer has moved after all that the peer has sent.
  [[nodiscard]] uint64_t shared_connections(uint64_t awaited) const {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    const auto count = [this] { return job_->workers[0]->metrics().shared_connection_count; };
    while (count() < awaited && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    return count();
  }

  std::unique_ptr<Job> job_;
};

using Way = std::tuple<bool, bool>;  // shared memory, checksums

class EveryWayTest : public ChannelsTest, public testing::WithParamInterface<Way> {};

// Every worker sends to every other, on several channels, and reduces all the while.
TEST_P(EveryWayTest, ManyMessagesOfManyChannelsArrive) {
  constexpr uint32_t kWorkers = 3;
  constexpr uint32_t kChannels = 4;
  constexpr uint32_t kMessages = 3;
  const auto [shared_memory, checksums] = GetParam();
  start({.workers = kWorkers, .reducers = 2, .checksums = checksums, .shared_memory = shared_memory});
  std::deque<MessageMemory> memories;
  std::vector<std::pair<const MessageMemory*, const MessageMemory*>> pairs;
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (uint32_t from = 0; from < kWorkers; ++from) {
    for (uint32_t to = 0; to < kWorkers; ++to) {
      if (from == to) continue;
      for (uint32_t channel = 0; channel < kChannels; ++channel) {
        for (uint32_t number = 0; number < kMessages; ++number) {
          const size_t bytes = channel % 2 == 0 ? 10 * number : 300'000 + number;
          MessageMemory& sent = memories.emplace_back(std::vector<size_t>{bytes, 3}, 100 * channel + number);
          MessageMemory& received = memories.emplace_back(std::vector<size_t>{3, bytes});
          pairs.emplace_back(&sent, &received);
          const bool sends_first = (channel + number + from) % 2 == 0;
          if (sends_first) transfers.push_back(send(from, to, sent, channel, number));
          transfers.push_back(receive(to, from, received, channel, number));
          if (!sends_first) transfers.push_back(send(from, to, sent, channel, number));
        }
      }
    }
  }
  job_->expect_works();
  for (const auto& transfer : transfers) {
    const Status status = end_of(*transfer);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  for (const auto& [sent, received] : pairs) EXPECT_EQ(received->contents(), sent->contents());
  const Metrics metrics = job_->workers[0]->metrics();
  const uint64_t least_bytes = 2 * 2 * 3 * 300'000;  // to two peers, over two channels, three messages
  EXPECT_GT(metrics.channel_sent_bytes, least_bytes);
  EXPECT_GT(metrics.channel_received_bytes, least_bytes);
  EXPECT_LT(metrics.channel_sent_bytes, least_bytes + 50'000);
  const uint64_t links = 2 * job_->strands();  // to reducers
  EXPECT_EQ(shared_connections(shared_memory ? links + 4 : 0), shared_memory ? links + 4 : 0);
  job_->expect_shutdown();
}

INSTANTIATE_TEST_SUITE_P(All, EveryWayTest, testing::Combine(testing::Bool(), testing::Bool()));

TEST_F(ChannelsTest, AJobWithoutMessagesHasNoConnectionsForThem) {
  start();
  job_->expect_works();
  for (const auto& worker : job_->workers) {
    EXPECT_EQ(worker->metrics().channel_sent_bytes, 0u);
    EXPECT_EQ(worker->metrics().channel_received_bytes, 0u);
  }
  job_->expect_shutdown();
}

TEST_F(ChannelsTest, AnyThreadMayPost) {
  constexpr uint32_t kThreads = 4;
  constexpr uint32_t kMessages = 50;
  start();
  std::vector<std::thread> threads;
  for (uint32_t channel = 0; channel < kThreads; ++channel) {
    threads.emplace_back([this, channel] {
      for (uint32_t number = 0; number < kMessages; ++number) {
        MessageMemory from({100}, number);
        MessageMemory into({100});
        const auto sent = send(0, 1, from, channel, number);
        const auto received = receive(1, 0, into, channel, number);
        EXPECT_TRUE(end_of(*sent).ok());
        EXPECT_TRUE(end_of(*received).ok());
        EXPECT_EQ(into.contents(), from.contents());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  job_->expect_shutdown();
}

TEST_F(ChannelsTest, AWorkerHasNoChannelsWithItselfOrNobody) {
  start();
  MessageMemory memory({8});
  for (const uint32_t peer : {0u, 2u}) {
    EXPECT_TRUE(failed_with(end_of(*send(0, peer, memory)), Code::kInvalidArgument,
                            {"rank 0 (host host-0) has no channels with rank " + std::to_string(peer)}));
  }
  expect_works();
  job_->expect_shutdown();
}

TEST_F(ChannelsTest, AMismatchEndsTheJobEverywhere) {
  start({.workers = 3, .reducers = 1});
  MessageMemory eight({8});
  MessageMemory nine({9});
  MessageMemory other({5});
  const auto bystander = receive(2, 0, other, 1, 7, "what never comes");
  const auto sent = send(0, 1, eight, 4, 7, "activations of stage 0");
  const auto received = receive(1, 0, nine, 4, 7, "activations of stage 1");
  for (const auto& transfer : {sent, received, bystander}) {
    EXPECT_TRUE(failed_with(end_of(*transfer), Code::kMismatch,
                            {"channel 4", "rank 0 (host host-0) sends \"activations of stage 0\", 8 bytes",
                             "rank 1 (host host-1) expects \"activations of stage 1\", 9 bytes"}));
  }
  EXPECT_TRUE(failed_with(end_of(*bystander), Code::kMismatch, {"this ended the transfer of \"what never comes\""}));
  EXPECT_TRUE(failed_with(end_of(*send(0, 1, eight)), Code::kMismatch, {"channel 4"})) << "nothing goes any more";
}

TEST_F(ChannelsTest, AMessageThatNobodySendsOrAwaitsHasADeadline) {
  for (const bool sends : {false, true}) {
    start({.workers = 2, .reducers = 1, .start_timeout = kShort, .timeout = kShort});
    MessageMemory memory({8});
    const auto alone =
        sends ? send(0, 1, memory, 2, 7, "gradients of stage 0") : receive(0, 1, memory, 2, 7, "gradients of stage 0");
    const char* const what = sends
                                 ? "rank 1 (host host-1) has not asked for \"gradients of stage 0\" (channel 2) for"
                                 : "rank 1 (host host-1) has sent nothing of \"gradients of stage 0\" (channel 2) for";
    EXPECT_TRUE(failed_with(end_of(*alone), Code::kRoundTimeout, {"rank 0 (host host-0): ", what}));
    EXPECT_TRUE(failed_with(job_->workers[1]->shutdown(kPatience), Code::kRoundTimeout, {what}));
  }
}

TEST_F(ChannelsTest, ALostWorkerIsNamed) {
  start({.workers = 3, .reducers = 1});
  expect_works();
  MessageMemory memory({8});
  std::vector<std::shared_ptr<Transfer>> transfers = {send(0, 1, memory), receive(0, 1, memory), send(2, 1, memory),
                                                      receive(2, 0, memory)};
  job_->workers[1].reset();
  for (const auto& transfer : transfers) {
    EXPECT_TRUE(failed_with(end_of(*transfer), Code::kWorkerLost,
                            {"rank 1 (host host-1) was lost", "this ended the transfer of \"what is "}));
  }
}

TEST_F(ChannelsTest, ALostReducerChangesNothing) {
  start({.workers = 2, .reducers = 2, .failover = true});
  expect_works();
  std::deque<MessageMemory> memories;
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (uint32_t number = 0; number < 40; ++number) {
    if (number == 10) job_->reducers.front().reset();
    transfers.push_back(receive(1, 0, memories.emplace_back(std::vector<size_t>{500'000}), 3));
    transfers.push_back(send(0, 1, memories.emplace_back(std::vector<size_t>{500'000}, number), 3));
  }
  job_->expect_works();
  for (const auto& transfer : transfers) {
    const Status status = end_of(*transfer);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  for (size_t i = 0; i < memories.size(); i += 2) EXPECT_EQ(memories[i].contents(), memories[i + 1].contents());
  job_->reducers.erase(job_->reducers.begin());
  job_->expect_shutdown();
}

TEST_F(ChannelsTest, WhatIsUnderWayIsFinishedBeforeAWorkerLeaves) {
  start();
  MessageMemory from({2'000'000}, 1);
  MessageMemory into({2'000'000});
  const auto sent = send(0, 1, from);
  std::thread leaver([this] { EXPECT_TRUE(job_->workers[0]->shutdown(kPatience).ok()); });
  const auto received = receive(1, 0, into);
  EXPECT_TRUE(job_->workers[1]->shutdown(kPatience).ok());
  leaver.join();
  EXPECT_TRUE(end_of(*sent).ok());
  EXPECT_TRUE(end_of(*received).ok());
  EXPECT_EQ(into.contents(), from.contents());
  EXPECT_TRUE(failed_with(end_of(*send(0, 1, from)), Code::kNotInitialized, {"this ended the transfer of"}));
}

// --- Peers that know the token and do what they should not. Rank 1 of 3 is a fake one.

struct Misdeed {
  std::string name;
  std::function<OutFrame(const FrameHeader& credit)> frame;
  std::string word;
};

FrameHeader message_header(const FrameHeader& credit, size_t bytes) {
  FrameHeader header = credit;
  header.type = FrameType::kMessage;
  header.offset = 0;
  header.payload_bytes = static_cast<uint32_t>(bytes);
  header.last = bytes == credit.offset;
  return header;
}

class ChannelMisdeedTest : public FakeWorkerTest, public testing::WithParamInterface<Misdeed> {};

TEST_P(ChannelMisdeedTest, IsBlamedOnWhoDidItAndWritesNowhere) {
  ASSERT_NO_FATAL_FAILURE(start());
  MessageMemory memory({100});
  const auto received =
      job_->workers[0]->post(Transfer::Direction::kReceive, memory.message(1, 3, 7, "activations of stage 1"));
  const size_t connection = fake_->connect_to_worker(0);
  ASSERT_TRUE(fake_->wait_credits(1));
  fake_->send(GetParam().frame(fake_->credits().front()), connection);
  const Status status = end_of(*received);
  EXPECT_TRUE(failed_with(status, Code::kWorkerLost,
                          {"rank 1 (host host-1) was lost: ", GetParam().word, "last completed: none"}));
  EXPECT_TRUE(has(status.message(), "\"activations of stage 1\" (channel 3) from rank 1"));
  EXPECT_EQ(memory.contents(), Bytes(100, std::byte{0xee}));
  EXPECT_EQ(job_->workers[0]->metrics().bad_frame_count, 1u);
}

INSTANTIATE_TEST_SUITE_P(
    All, ChannelMisdeedTest,
    testing::Values(Misdeed{"sends_more_than_was_asked_for",
                            [](const FrameHeader& credit) { return push_frame(message_header(credit, 101), 101); },
                            "not the next one of \"activations of stage 1\""},
                    Misdeed{"sends_on_another_channel",
                            [](const FrameHeader& credit) {
                              FrameHeader header = message_header(credit, 100);
                              ++header.count;
                              return push_frame(header, 100);
                            },
                            "a message that nobody waits for"},
                    Misdeed{"gives_a_credit_where_it_sends",
                            [](const FrameHeader& credit) { return push_frame(credit, 0); },
                            "it sent a frame of type 25"},
                    Misdeed{"pushes_a_chunk",
                            [](const FrameHeader& credit) {
                              FrameHeader header = credit;
                              header.type = FrameType::kPush;
                              return push_frame(header, 100);
                            },
                            "it sent a frame of type 7"},
                    Misdeed{"joins_twice",
                            [](const FrameHeader&) { return OutFrame::control(FrameType::kJoin, encode(Join{0, 1})); },
                            "it sent a frame of type 5"},
                    Misdeed{"sends_a_text_without_end",
                            [](const FrameHeader&) { return OutFrame::control(FrameType::kFault, Bytes(20'000)); },
                            "a text that is too long"},
                    Misdeed{"sends_a_broken_frame",
                            [](const FrameHeader&) {
                              FrameHeader header;
                              header.type = static_cast<FrameType>(77);
                              return OutFrame::of(header, {}, nullptr);
                            },
                            "unknown type 77"}),
    [](const auto& info) { return info.param.name; });

struct Stray {
  Join join;  // its job_id is added to the right one
  std::string reason;
};

class StrayPeerTest : public FakeWorkerTest, public testing::WithParamInterface<Stray> {};

TEST_P(StrayPeerTest, IsRefusedAndToldWhy) {
  ASSERT_NO_FATAL_FAILURE(start({.workers = 3, .reducers = 1}, /*fake_joins=*/false));
  const size_t connection = fake_->connect_to_worker(0);
  Join join = GetParam().join;
  join.job_id += fake_->job_id();
  fake_->send_when_open(OutFrame::control(FrameType::kJoin, encode(join)), connection);
  EXPECT_TRUE(
      failed_with(fake_->wait_end(), Code::kInvalidArgument, {"refused by rank 0 (host host-0): ", GetParam().reason}));
  MessageMemory from({8}, 1);
  MessageMemory into({8});
  const auto sent = job_->workers[0]->post(Transfer::Direction::kSend, from.message(2, 0, 0, "x"));
  const auto received = job_->workers[2]->post(Transfer::Direction::kReceive, into.message(0, 0, 0, "x"));
  EXPECT_TRUE(end_of(*sent).ok()) << "the others go on";
  EXPECT_TRUE(end_of(*received).ok());
}

INSTANTIATE_TEST_SUITE_P(All, StrayPeerTest,
                         testing::Values(Stray{{1, 1}, "it belongs to another job"},
                                         Stray{{0, 1, 0, 0, 2}, "it joined rank 2; does something on the way send"},
                                         Stray{{0, 0}, "it joined as rank 0, which is taken or does not exist"},
                                         Stray{{0, 3}, "it joined as rank 3, which is taken or does not exist"}));

TEST_F(FakeWorkerTest, APeerThatCannotBeReachedIsLost) {
  ASSERT_NO_FATAL_FAILURE(start({.workers = 3, .reducers = 1}));
  MessageMemory memory({8});
  const auto sent = job_->workers[0]->post(Transfer::Direction::kSend, memory.message(1, 0, 0, "activations"));
  EXPECT_TRUE(failed_with(end_of(*sent), Code::kWorkerLost,
                          {"rank 1 (host host-1) was lost: ", "in a connection for channels", "\"activations\""}));
}

}  // namespace
}  // namespace jaxhetero
