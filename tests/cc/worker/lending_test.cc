// Payloads that stay where they are, because the peer reads them there.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <semaphore>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "tests/cc/two_sides.h"
#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/lent_memory.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {
namespace {

constexpr uint32_t kBytes = 10000;

// In the lent_memory of a side's process; to be asked for on its loop's thread.
std::shared_ptr<std::byte> lendable(Side& side, const Bytes& payload = pattern(kBytes)) {
  auto memory = side.context().lent_memory->allocate(payload.size());
  std::ranges::copy(payload, memory.get());
  return memory;
}

OutFrame frame_of(const std::shared_ptr<std::byte>& memory, uint64_t offset = 0) {
  return OutFrame::of(push_of(offset, kBytes), {memory.get(), kBytes}, memory);
}

class LendingTest : public TransportTest {
 protected:
  // Both sides read what the other lends.
  void open_both() {
    ASSERT_NO_FATAL_FAILURE(open(Way::kMemory));
    for (Side* side : {&client_, &server_}) {
      ASSERT_TRUE(side->wait([side] {
        side->connections_[0]->send(frame_of(lendable(*side)));
        return side->context().counters->lent_bytes > 0;
      }));
    }
    for (Side* side : {&client_, &server_}) side->send(OutFrame::control(FrameType::kDescribe, {}));
    for (Side* side : {&client_, &server_}) {
      ASSERT_TRUE(side->wait(
          [side] { return !side->frames_.empty() && side->frames_.back().header.type == FrameType::kDescribe; }));
      side->call([side] { side->frames_.clear(); });
    }
  }

  // Sends it, and keeps no hold of it.
  std::weak_ptr<const void> lend(Side& side, const Bytes& payload = pattern(kBytes)) {
    return side.call([&] {
      auto memory = lendable(side, payload);
      side.connections_[0]->send(frame_of(memory));
      return std::weak_ptr<const void>(memory);
    });
  }
};

TEST_F(LendingTest, ArrivesLikeAnyOther) {
  ASSERT_NO_FATAL_FAILURE(open_both());
  for (Side* side : {&client_, &server_}) {
    Side& other = side == &client_ ? server_ : client_;
    const uint64_t lent_before = side->count_of(&Counters::lent_bytes);
    const uint64_t sent_before = side->count_of(&Counters::sent_bytes);
    const uint64_t received_before = other.count_of(&Counters::received_bytes);
    const Bytes payload = pattern(kBytes, 7);
    lend(*side, payload);
    ASSERT_TRUE(other.wait_frames(1));
    EXPECT_EQ(other.call([&] { return other.frames_[0].payload; }), payload);
    EXPECT_EQ(other.call([&] { return other.frames_[0].header.count; }), kBytes);
    EXPECT_EQ(side->count_of(&Counters::lent_bytes) - lent_before, kBytes);
    EXPECT_EQ(side->count_of(&Counters::sent_bytes) - sent_before, kBytes + kHeaderBytes);
    EXPECT_EQ(other.count_of(&Counters::received_bytes) - received_before, kBytes + kHeaderBytes);
  }
}

TEST_F(LendingTest, IsReadWhereItIs) {
  ASSERT_NO_FATAL_FAILURE(open_both());
  std::shared_ptr<const std::byte> seen;
  server_.on_lent_ = [&](const FrameHeader& header, std::shared_ptr<const std::byte> payload) -> Result<bool> {
    EXPECT_EQ(header.count, kBytes);
    seen = std::move(payload);
    return true;
  };
  const auto memory = client_.call([this] {
    auto lent = lendable(client_);
    client_.connections_[0]->send(frame_of(lent));
    return lent;
  });
  ASSERT_TRUE(server_.wait([&] { return seen != nullptr; }));
  ASSERT_NO_FATAL_FAILURE(expect_works(client_));
  EXPECT_EQ(server_.call([this] { return server_.frames_.size(); }), 1u) << "neither its header nor itself";
  EXPECT_TRUE(std::ranges::equal(std::span(seen.get(), kBytes), pattern(kBytes)));
  memory.get()[5] = std::byte{0x11};
  EXPECT_EQ(seen.get()[5], std::byte{0x11});
  client_.call([this] { client_.connections_[0]->close(); });
  server_.call([this] { server_.connections_.clear(); });
  EXPECT_EQ(seen.get()[5], std::byte{0x11}) << "it is there for as long as its reader";
}

TEST_F(LendingTest, EndsWithTheStatusOfItsReader) {
  ASSERT_NO_FATAL_FAILURE(open_both());
  server_.on_lent_ = [](const FrameHeader&, const auto&) -> Result<bool> { return Status(Code::kMismatch, "no"); };
  lend(client_);
  EXPECT_EQ(server_.wait_closed().code(), Code::kMismatch);
}

// Memory whose frames nobody has read is not used for anything else.
class UnreadTest : public LendingTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(open_both());
    thread_ = std::thread([this] {
      server_.call([this] {
        stopped_.release();
        go_on_.acquire();
      });
    });
    stopped_.acquire();
  }
  void go_on() {
    go_on_.release();
    thread_.join();
  }

  std::binary_semaphore stopped_{0};
  std::binary_semaphore go_on_{0};
  std::thread thread_;
};

