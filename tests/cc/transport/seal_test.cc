// What goes over a connection that encrypts: nobody on its way can read it, or change it unnoticed.
#include "xla_ffi/transport/seal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cc/two_sides.h"
#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/cipher.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {
namespace {

std::shared_ptr<const CryptoLibrary> library() {
  Result<std::shared_ptr<const CryptoLibrary>> crypto = CryptoLibrary::open();
  EXPECT_TRUE(crypto.ok()) << crypto.status().message();
  return *crypto;
}

Handshake::Keys keys(std::string_view sending, std::string_view receiving) {
  return {sha256(bytes_of(sending)), sha256(bytes_of(receiving))};
}

// --- The cipher.

// Test case 2 of the specification that McGrew and Viega submitted to NIST: all zero.
TEST(Cipher, IsThatOfThePublishedVector) {
  Cipher cipher(library(), Digest{}, Cipher::Direction::kEncrypt);
  std::array<std::byte, 16> text{};
  std::array<std::byte, kTagBytes> tag;
  ASSERT_TRUE(cipher.start() && cipher.update(text, text.data()) && cipher.finish(tag));
  EXPECT_EQ(std::to_integer<int>(text[0]), 0x03);
  EXPECT_EQ(std::to_integer<int>(text[15]), 0x78);
  EXPECT_EQ(std::to_integer<int>(tag[0]), 0xab);
  EXPECT_EQ(std::to_integer<int>(tag[15]), 0xdf);
}

TEST(CryptoLibrary, SaysWhatIsMissing) {
  const Status none = CryptoLibrary::open("libcrypto-of-nobody.so").status();
  EXPECT_EQ(none.code(), Code::kInvalidArgument);
  EXPECT_NE(none.message().find("libcrypto-of-nobody.so: cannot open"), std::string::npos) << none.message();
  const Status other = CryptoLibrary::open("libm.so.6").status();
  EXPECT_EQ(other.code(), Code::kInvalidArgument);
  EXPECT_NE(other.message().find("libm.so.6 is not the library of OpenSSL 3"), std::string::npos) << other.message();
}

// --- Records, without a connection.

class SealTest : public testing::Test {
 protected:
  // The record that `sender_` makes of this text.
  Bytes record_of(const Bytes& text) {
    Bytes copy = text;
    EXPECT_TRUE(sender_.close(as_pieces(copy), text.size()).ok());
    Bytes record(sender_.unsent().begin(), sender_.unsent().end());
    EXPECT_EQ(sender_.note_sent(record.size()), text.size());
    return record;
  }

  // What `receiver_` says of these bytes, all of which have come, where there is room for `most` bytes.
  Result<Bytes> open(std::span<const std::byte> bytes, size_t most = Seal::kMostBytes) {
    Bytes text;
    while (true) {
      Bytes place(most);
      Result<size_t> opened = receiver_.open(as_pieces(place));
      if (!opened.ok()) return opened.status();
      text.insert(text.end(), place.begin(), place.begin() + static_cast<std::ptrdiff_t>(*opened));
      if (*opened > 0) continue;
      if (bytes.empty()) return text;
      const auto part = bytes.first(std::min(bytes.size(), receiver_.room().size()));
      std::ranges::copy(part, receiver_.room().begin());
      receiver_.note_received(part.size());
      bytes = bytes.subspan(part.size());
    }
  }

