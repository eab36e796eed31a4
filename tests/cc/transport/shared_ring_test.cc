// Memory that two processes share: the bytes in it, who is woken, and what nobody takes from a stranger.
#include "xla_ffi/transport/shared_ring.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <semaphore>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cc/two_sides.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/lent_memory.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

using Channel = std::unique_ptr<SharedRing>;

Channel create() { return std::move(*SharedRing::create()); }
Channel open(const SharedRing& of) { return std::move(*SharedRing::open(of.offer())); }

size_t write(SharedRing& channel, std::span<const std::byte> bytes) {
  const iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  return *channel.write(std::span(&piece, 1));
}
size_t read(SharedRing& channel, std::span<std::byte> bytes) {
  const iovec piece{bytes.data(), bytes.size()};
  const size_t count = *channel.read(std::span(&piece, 1));
  channel.release();
  return count;
}

// As much as fits.
size_t fill(SharedRing& channel) {
  const Bytes bytes(size_t{1} << 24);
  return write(channel, bytes);
}

// A descriptor's file as the peer could change it behind our back: everything is nonsense.
void scribble(const SharedOffer& offer) {
  const Fd memory(::open(("/proc/self/fd/" + std::to_string(offer.descriptor)).c_str(), O_RDWR | O_CLOEXEC));
  struct stat about{};
  ASSERT_EQ(fstat(memory.get(), &about), 0);
  const Bytes rubbish(static_cast<size_t>(about.st_size), std::byte{0x7f});
  ASSERT_EQ(pwrite(memory.get(), rubbish.data(), rubbish.size(), 0), about.st_size);
}

// --- Bytes.

// In pieces of any size, by two threads that sleep as connections do: nothing is lost, and nobody sleeps for ever.
void send_all(SharedRing& channel, std::span<const std::byte> bytes, std::counting_semaphore<>& own_calls,
              std::counting_semaphore<>& peer_calls) {
  std::mt19937 random(1);
  while (!bytes.empty()) {
    const size_t piece = std::min<size_t>(bytes.size(), random() % 300000 + 1);
    const size_t sent = write(channel, bytes.first(piece));
    bytes = bytes.subspan(sent);
    if (sent > 0 && channel.reader_slept()) peer_calls.release();
    if (sent > 0 || !channel.sleep_for_room()) continue;
    own_calls.acquire();
  }
}

void receive_all(SharedRing& channel, std::span<std::byte> bytes, std::counting_semaphore<>& own_calls,
                 std::counting_semaphore<>& peer_calls) {
  std::mt19937 random(2);
  while (!bytes.empty()) {
    const size_t piece = std::min<size_t>(bytes.size(), random() % 300000 + 1);
    const size_t got = read(channel, bytes.first(piece));
    bytes = bytes.subspan(got);
    if (got > 0 && channel.writer_slept()) peer_calls.release();
    if (got > 0 || !channel.sleep_for_bytes()) continue;
    own_calls.acquire();
  }
}

class DirectionTest : public testing::TestWithParam<bool> {};

TEST_P(DirectionTest, CarriesEveryByteInOrder) {
  const Channel maker = create();
  const Channel other = open(*maker);
  SharedRing& from = GetParam() ? *maker : *other;
  SharedRing& to = GetParam() ? *other : *maker;
  const Bytes sent = pattern(size_t{50} << 20);
  Bytes got(sent.size());
  std::counting_semaphore<> sender_calls(0);
  std::counting_semaphore<> receiver_calls(0);
  std::thread sender([&] { send_all(from, sent, sender_calls, receiver_calls); });
  receive_all(to, got, receiver_calls, sender_calls);
  sender.join();
  EXPECT_TRUE(are_same(sent, got));
  EXPECT_EQ(from.unread_bytes(), 0u);
}

INSTANTIATE_TEST_SUITE_P(FromMaker, DirectionTest, testing::Bool());

TEST(SharedRing, TellsWhenAReaderIsToBeWoken) {
  const Channel writer = create();
  const Channel reader = open(*writer);
  const Bytes bytes = pattern(100);
  write(*writer, bytes);
  EXPECT_FALSE(writer->reader_slept()) << "nobody sleeps";
  EXPECT_FALSE(reader->sleep_for_bytes()) << "there are some";
  Bytes got(200);
  EXPECT_EQ(read(*reader, got), 100u);
  EXPECT_EQ(read(*reader, got), 0u);
  EXPECT_TRUE(reader->sleep_for_bytes());
  write(*writer, bytes);
  EXPECT_TRUE(writer->reader_slept());
  EXPECT_FALSE(writer->reader_slept()) << "once is enough";
}

