// What a fabric, or a peer over it, may do to a connection.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/cc/two_sides.h"
#include "xla_ffi/fabric/endpoint.h"
#include "xla_ffi/fabric/slots.h"

namespace jaxhetero {
namespace {

class FabricTest : public TransportTest {
 protected:
  void SetUp() override {
    if (test_provider() != "fake") GTEST_SKIP() << "only the stand-in does what it is told";
    open(Way::kFabric);
  }
};

TEST_F(FabricTest, KeepsOneSlotOfAMessageWithSeveralFrames) {
  constexpr size_t kFrames = 400;
  std::vector<std::shared_ptr<const std::byte>> held;
  server_.on_lent_ = [&](const FrameHeader&, std::shared_ptr<const std::byte> payload) {
    held.push_back(std::move(payload));
    if (held.size() > 8) held.erase(held.begin());
    return true;
  };
  const auto payload = std::make_shared<const Bytes>(pattern(32768));
  client_.call([&] {
    for (size_t i = 0; i < kFrames; ++i) {
      client_.connections_[0]->send(OutFrame::of(push_of(i, 32768), *payload, payload));
    }
  });
  client_.send(OutFrame::control(FrameType::kDescribe, {}));
  ASSERT_TRUE(server_.wait_frames(1));
  EXPECT_LT(server_.call([&] { return server_.context().endpoint.lock()->slot_count(); }), 8 * kSlotsPerSession);
  server_.call([&] { held.clear(); });
}

constexpr size_t kTotalBytes = 131'072;

// As reducers do. Memory that nobody has is written over as soon as its message is posted, which the stand-in reads
// late.
void send_total(Side& side, uint32_t number) {
  const Bytes payload = pattern(kTotalBytes, number);
  side.call([&] {
    LentMemory& memory = *side.context().lent_memory;
    const std::shared_ptr<std::byte> total = memory.allocate(kTotalBytes);
    std::ranges::copy(payload, total.get());
    side.connections_[0]->send(OutFrame::of(push_of(number, kTotalBytes), {total.get(), kTotalBytes}, total));
    side.context().loop.at_end_of_turn(
        [&memory] { std::memset(memory.allocate(kTotalBytes).get(), 0xff, kTotalBytes); });
  });
}

TEST_F(FabricTest, SendsFromWhereTotalsLie) {
  constexpr uint32_t kFrames = 200;
  for (uint32_t i = 0; i < kFrames; ++i) send_total(server_, i);
  ASSERT_TRUE(client_.wait_frames(kFrames));
  for (uint32_t i = 0; i < kFrames; ++i) {
    EXPECT_EQ(client_.call([&] { return client_.frames_[i].payload; }), pattern(kTotalBytes, i));
  }
  EXPECT_EQ(server_.count_of(&Counters::lent_bytes), kFrames * kTotalBytes);
}

// A process may not lock as much memory as it likes.
TEST_F(FabricTest, CopiesWhereNoMoreIsRegistered) {
  const auto set_scarce = fake_fabric<decltype(fake_fabric_set_scarce)>("fake_fabric_set_scarce");
  set_scarce(true);
  for (uint32_t i : {0, 1}) send_total(server_, i);
  ASSERT_TRUE(client_.wait_frames(2));
  set_scarce(false);
  for (uint32_t i : {0, 1}) {
    EXPECT_EQ(client_.call([&] { return client_.frames_[i].payload; }), pattern(kTotalBytes, i));
  }
  const std::optional<Event> line = server_.log_.next(milliseconds(0));
  ASSERT_TRUE(line.has_value());
  EXPECT_NE(line->text.find("messages over the fabric are copied: cannot register 8388608 bytes"), std::string::npos);
  EXPECT_FALSE(server_.log_.next(milliseconds(0)).has_value());  // it is said once
  EXPECT_EQ(server_.count_of(&Counters::lent_bytes), 0u);
}

TEST_F(FabricTest, CopiesWhatHasNoOwnerOrIsElsewhere) {
  const auto elsewhere = std::make_shared<const Bytes>(pattern(kTotalBytes));
  client_.call([&] {
    const std::shared_ptr<std::byte> lent = client_.context().lent_memory->allocate(kTotalBytes);
    std::ranges::copy(*elsewhere, lent.get());
    client_.connections_[0]->send(OutFrame::of(push_of(0, kTotalBytes), *elsewhere, elsewhere));
    client_.connections_[0]->send(OutFrame::of(push_of(1, kTotalBytes), {lent.get(), kTotalBytes}, nullptr));
    client_.context().loop.at_end_of_turn([lent] {});  // it is written by then
  });
  ASSERT_TRUE(server_.wait_frames(2));
  for (size_t i : {0, 1}) EXPECT_EQ(server_.call([&] { return server_.frames_[i].payload; }), *elsewhere);
  EXPECT_EQ(client_.count_of(&Counters::lent_bytes), 0u);
}

TEST_F(FabricTest, DropsAMessageThatNamesNoConnection) {
  struct Nobody : FabricListener {
    void on_message(FabricMessage /*message*/) override {}
    void on_sent(uint64_t /*number*/) override {}
    void on_progress() override {}
    void on_broken(const Status& /*why*/) override {}
  } stranger;
  client_.call([&] {
    const auto endpoint = client_.context().endpoint.lock();
    const auto name = server_.context().endpoint.lock()->name();
    Result<uint64_t> session = endpoint->open_session(stranger);
    Result<fi::Address> address = endpoint->add_peer(name);
    FabricSlot& slot = **endpoint->take_slot();
    EXPECT_TRUE(address.ok() && session.ok());
    while (!*endpoint->send(slot, 1000, *address, *session)) {
    }
  });
  EXPECT_TRUE(server_.wait([&] { return server_.context().counters->fabric_unknown_count == 1; }));
  expect_works(client_);
}

TEST_F(FabricTest, EndsWhereAMessageIsLost) {
  fake_fabric<decltype(fake_fabric_fail)>("fake_fabric_fail")(1, EIO);
  client_.send(OutFrame::control(FrameType::kDescribe, bytes_of("lost")));
  EXPECT_NE(client_.wait_closed().message().find("a message over the fabric was lost"), std::string::npos);
  EXPECT_FALSE(server_.wait_closed().ok());
  EXPECT_EQ(client_.count_of(&Counters::fabric_error_count), 1u);
}

// An owner lets go of a connection as it hears of its end: nothing touches that any more.
TEST_F(FabricTest, EndsOfWhatItsOwnerLetsGoOf) {
  for (Side* side : {&client_, &server_}) side->call([&] { side->drops_ = true; });
  fake_fabric<decltype(fake_fabric_fail)>("fake_fabric_fail")(1, EIO);
  client_.send(OutFrame::control(FrameType::kDescribe, bytes_of("lost")));
  EXPECT_NE(client_.wait_closed().message().find("a message over the fabric was lost"), std::string::npos);
  EXPECT_FALSE(server_.wait_closed().ok());
  for (Side* side : {&client_, &server_}) EXPECT_TRUE(side->call([&] { return side->connections_.empty(); }));
}

// A fabric without room for ever: the end has its deadline all the same.
TEST_F(FabricTest, FlushesForALimitedTime) {
  const auto set_full = fake_fabric<decltype(fake_fabric_set_full)>("fake_fabric_set_full");
  set_full(true);
  const auto start = EventLoop::Clock::now();
  client_.call([&] {
    client_.connections_[0]->send(OutFrame::control(FrameType::kFault, bytes_of("never")));
    client_.connections_[0]->close_after_flush();
  });
  EXPECT_TRUE(client_.wait_closed().ok());
  set_full(false);
  EXPECT_LT(EventLoop::Clock::now() - start, milliseconds(5000));
  EXPECT_GT(client_.count_of(&Counters::fabric_retry_count), 1u);
  EXPECT_FALSE(server_.wait_closed().ok());
}

TEST_F(FabricTest, ClosesAllThatItOpened) {
  const auto open_count = fake_fabric<decltype(fake_fabric_open_count)>("fake_fabric_open_count");
  EXPECT_GT(open_count(), 0);
  client_.call([&] { client_.connections_[0]->close(); });
  EXPECT_FALSE(server_.wait_closed().ok());
  EXPECT_EQ(open_count(), 0);
}

TEST_F(TransportTest, TakesTheDevicesOfAFabricInTurn) {
  if (test_provider() != "fake") GTEST_SKIP() << "only the stand-in has two devices everywhere";
  server_.call([&] { server_.context().strand = 1; });
  open(Way::kFabric);
  EXPECT_EQ(client_.call([&] { return client_.context().endpoint.lock()->domain(); }), "fake0");
  EXPECT_EQ(server_.call([&] { return server_.context().endpoint.lock()->domain(); }), "fake1");
  expect_works(client_);
  server_.send(OutFrame::control(FrameType::kDescribe, bytes_of("and back")));
  EXPECT_TRUE(client_.wait_frames(1));
}

// To open a fabric may take longer than a peer waits in a handshake.
TEST_F(TransportTest, OffersAFabricWhenAllHandshakesAreOver) {
  client_.use_fabric(test_provider());
  server_.use_fabric("");
  const RawServer other;
  client_.connect(other.address_);
  std::optional<RawPeer> in_handshake(Fd(::accept(other.socket_.get(), nullptr, nullptr)));
  client_.connect(server_.listen());
  ASSERT_TRUE(client_.wait_open());
  client_.call([&] { client_.connections_[1]->offer_carrier(); });
  expect_works(client_, 1);
  EXPECT_TRUE(client_.call([&] { return client_.context().endpoint.expired(); }));
  in_handshake.reset();
  for (Side* side : {&client_, &server_}) {
    EXPECT_TRUE(side->wait([&] { return side->context().counters->fabric_connection_count == 1; }));
  }
  expect_works(client_, 1);
}

Bytes read_frame(RawPeer& peer) {
  Bytes frame = peer.read(kHeaderBytes);
  const Result<FrameHeader> header = decode(std::span(frame).first<kHeaderBytes>());
  const Bytes payload = peer.read(header.value().payload_bytes);
  frame.insert(frame.end(), payload.begin(), payload.end());
  return frame;
}

// A client that has offered its fabric to a server, and somebody between them who passes on what a test wants.
class BetweenTest : public TransportTest {
 protected:
  void SetUp() override {
    if (test_provider() != "fake") GTEST_SKIP() << "this counts on how late the stand-in is";
    client_.use_fabric(test_provider());
    server_.use_fabric("");
    to_server_.emplace(server_.listen());
    const RawServer between;
    client_.connect(between.address_);
    to_client_.emplace(Fd(::accept(between.socket_.get(), nullptr, nullptr)));
    to_server_->send(to_client_->read(44));
    to_client_->send(to_server_->read(76));
    to_server_->send(to_client_->read(32));
    ASSERT_TRUE(client_.wait_open());
    ASSERT_TRUE(server_.wait_open());
    client_.call([&] { client_.connections_[0]->offer_carrier(); });
    offer_ = read_frame(*to_client_);
  }

