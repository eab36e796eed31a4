#include "xla_ffi/wire/auth.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace jaxhetero {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string hex(const Digest& digest) {
  std::string text;
  for (std::byte byte : digest) {
    text += "0123456789abcdef"[std::to_integer<int>(byte >> 4)];
    text += "0123456789abcdef"[std::to_integer<int>(byte & std::byte{15})];
  }
  return text;
}

TEST(Sha256, EqualsThePublishedVectors) {  // FIPS 180-2, appendix B, and NIST's short messages
  EXPECT_EQ(hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256(bytes_of("abc"))), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(bytes_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(bytes_of(std::string(1000000, 'a')))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// The padding has its corners where the message ends around the last 8 bytes of a block. A digest of digests pins them
// all; the value was computed with Python's hashlib.
TEST(Sha256, PadsEveryLength) {
  std::vector<std::byte> digests;
  for (size_t length = 0; length <= 130; ++length) {
    const Digest digest = sha256(bytes_of(std::string(length, 'x')));
    digests.insert(digests.end(), digest.begin(), digest.end());
  }
  EXPECT_EQ(hex(sha256(digests)), "f5a018ad6f7a21c451c8d98b57699f4aeeb1976b88771c339c7ea60cd09c64ef");
}

struct HmacVector {
  std::string key;
  std::string message;
  std::string digest;
};

class HmacSha256 : public testing::TestWithParam<HmacVector> {};

TEST_P(HmacSha256, EqualsRfc4231) {
  EXPECT_EQ(hex(hmac_sha256(bytes_of(GetParam().key), bytes_of(GetParam().message))), GetParam().digest);
}

std::string counting_key() {
  std::string key;
  for (char c = 1; c <= 25; ++c) key += c;
  return key;
}

INSTANTIATE_TEST_SUITE_P(
    All, HmacSha256,
    testing::Values(HmacVector{std::string(20, '\x0b'), "Hi There",
                               "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
                    HmacVector{"Jefe", "what do ya want for nothing?",
                               "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
                    HmacVector{std::string(20, '\xaa'), std::string(50, '\xdd'),
                               "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
                    HmacVector{counting_key(), std::string(50, '\xcd'),
                               "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
                    HmacVector{std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First",
                               "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
                    HmacVector{
                        std::string(131, '\xaa'),
                        "This is a test using a larger than block-size key and a larger than block-size data. The key "
                        "needs to be hashed before being used by the HMAC algorithm.",
                        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"}));

TEST(Prove, DependsOnTokenSpeakerAndBothNonces) {
  Nonce one{};
  Nonce two{};
  two[31] = std::byte{1};
  const std::vector<Digest> proofs = {
      prove(bytes_of("token"), "client", one, two), prove(bytes_of("token"), "server", one, two),
      prove(bytes_of("tokem"), "client", one, two), prove(bytes_of("token"), "client", two, two),
      prove(bytes_of("token"), "client", one, one), prove(bytes_of("token"), "client", two, one),
  };
  for (size_t i = 0; i < proofs.size(); ++i) {
    for (size_t j = 0; j < proofs.size(); ++j) EXPECT_EQ(same_digest(proofs[i], proofs[j]), i == j) << i << ", " << j;
  }
}

// RFC 5869, appendix A.1: the first 32 of its bytes.
TEST(DeriveKey, IsThatOfThePublishedVector) {
  std::vector<std::byte> salt(13);
  for (size_t i = 0; i < salt.size(); ++i) salt[i] = static_cast<std::byte>(i);
  const std::string info = "\xf0\xf1\xf2\xf3\xf4\xf5\xf6\xf7\xf8\xf9";
  const Digest key = derive_key(std::vector<std::byte>(22, std::byte{0x0b}), salt, info);
  EXPECT_EQ(hex(key), "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf");
}

TEST(SameDigest, SeesEveryBit) {
  const Digest digest = sha256({});
  for (size_t bit = 0; bit < 8 * digest.size(); ++bit) {
    Digest other = digest;
    other[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    EXPECT_FALSE(same_digest(digest, other)) << bit;
  }
  EXPECT_TRUE(same_digest(digest, sha256({})));
}

TEST(FreshNonce, IsFresh) {
  const auto first = fresh_nonce();
  const auto second = fresh_nonce();
  ASSERT_TRUE(first.has_value() && second.has_value());
  EXPECT_NE(*first, *second);
}

}  // namespace
}  // namespace jaxhetero