TEST(SharedRing, TellsWhenAWriterIsToBeWoken) {
  const Channel writer = create();
  const Channel reader = open(*writer);
  EXPECT_FALSE(writer->sleep_for_room()) << "there is some";
  const size_t capacity = fill(*writer);
  EXPECT_EQ(fill(*writer), 0u);
  EXPECT_EQ(writer->unread_bytes(), capacity);
  EXPECT_TRUE(writer->sleep_for_room());
  Bytes got(capacity / 2 + 1);
  read(*reader, std::span(got).first(100));
  EXPECT_FALSE(reader->writer_slept()) << "a little room is not worth it";
  read(*reader, got);
  EXPECT_TRUE(reader->writer_slept());
  EXPECT_FALSE(reader->writer_slept()) << "once is enough";
}

// What was read may stand for something that has to last until the reader is done.
TEST(SharedRing, IsAsFullAsBeforeUntilWhatWasReadIsReleased) {
  const Channel maker = create();
  const Channel other = open(*maker);
  const size_t size = fill(*maker);
  Bytes bytes(size);
  const iovec piece{bytes.data(), bytes.size()};
  EXPECT_EQ(*other->read(std::span(&piece, 1)), size);
  EXPECT_EQ(maker->unread_bytes(), size);
  EXPECT_EQ(fill(*maker), 0u);
  other->release();
  EXPECT_EQ(maker->unread_bytes(), 0u);
  EXPECT_EQ(fill(*maker), size);
}

TEST(SharedRing, BelievesNoPositionsOfThePeer) {
  const Channel channel = create();
  scribble(channel->offer());
  std::byte byte{};
  const iovec piece{&byte, 1};
  EXPECT_EQ(channel->read(std::span(&piece, 1)).status().code(), Code::kProtocol);
  EXPECT_EQ(channel->write(std::span(&piece, 1)).status().code(), Code::kProtocol);
}

// --- Offers.

struct BadOffer {
  std::string name;
  std::function<Fd(SharedOffer&)> change;  // keeps open what the offer then names
};

class BadOfferTest : public testing::TestWithParam<BadOffer> {};

TEST_P(BadOfferTest, IsRefused) {
  const Channel channel = create();
  SharedOffer offer = channel->offer();
  const Fd kept = GetParam().change(offer);
  EXPECT_FALSE(SharedRing::open(offer).ok());
  EXPECT_TRUE(SharedRing::open(channel->offer()).ok());
}

size_t size_of(const SharedOffer& offer) {
  struct stat about{};
  EXPECT_EQ(fstat(static_cast<int>(offer.descriptor), &about), 0);
  return static_cast<size_t>(about.st_size);
}

Fd naming(Fd file, SharedOffer& offer) {
  offer.descriptor = static_cast<uint32_t>(file.get());
  return file;
}

// Memory of the right size that could shrink under its reader, or of another size.
Fd other_memory(SharedOffer& offer, size_t size, int seals) {
  Fd memory(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(memory.get(), static_cast<off_t>(size)), 0);
  EXPECT_EQ(pwrite(memory.get(), offer.key.data(), offer.key.size(), 0), ssize_t{kSharedKeyBytes});
  EXPECT_EQ(fcntl(memory.get(), F_ADD_SEALS, seals), 0);
  return naming(std::move(memory), offer);
}

Fd file_on_disk(SharedOffer& offer) {
  std::string path = testing::TempDir() + "/jaxhetero_XXXXXX";
  Fd file(mkstemp(path.data()));
  unlink(path.c_str());
  EXPECT_EQ(ftruncate(file.get(), static_cast<off_t>(size_of(offer))), 0);
  return naming(std::move(file), offer);
}

Fd pipe_end(SharedOffer& offer) {
  int ends[2];
  EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const Fd other(ends[1]);
  return naming(Fd(ends[0]), offer);
}

