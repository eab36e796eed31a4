// Frames of every size, whole, in pieces, and damaged.
#include "xla_ffi/wire/frame.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "tests/cc/two_sides.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/checksum.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {
namespace {

using FrameTest = TransportTest;

// One frame per leaf size list, gathered from the leaves and scattered into as many on the other side.
class PayloadTest : public TransportTest, public testing::WithParamInterface<std::tuple<Way, std::vector<size_t>>> {};

TEST_P(PayloadTest, ComesFromLeavesAndGoesIntoLeaves) {
  const auto& [way, sizes] = GetParam();
  const size_t total = std::accumulate(sizes.begin(), sizes.end(), size_t{0});
  Bytes from = pattern(total);
  Bytes to(total);
  Leaves sources;
  Leaves targets;
  for (size_t offset = 0; size_t size : sizes) {
    sources.append(from.data() + offset, size);
    targets.append(to.data() + offset, size);
    offset += size;
  }
  server_.on_header_ = [&](Connection&, const FrameHeader& header, std::vector<iovec>& into) {
    targets.slice(header.offset, header.payload_bytes, into);
    return Status();
  };
  open(way);
  const uint64_t sent_before = client_.count_of(&Counters::sent_bytes);
  const uint64_t frames_before = client_.call([&] { return client_.connections_[0]->written_frame_count(); });
  // As frames of all sizes, the empty one included.
  size_t frame_count = 0;
  client_.call([&] {
    size_t next = 0;
    for (size_t offset = 0; offset < total || frame_count == 0; ++frame_count) {
      const size_t count = std::min(next, total - offset);
      next = std::min<size_t>(2 * next + 1, kMaxChunkBytes);
      client_.connections_[0]->send(OutFrame::gather(push_of(offset, static_cast<uint32_t>(count)), sources, offset));
      offset += count;
    }
  });
  ASSERT_TRUE(server_.wait_frames(frame_count));
  EXPECT_TRUE(are_same(from, to));
  const auto frames_now = client_.call([&] { return client_.connections_[0]->written_frame_count(); });
  EXPECT_EQ(frames_now - frames_before, frame_count);
  EXPECT_EQ(client_.call([&] { return client_.connections_[0]->queued_frame_count(); }), frames_now);
  EXPECT_EQ(client_.count_of(&Counters::sent_bytes) - sent_before, frame_count * kHeaderBytes + total);
  EXPECT_EQ(server_.count_of(&Counters::received_bytes), client_.count_of(&Counters::sent_bytes));
  if (way == Way::kSocket) {
    EXPECT_EQ(sent_before, 44u + 32u);
    EXPECT_EQ(client_.count_of(&Counters::received_bytes), 76u);
  }
}

std::vector<size_t> tiny_leaves() {
  std::vector<size_t> sizes(5000);
  for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = i % 8;
  return sizes;
}

INSTANTIATE_TEST_SUITE_P(
    All, PayloadTest,
    testing::Combine(testing::ValuesIn(kWays),
                     testing::Values(std::vector<size_t>{}, std::vector<size_t>{0}, std::vector<size_t>{1},
                                     std::vector<size_t>{100000}, std::vector<size_t>{0, 5, 0, 0, 70000, 1, 0},
                                     tiny_leaves(), std::vector<size_t>(1000, 1), std::vector<size_t>{64 << 20})));

TEST_P(EitherWayTest, SendsBothWaysAtOnce) {
  constexpr size_t kFrames = 64;
  constexpr size_t kBytes = 1 << 18;
  open(GetParam());
  const Bytes payload = pattern(kBytes);
  const auto send_all = [&](Side& side) {
    side.call([&] {
      for (size_t i = 0; i < kFrames; ++i) {
        side.connections_[0]->send(OutFrame::of(push_of(i, kBytes), payload, nullptr));
      }
    });
  };
  send_all(client_);
  send_all(server_);
  for (Side* side : {&client_, &server_}) {
    ASSERT_TRUE(side->wait_frames(kFrames));
    side->call([&] {
      for (size_t i = 0; i < kFrames; ++i) {
        EXPECT_EQ(side->frames_[i].header.offset, i);
        EXPECT_TRUE(are_same(side->frames_[i].payload, payload));
      }
    });
  }
  // A side is done with the payload when it says so itself: what the other one has received tells that to us, but not
  // to a sanitizer, which sees no order in memory that is mapped twice.
  for (Side* side : {&client_, &server_}) {
    EXPECT_EQ(side->call([&] { return side->connections_[0]->written_frame_count(); }),
              side->call([&] { return side->connections_[0]->queued_frame_count(); }));
  }
}

INSTANTIATE_TEST_SUITE_P(All, EitherWayTest, testing::ValuesIn(kWays));

// TCP knows no frames: cut anywhere, they arrive the same.
class DribbleTest : public TransportTest, public testing::WithParamInterface<size_t> {};

TEST_P(DribbleTest, ComposesFramesFromAnyPieces) {
  RawPeer peer(server_.listen());
  peer.prove_token("secret");
  Bytes stream;
  constexpr size_t kFrames = 20;
  for (size_t i = 0; i < kFrames; ++i) {
    const Bytes payload = pattern(i % 3 == 0 ? 0 : 7 * i, static_cast<uint32_t>(i));
    const Bytes frame = frame_bytes(header_of(FrameType::kDescribe, i), payload);
    stream.insert(stream.end(), frame.begin(), frame.end());
  }
  for (size_t offset = 0; offset < stream.size(); offset += GetParam()) {
    peer.send(std::span(stream).subspan(offset, std::min(GetParam(), stream.size() - offset)));
    if (GetParam() > 1) std::this_thread::sleep_for(milliseconds(1));
  }
  ASSERT_TRUE(server_.wait_frames(kFrames));
  server_.call([&] {
    for (size_t i = 0; i < kFrames; ++i) {
      EXPECT_EQ(server_.frames_[i].header.op, i);
      EXPECT_EQ(server_.frames_[i].payload, pattern(i % 3 == 0 ? 0 : 7 * i, static_cast<uint32_t>(i)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(PieceBytes, DribbleTest, testing::Values(1, 13, 63, 64, 65, 1000, 1 << 20));

// The peer does not read: the rest waits here, and arrives in order when it does.
TEST_F(FrameTest, WaitsForAPeerThatDoesNotRead) {
  constexpr size_t kFrames = 16;
  constexpr size_t kBytes = 1 << 20;
  RawPeer peer(server_.listen());
  peer.prove_token("secret");
  ASSERT_TRUE(server_.wait_open());
  const auto payload = std::make_shared<const Bytes>(pattern(kBytes));
  server_.call([&] {
    for (size_t i = 0; i < kFrames; ++i)
      server_.connections_[0]->send(OutFrame::of(push_of(i, kBytes), *payload, payload));
  });
  uint64_t sent = 0;
  while (sent != server_.count_of(&Counters::sent_bytes)) {  // until no more fits
    sent = server_.count_of(&Counters::sent_bytes);
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_LT(sent, kFrames * kBytes) << "the socket buffers took everything: nothing was tested";
  EXPECT_LT(server_.call([&] { return server_.connections_[0]->written_frame_count(); }), kFrames);
  EXPECT_GT(payload.use_count(), 1) << "needed until it is sent";
  for (size_t i = 0; i < kFrames; ++i) {
    const Bytes got = peer.read(kHeaderBytes + kBytes);
    ASSERT_TRUE(got == frame_bytes(push_of(i, kBytes), *payload)) << "frame " << i;
  }
  ASSERT_TRUE(server_.wait([&] { return server_.connections_[0]->written_frame_count() == kFrames; }));
  EXPECT_EQ(payload.use_count(), 1) << "and no longer";
}

struct BadFrame {
  std::string name;
  std::function<void(Bytes&)> change;
};

class BadFrameTest : public TransportTest, public testing::WithParamInterface<BadFrame> {};

TEST_P(BadFrameTest, ClosesThisConnectionOnly) {
  const TcpAddress address = server_.listen();
  client_.connect(address);
  ASSERT_TRUE(client_.wait_open() && server_.wait_open());
  RawPeer bad(address);
  bad.prove_token("secret");
  ASSERT_TRUE(server_.wait_open(2));
  bad.send(frame_bytes(header_of(FrameType::kDescribe), bytes_of("good")));
  Bytes frame = frame_bytes(header_of(FrameType::kDescribe), {});
  GetParam().change(frame);
  bad.send(frame);
  EXPECT_EQ(server_.wait_closed().code(), Code::kProtocol);
  EXPECT_TRUE(bad.is_closed_within(kPatience));
  EXPECT_EQ(server_.count_of(&Counters::bad_frame_count), 1u);
  expect_works(client_);
}

INSTANTIATE_TEST_SUITE_P(All, BadFrameTest,
                         testing::Values(BadFrame{"a_code_of_no_chunk", [](Bytes& b) { b[3] |= std::byte{8}; }},
                                         BadFrame{"numbers_of_no_chunk", [](Bytes& b) { b[3] |= std::byte{16}; }},
                                         BadFrame{"unknown_flag", [](Bytes& b) { b[3] |= std::byte{32}; }},
                                         BadFrame{"magic", [](Bytes& b) { b[0] = std::byte{0}; }},
                                         BadFrame{"type", [](Bytes& b) { b[2] = std::byte{99}; }},
                                         BadFrame{"four_gigabytes",
                                                  [](Bytes& b) { std::fill_n(b.begin() + 4, 4, std::byte{0xff}); }},
                                         BadFrame{"http",
                                                  [](Bytes& b) {
                                                    b = bytes_of(
                                                        "GET / HTTP/1.1\r\nHost: localhost\r\n"
                                                        "User-Agent: curl/7.88.1\r\nAccept: */*\r\n\r\n");
                                                  }}),
                         [](const auto& info) { return info.param.name; });

// --- Checksums.

class ChecksumTest : public testing::Test {
 protected:
  Side server_{"secret", true};
  Side client_{"secret", true};
};

TEST_F(ChecksumTest, LetFramesOfAllSizesThrough) {
  client_.connect(server_.listen());
  ASSERT_TRUE(client_.wait_open() && server_.wait_open());
  Bytes memory = pattern(300000);
  Leaves leaves;
  for (size_t begin = 0; begin < memory.size(); begin += 1000) leaves.append(memory.data() + begin, 1000);
  const std::vector<uint32_t> sizes = {0, 1, 8, 999, 65536, 299999};
  for (uint32_t size : sizes) client_.send(OutFrame::gather(push_of(size, size), leaves, 1));
  ASSERT_TRUE(server_.wait_frames(sizes.size()));
  server_.call([&] {
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_TRUE(server_.frames_[i].header.has_checksum);
      EXPECT_TRUE(std::equal(server_.frames_[i].payload.begin(), server_.frames_[i].payload.end(), memory.begin() + 1));
    }
  });
  EXPECT_EQ(server_.count_of(&Counters::checksum_mismatch_count), 0u);
}

// A frame with its checksum, as it crosses the wire.
Bytes checked_frame_bytes(const FrameHeader& header, std::span<const std::byte> payload) {
  EncodedHeader encoded = encode(header);
  set_checksum(encoded, crc32c(start_checksum(encoded), payload));
  Bytes bytes(encoded.begin(), encoded.end());
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  return bytes;
}

TEST_F(ChecksumTest, FindEveryDamagedBit) {
  const TcpAddress address = server_.listen();
  const Bytes payload = pattern(100);
  const Bytes good = checked_frame_bytes(push_of(0, 100), payload);
  uint64_t mismatch_count = 0;
  for (size_t at :
       {size_t{8}, size_t{16}, kHeaderBytes - 1, kHeaderBytes, good.size() - 1}) {  // count, op, checksum, ...
    RawPeer peer(address);
    peer.prove_token("secret");
    peer.send(good);
    Bytes bad = good;
    bad[at] ^= std::byte{1};
    peer.send(bad);
    EXPECT_TRUE(peer.is_closed_within(kPatience)) << at;
    EXPECT_EQ(server_.count_of(&Counters::checksum_mismatch_count), ++mismatch_count) << at;
    EXPECT_EQ(server_.count_of(&Counters::bad_frame_count), mismatch_count) << at;
    EXPECT_EQ(server_.call([&] { return server_.frames_.size(); }), mismatch_count) << "only the good ones";
    EXPECT_NE(server_.call([&] { return server_.closed_.back().message(); }).find("came damaged"), std::string::npos);
  }
}

TEST_F(ChecksumTest, MayNotBeLeftOut) {
  RawPeer peer(server_.listen());
  peer.prove_token("secret");
  peer.send(frame_bytes(push_of(0, 100), pattern(100)));
  EXPECT_EQ(server_.wait_closed().code(), Code::kProtocol);
  EXPECT_NE(server_.wait_closed().message().find("no checksums"), std::string::npos);
}

}  // namespace
}  // namespace jaxhetero
