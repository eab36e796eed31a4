#include "xla_ffi/wire/checksum.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string_view>
#include <vector>

namespace jaxhetero {
namespace {

using Function = uint32_t (*)(uint32_t, std::span<const std::byte>);

class Crc32c : public testing::TestWithParam<Function> {};

TEST_P(Crc32c, EqualsThePublishedValues) {  // RFC 3720, appendix B.4
  const Function crc = GetParam();
  EXPECT_EQ(crc(0, {}), 0u);
  EXPECT_EQ(crc(0, std::as_bytes(std::span(std::string_view("123456789")))), 0xe3069283u);
  std::vector<std::byte> bytes(32);
  EXPECT_EQ(crc(0, bytes), 0x8a9136aau);
  bytes.assign(32, std::byte{0xff});
  EXPECT_EQ(crc(0, bytes), 0x62a8ab43u);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  EXPECT_EQ(crc(0, bytes), 0x46dd794eu);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(31 - i);
  EXPECT_EQ(crc(0, bytes), 0x113fdb5cu);
}

TEST_P(Crc32c, ContinuesWhereItStopped) {
  std::mt19937 random(1);
  std::vector<std::byte> bytes(1000);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  const uint32_t whole = crc32c_portable(0, bytes);
  for (size_t cut = 0; cut <= bytes.size(); cut += 37) {
    const auto all = std::span<const std::byte>(bytes);
    EXPECT_EQ(GetParam()(GetParam()(0, all.first(cut)), all.subspan(cut)), whole) << cut;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Crc32c, testing::Values(&crc32c, &crc32c_portable),
                         [](const auto& info) { return info.index == 0 ? "here" : "portable"; });

}  // namespace
}  // namespace jaxhetero