INSTANTIATE_TEST_SUITE_P(
    All, BadOfferTest,
    testing::Values(BadOffer{"another_key", [](SharedOffer& o) { return o.key[7] ^= std::byte{1}, Fd(); }},
                    BadOffer{"no_process", [](SharedOffer& o) { return o.process = 0x7fffffff, Fd(); }},
                    BadOffer{"no_descriptor", [](SharedOffer& o) { return o.descriptor = 1000000, Fd(); }},
                    BadOffer{"pipe", pipe_end}, BadOffer{"file", file_on_disk},
                    BadOffer{"may_shrink", [](SharedOffer& o) { return other_memory(o, size_of(o), F_SEAL_GROW); }},
                    BadOffer{"too_small", [](SharedOffer& o) { return other_memory(o, 4096, F_SEAL_SHRINK); }}),
    [](const auto& info) { return info.param.name; });

// --- Connections that move there.

using MoveTest = TransportTest;

TEST_F(MoveTest, KeepsTheOrderOfFrames) {
  constexpr size_t kFrames = 500;
  const Bytes payload = pattern(5000);
  const auto send_all = [&](Side& side) {
    for (size_t i = 0; i < kFrames; ++i) side.connections_[0]->send(OutFrame::of(push_of(i, 5000), payload, nullptr));
  };
  open();
  server_.on_frame_ = [&, begun = false](Connection&, const FrameHeader&) mutable {
    if (!std::exchange(begun, true)) send_all(server_);
    return Status();
  };
  client_.call([&] {
    send_all(client_);
    client_.connections_[0]->offer_carrier();
    send_all(client_);
  });
  ASSERT_TRUE(server_.wait_frames(2 * kFrames));
  ASSERT_TRUE(client_.wait_frames(kFrames));
  for (Side* side : {&server_, &client_}) {
    // All frames may be sent before the other side has heard of the move.
    EXPECT_TRUE(side->wait([&] { return side->context().counters->shared_connection_count == 1; }));
    side->call([&] {
      for (size_t i = 0; i < side->frames_.size(); ++i) {
        EXPECT_EQ(side->frames_[i].header.offset, i % kFrames);
        EXPECT_TRUE(are_same(side->frames_[i].payload, payload));
      }
    });
  }
}

TEST_F(MoveTest, StaysOnTheSocketBetweenTwoAddresses) {
  client_.connect(server_.listen("127.0.0.2"));
  ASSERT_TRUE(client_.wait_open() && server_.wait_open());
  client_.call([&] { client_.connections_[0]->offer_carrier(); });
  expect_works(client_);
  EXPECT_EQ(client_.count_of(&Counters::sent_bytes), 44u + 32 + kHeaderBytes + 10) << "it offered something";
}

// A peer of our own making that has proved itself.
class GuestTest : public TransportTest {
 protected:
  void SetUp() override {
    guest_.prove_token("secret");
    ASSERT_TRUE(server_.wait_open());
  }
  void offer(const Bytes& offer) { guest_.send(frame_bytes(header_of(FrameType::kShare), offer)); }
  void say_shared(const Bytes& lent_memory = {}) {
    guest_.send(frame_bytes(header_of(FrameType::kShared), lent_memory));
  }
  // Through both steps.
  void move(const Bytes& lent_memory = {}) {
    offer(encode(channel_->offer()));
    const Bytes answer = guest_.read(kHeaderBytes + encode(SharedOffer()).size());
    const auto lends = std::span(answer).subspan(kHeaderBytes);
    ASSERT_EQ(answer, frame_bytes(header_of(FrameType::kShared), lends));
    ASSERT_TRUE(BorrowedMemory::open(*decode_shared_offer(lends)).ok());
    say_shared(lent_memory);
    ASSERT_TRUE(server_.wait([&] { return server_.context().counters->shared_connection_count == 1; }));
  }
  void call() { guest_.send(Bytes(1)); }
  void expect_shown_out() {
    EXPECT_EQ(server_.wait_closed().code(), Code::kProtocol) << server_.wait_closed().message();
    EXPECT_EQ(server_.count_of(&Counters::bad_frame_count), 1u);
  }

  RawPeer guest_{server_.listen()};
  Channel channel_ = create();
};