TEST_F(UnreadTest, IsKeptUntilThePeerHasReadIt) {
  const std::weak_ptr<const void> lent = lend(client_);
  const uint64_t sent = client_.call([this] { return client_.connections_[0]->queued_frame_count(); });
  ASSERT_TRUE(client_.wait([&] { return client_.connections_[0]->written_frame_count() == sent; }));
  client_.send(OutFrame::control(FrameType::kDescribe, {}));
  EXPECT_FALSE(client_.call([&] { return lent.expired(); }));
  go_on();
  ASSERT_TRUE(server_.wait_frames(2));
  EXPECT_EQ(server_.call([this] { return server_.frames_[0].payload; }), pattern(kBytes));
  ASSERT_TRUE(client_.wait([&] {
    client_.connections_[0]->send(OutFrame::control(FrameType::kDescribe, {}));
    return lent.expired();
  }));
}

TEST_F(UnreadTest, HasPassedOnceThePeerHasReadIt) {
  const auto passed = [this] { return client_.connections_[0]->passed_bytes(); };
  const uint64_t before = client_.call(passed);
  lend(client_);
  const uint64_t sent = client_.call([this] { return client_.connections_[0]->queued_frame_count(); });
  ASSERT_TRUE(client_.wait([&] { return client_.connections_[0]->written_frame_count() == sent; }));
  EXPECT_EQ(client_.call(passed), before);
  go_on();
  ASSERT_TRUE(server_.wait_frames(1));
  EXPECT_TRUE(client_.wait([&] { return passed() == before + kHeaderBytes + kBytes; }));
}

TEST_F(UnreadTest, IsKeptWhenTheConnectionEnds) {
  const std::weak_ptr<const void> lent = lend(client_);
  const uint64_t sent = client_.call([this] { return client_.connections_[0]->queued_frame_count(); });
  ASSERT_TRUE(client_.wait([&] { return client_.connections_[0]->written_frame_count() == sent; }));
  client_.call([this] { client_.connections_[0]->close(); });
  client_.call([this] { lendable(client_, pattern(kBytes, 2)); });
  EXPECT_FALSE(client_.call([&] { return lent.expired(); }));
  go_on();
  ASSERT_TRUE(server_.wait_frames(1));
  EXPECT_EQ(server_.call([this] { return server_.frames_[0].payload; }), pattern(kBytes));
  client_.call([this] { client_.context().unread.clear(); });
  EXPECT_TRUE(client_.call([&] { return lent.expired(); }));
}

// --- What is copied into the channel all the same.

struct Copied {
  std::string name;
  std::function<OutFrame(Side&)> frame;
};

class CopiedTest : public LendingTest, public testing::WithParamInterface<Copied> {};

TEST_P(CopiedTest, Arrives) {
  ASSERT_NO_FATAL_FAILURE(open_both());
  const uint64_t before = client_.count_of(&Counters::lent_bytes);
  client_.call([this] { client_.connections_[0]->send(GetParam().frame(client_)); });
  ASSERT_TRUE(server_.wait_frames(1));
  EXPECT_EQ(server_.call([this] { return server_.frames_[0].payload.size(); }),
            server_.call([this] { return server_.frames_[0].header.payload_bytes; }));
  EXPECT_EQ(client_.count_of(&Counters::lent_bytes), before);
}