  std::optional<RawPeer> to_server_;
  std::optional<RawPeer> to_client_;
  Bytes offer_;
};

// Messages may overtake the peer's word on the socket that it sends them, and fill all slots.
TEST_F(BetweenTest, TellsOfMessagesThatCameBeforeItMovedToTheFabric) {
  constexpr size_t kFrames = 3 * kSlotsPerSession;
  to_server_->send(offer_);
  const Bytes moved = read_frame(*to_server_);
  // No two fit in a message, and all messages that there is room for are read in one turn.
  const auto payload = std::make_shared<const Bytes>(pattern(131'072));
  server_.call([&] {
    for (size_t i = 0; i < kFrames; ++i) {
      server_.connections_[0]->send(OutFrame::of(push_of(i, 131'072), *payload, payload));
    }
  });
  ASSERT_TRUE(server_.wait([&] { return server_.connections_[0]->delivered_frame_count() == 1 + kSlotsPerSession; }));
  for (int turn = 0; turn < 100; ++turn) client_.call([] {});  // completions are late by some turns
  to_client_->send(moved);
  to_server_->send(read_frame(*to_client_));
  EXPECT_TRUE(client_.wait_frames(kFrames));
}

// The socket, which tells how many messages there are, may be faster than the fabric.
TEST_F(BetweenTest, WaitsForTheLastMessagesOfAPeerForAsLongAsTheJobDoes) {
  client_.call([&] { client_.context().message_patience = kPatience; });
  to_server_->send(offer_);
  to_client_->send(read_frame(*to_server_));
  to_server_->send(read_frame(*to_client_));
  const uint64_t message_count = 1;
  to_client_->send(std::as_bytes(std::span(&message_count, 1)));
  ::shutdown(to_client_->socket_.get(), SHUT_WR);
  std::this_thread::sleep_for(milliseconds(2500));
  server_.send(OutFrame::control(FrameType::kFault, bytes_of("the last word")));
  ASSERT_TRUE(client_.wait_frames(1));
  EXPECT_EQ(client_.call([&] { return client_.frames_[0].payload; }), bytes_of("the last word"));
}

// Only who was offered a fabric refuses it: whoever has accepted one sends over it from now on.
TEST_F(BetweenTest, EndsAPeerThatRefusesItsOwnOffer) {
  const OutFrame refusal = OutFrame::control(FrameType::kNoFabric, encode(std::string_view("no")));
  Bytes both = offer_;
  both.insert(both.end(), refusal.header.begin(), refusal.header.end());
  both.insert(both.end(), refusal.payload.begin(), refusal.payload.end());
  to_server_->send(both);
  EXPECT_NE(server_.wait_closed().message().find("it refused a fabric that it was not offered"), std::string::npos);
}

}  // namespace
}  // namespace jaxhetero