TEST_F(GuestTest, IsHeardOnTheSocketWhenItsOfferLeadsNowhere) {
  SharedOffer elsewhere = channel_->offer();
  elsewhere.key[0] ^= std::byte{1};
  offer(encode(elsewhere));
  guest_.send(frame_bytes(header_of(FrameType::kDescribe), bytes_of("still here")));
  ASSERT_TRUE(server_.wait_frames(1));
  EXPECT_EQ(server_.count_of(&Counters::sent_bytes), 76u) << "there is nothing to answer";
}

TEST_F(GuestTest, IsHeardInTheChannelWhenItsArenaLeadsNowhere) {
  SharedOffer nowhere;
  nowhere.process = 0x7fffffff;
  move(encode(nowhere));
  const uint64_t sent_before = server_.count_of(&Counters::sent_bytes);
  write(*channel_, frame_bytes(header_of(FrameType::kDescribe), bytes_of("still here")));
  call();
  ASSERT_TRUE(server_.wait_frames(1));
  EXPECT_EQ(server_.count_of(&Counters::sent_bytes), sent_before) << "there is nothing that it reads";
}

TEST_F(GuestTest, MayNotLendRubbish) {
  move(bytes_of("rubbish"));
  expect_shown_out();
}

TEST_F(GuestTest, MayNotOfferRubbish) {
  offer(bytes_of("rubbish"));
  expect_shown_out();
}

TEST_F(GuestTest, MayNotOfferTwice) {
  move();
  const Bytes again = frame_bytes(header_of(FrameType::kShare), encode(channel_->offer()));
  write(*channel_, again);
  call();
  expect_shown_out();
}

TEST_F(GuestTest, MayNotMoveWhereNothingIs) {
  say_shared();
  expect_shown_out();
}

TEST_F(GuestTest, MayNotWriteAnything) {
  move();
  scribble(channel_->offer());
  call();
  expect_shown_out();
}

// The word that there is room may come in one piece with the frame that moves the peer off the socket.
TEST_F(GuestTest, MayWakeAWriterAsItMoves) {
  offer(encode(channel_->offer()));
  SharedOffer nowhere;
  nowhere.process = 0x7fffffff;
  const Bytes lent_memory = encode(nowhere);
  ASSERT_EQ(guest_.read(kHeaderBytes + lent_memory.size()).size(), kHeaderBytes + lent_memory.size());
  const auto owner = std::make_shared<const Bytes>(pattern(size_t{1} << 20));
  const Bytes& payload = *owner;
  server_.send(OutFrame::of(push_of(0, 1 << 20), payload, owner));
  server_.call([] {});  // the turn in which it fills the channel has ended
  Bytes frame(kHeaderBytes + payload.size());
  size_t come = read(*channel_, frame);
  ASSERT_LT(come, frame.size());
  ASSERT_TRUE(channel_->writer_slept());
  Bytes last_words = frame_bytes(header_of(FrameType::kShared), lent_memory);
  last_words.push_back({});
  guest_.send(last_words);
  const auto deadline = EventLoop::Clock::now() + kPatience;
  while (come < frame.size() && EventLoop::Clock::now() < deadline) {
    come += read(*channel_, std::span(frame).subspan(come));
    if (channel_->writer_slept()) call();
    std::this_thread::yield();
  }
  EXPECT_TRUE(frame == frame_bytes(push_of(0, 1 << 20), payload)) << come << " bytes have come";
}

// What a peer wrote before it died counts, as with a socket.
TEST_F(GuestTest, IsHeardOutAfterItsEnd) {
  move();
  for (uint64_t i = 0; i < 3; ++i) write(*channel_, frame_bytes(header_of(FrameType::kDescribe, i), bytes_of("last")));
  guest_.socket_.reset();
  EXPECT_EQ(server_.wait_closed().message(), "it closed the connection");
  EXPECT_EQ(server_.call([&] { return server_.frames_.size(); }), 3u);
}

// Calls for nothing cost a look, and no more.
TEST_F(GuestTest, MayCallForNothing) {
  move();
  for (int i = 0; i < 1000; ++i) call();
  write(*channel_, frame_bytes(header_of(FrameType::kDescribe), bytes_of("something")));
  call();
  EXPECT_TRUE(server_.wait_frames(1));
}

}  // namespace
}  // namespace jaxhetero