OutFrame of_few_bytes(Side& side) {
  const auto memory = lendable(side);
  return OutFrame::of(push_of(0, 100), {memory.get(), 100}, memory);
}

OutFrame of_other_memory(Side&) {
  const auto memory = std::make_shared<const Bytes>(pattern(kBytes));
  return OutFrame::of(push_of(0, kBytes), *memory, memory);
}

OutFrame of_two_pieces(Side& side) {
  struct Pieces {
    std::array<std::shared_ptr<std::byte>, 2> memory;
    Leaves leaves;
  };
  const auto pieces = std::make_shared<Pieces>(Pieces{{lendable(side), lendable(side)}, {}});
  for (const auto& memory : pieces->memory) pieces->leaves.append(memory.get(), kBytes);
  OutFrame frame = OutFrame::gather(push_of(0, kBytes), pieces->leaves, kBytes / 2);
  frame.owner = pieces;
  return frame;
}

INSTANTIATE_TEST_SUITE_P(All, CopiedTest,
                         testing::Values(Copied{"few_bytes", of_few_bytes}, Copied{"other_memory", of_other_memory},
                                         Copied{"two_pieces", of_two_pieces}),
                         [](const auto& info) { return info.param.name; });

// Every byte is to pass under a checksum.
TEST(LendingWithChecksums, IsNotDone) {
  Side server("secret", true);
  Side client("secret", true);
  client.connect(server.listen());
  ASSERT_TRUE(client.wait_open());
  client.call([&] { client.connections_[0]->offer_carrier(); });
  ASSERT_TRUE(client.wait([&] { return client.context().counters->shared_connection_count == 1; }));
  EXPECT_FALSE(client.call([&] { return client.context().lent_memory->offer().has_value(); }));
  for (uint64_t offset = 0; offset < 10; ++offset) {
    client.call([&] { client.connections_[0]->send(frame_of(lendable(client), offset)); });
  }
  ASSERT_TRUE(server.wait_frames(10));
  EXPECT_EQ(client.count_of(&Counters::lent_bytes), 0u);
}

// --- What no peer of ours sends.

OutFrame lent_at(uint32_t place) {
  FrameHeader header = push_of(0, kBytes);
  header.is_lent = true;
  header.place = place;
  OutFrame frame;
  frame.header = encode(header);
  return frame;
}

OutFrame shared_with(size_t bytes) { return OutFrame::control(FrameType::kShared, Bytes(bytes)); }

struct Lie {
  std::string name;
  Way way;
  std::function<OutFrame()> frame;
  std::string words;
};

class LieTest : public LendingTest, public testing::WithParamInterface<Lie> {};

TEST_P(LieTest, EndsTheConnection) {
  if (GetParam().way == Way::kSocket) {
    ASSERT_NO_FATAL_FAILURE(open());
  } else {
    ASSERT_NO_FATAL_FAILURE(open_both());
  }
  client_.send(GetParam().frame());
  const Status why = server_.wait_closed();
  EXPECT_EQ(why.code(), Code::kProtocol);
  EXPECT_NE(why.message().find(GetParam().words), std::string::npos) << why.message();
}

INSTANTIATE_TEST_SUITE_P(
    All, LieTest,
    testing::Values(
        Lie{"lends_nothing", Way::kSocket, [] { return lent_at(0); }, "has not offered"},
        Lie{"lends_what_it_does_not_have", Way::kMemory, [] { return lent_at(0xffffffff); }, "has not offered"},
        Lie{"reads_nothing", Way::kSocket, [] { return OutFrame::control(FrameType::kReads, {}); }, "was not offered"},
        Lie{"shares_twice", Way::kMemory, [] { return shared_with(0); }, "shared memory twice"},
        Lie{"reads_with_a_payload", Way::kMemory, [] { return OutFrame::control(FrameType::kReads, Bytes(3)); },
            "malformed"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace jaxhetero