  Seal sender_{library(), keys("one", "other")};
  Seal receiver_{library(), keys("other", "one")};
};

TEST_F(SealTest, GivesWhatWasSentHoweverItIsCut) {
  std::mt19937 random(1);
  Bytes all;
  Bytes sent;
  for (size_t bytes : {size_t{1}, size_t{40}, size_t{1000}, Seal::kMostBytes, size_t{7}, Seal::kMostBytes - 1}) {
    const Bytes text = pattern(bytes, static_cast<uint32_t>(bytes));
    all.insert(all.end(), text.begin(), text.end());
    const Bytes record = record_of(text);
    sent.insert(sent.end(), record.begin(), record.end());
  }
  Bytes got;
  for (std::span<const std::byte> rest = sent; !rest.empty();) {
    const size_t part = std::min<size_t>(rest.size(), 1 + random() % 30000);
    const Result<Bytes> opened = open(rest.first(part), 1 + random() % Seal::kMostBytes);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    got.insert(got.end(), opened.value().begin(), opened.value().end());
    rest = rest.subspan(part);
  }
  EXPECT_TRUE(got == all);
}

TEST_F(SealTest, TakesOfALongTextWhatOneRecordHolds) {
  Bytes text = pattern(Seal::kMostBytes + 1);
  ASSERT_TRUE(sender_.close(as_pieces(text), text.size()).ok());
  EXPECT_EQ(sender_.unsent_frame_bytes(), Seal::kMostBytes);
  EXPECT_EQ(sender_.note_sent(sender_.unsent().size() - 1), 0u) << "a byte is missing";
  EXPECT_EQ(sender_.note_sent(1), Seal::kMostBytes);
}

TEST_F(SealTest, HidesTheText) {
  const Bytes text(1000, std::byte{'a'});
  const Bytes record = record_of(text);
  EXPECT_LT(std::ranges::count(record, std::byte{'a'}), 40);
  EXPECT_FALSE(record == record_of(text)) << "the same text is another record the next time";
}

// A key is used for a limited number of records. Whoever keeps the old one reads no more.
TEST_F(SealTest, ChangesItsKeys) {
  constexpr uint64_t kRecords = 3;
  const auto seal = [](auto... records) { return Seal(library(), keys("one", "other"), records...); };
  sender_ = seal(kRecords);
  receiver_ = Seal(library(), keys("other", "one"), kRecords);
  Seal same_key = seal();
  const Bytes text = pattern(100);
  for (uint64_t i = 0; i < 4 * kRecords; ++i) {
    const Bytes record = record_of(text);
    std::swap(sender_, same_key);
    EXPECT_EQ(record == record_of(text), i < kRecords);
    std::swap(sender_, same_key);
    const Result<Bytes> opened = open(record);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    EXPECT_TRUE(opened.value() == text);
  }
}

TEST_F(SealTest, NoticesEveryChangedBit) {
  const Bytes text = pattern(24);
  const Bytes record = record_of(text);
  for (size_t bit = 0; bit < 8 * record.size(); ++bit) {
    Seal receiver{library(), keys("other", "one")};
    std::swap(receiver, receiver_);
    Bytes changed = record;
    changed[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    const Result<Bytes> opened = open(changed);
    // A length that became larger waits for bytes that do not come; the next record makes it a wrong one.
    EXPECT_TRUE(opened.ok() ? opened.value().empty() : opened.status().code() == Code::kProtocol) << bit;
  }
}

TEST_F(SealTest, NoticesThatARecordIsMissingOrRepeatedOrElsewhere) {
  const std::vector<Bytes> records = {record_of(pattern(50)), record_of(pattern(60)), record_of(pattern(70))};
  for (const std::vector<size_t>& order :
       std::vector<std::vector<size_t>>{{1}, {0, 0}, {0, 2}, {1, 0}, {0, 1, 0}, {2, 1, 0}}) {
    receiver_ = Seal{library(), keys("other", "one")};
    Bytes bytes;
    for (const size_t number : order) bytes.insert(bytes.end(), records[number].begin(), records[number].end());
    EXPECT_EQ(open(bytes).status().code(), Code::kProtocol);
  }
}

TEST_F(SealTest, RefusesItsOwnRecords) {
  const Bytes record = record_of(pattern(50));
  std::swap(sender_, receiver_);
  EXPECT_EQ(open(record).status().code(), Code::kProtocol);
}

TEST_F(SealTest, RefusesARecordWithoutTextOrTooLong) {
  for (const size_t bytes : {size_t{0}, Seal::kMostBytes + 1}) {
    Bytes record = record_of(pattern(50));
    for (size_t i = 0; i < 4; ++i) record[i] = static_cast<std::byte>(bytes >> (8 * i));
    receiver_ = Seal{library(), keys("other", "one")};
    EXPECT_EQ(open(record).status().code(), Code::kProtocol);
  }
}

// --- Somebody on the way.

using Records = std::vector<Bytes>;

// Passes on what a client and a server say to each other, and changes what the client says after the handshake.
class Meddler {
 public:
  Meddler(const TcpAddress& server, size_t record_count, std::function<void(Records&)> change)
      : thread_([this, server, record_count, change = std::move(change)] {
          RawPeer client = outside_.accept();
          RawPeer inside(server);
          inside.send(client.read(44));
          client.send(inside.read(76));
          inside.send(client.read(32));
          Records records;
          for (size_t i = 0; i < record_count; ++i) records.push_back(read_record(client));
          change(records);
          for (const Bytes& record : records) inside.send(record);
          EXPECT_TRUE(inside.is_closed_within(kPatience));
        }) {}
  ~Meddler() { thread_.join(); }
  Meddler(const Meddler&) = delete;
  Meddler& operator=(const Meddler&) = delete;

  [[nodiscard]] const TcpAddress& address() const { return outside_.address_; }

 private:
  static Bytes read_record(RawPeer& client) {
    Bytes record = client.read(4);
    size_t bytes = 0;
    for (size_t i = 0; i < 4; ++i) bytes |= std::to_integer<size_t>(record.at(i)) << (8 * i);
    const Bytes rest = client.read(bytes + kTagBytes);
    record.insert(record.end(), rest.begin(), rest.end());
    return record;
  }

  RawServer outside_;
  std::thread thread_;
};

struct Misdeed {
  std::string name;
  std::function<void(Records&)> change;
  size_t genuine_count = 0;  // of frames before it
};

class MeddlerTest : public TransportTest, public testing::WithParamInterface<Misdeed> {};

TEST_P(MeddlerTest, IsNoticedBeforeAFrameCounts) {
  for (Side* side : {&client_, &server_}) side->encrypt();
  const Meddler meddler(server_.listen(), 4, GetParam().change);
  client_.connect(meddler.address());
  ASSERT_TRUE(client_.wait_open());
  // Each of them is large enough for a record of its own.
  for (uint32_t i = 0; i < 4; ++i) client_.send(OutFrame::control(FrameType::kDescribe, pattern(5000, i)));
  EXPECT_EQ(server_.wait_closed().code(), Code::kProtocol);
  EXPECT_NE(server_.wait_closed().message().find("changed on its way"), std::string::npos);
  EXPECT_EQ(server_.call([&] { return server_.frames_.size(); }), GetParam().genuine_count);
  EXPECT_EQ(server_.count_of(&Counters::bad_frame_count), 1u);
  EXPECT_EQ(server_.count_of(&Counters::checksum_mismatch_count), 1u);
  client_.call([&] { client_.connections_.clear(); });
}

INSTANTIATE_TEST_SUITE_P(
    All, MeddlerTest,
    testing::Values(Misdeed{"flips_a_bit", [](Records& records) { records[2][100] ^= std::byte{1}; }, 2},
                    Misdeed{"flips_a_bit_of_the_tag", [](Records& records) { records[1].back() ^= std::byte{8}; }, 1},
                    Misdeed{"drops", [](Records& records) { records.erase(records.begin() + 1); }, 1},
                    Misdeed{"repeats", [](Records& records) { records.insert(records.begin() + 2, records[1]); }, 2},
                    Misdeed{"reorders", [](Records& records) { std::swap(records[1], records[2]); }, 1}),
    [](const auto& info) { return info.param.name; });

class OneSideAlone : public TransportTest, public testing::WithParamInterface<bool> {};

TEST_P(OneSideAlone, IsRefusedAndBothSay) {
  (GetParam() ? client_ : server_).encrypt();
  client_.connect(server_.listen());
  const std::array said = {client_.wait_closed(), server_.wait_closed()};
  for (const Status& status : said) {
    EXPECT_EQ(status.code(), Code::kVersionMismatch);
    EXPECT_NE(status.message().find("JAXHETERO_ENCRYPT"), std::string::npos) << status.message();
  }
  EXPECT_EQ(client_.call([&] { return client_.open_count_; }), 0u);
}

INSTANTIATE_TEST_SUITE_P(All, OneSideAlone, testing::Bool());

}  // namespace
}  // namespace jaxhetero
