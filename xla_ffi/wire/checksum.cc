#include "xla_ffi/wire/checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace jaxhetero {
namespace {

constexpr std::array<uint32_t, 256> make_table() {
  constexpr uint32_t kReversedPolynomial = 0x82f63b78;
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kReversedPolynomial : 0);
    table[byte] = crc;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kTable = make_table();

#if defined(__x86_64__)

bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }

__attribute__((target("sse4.2"))) uint32_t with_instruction(uint32_t crc, std::span<const std::byte> bytes) {
  for (; bytes.size() >= sizeof(uint64_t); bytes = bytes.subspan(sizeof(uint64_t))) {
    uint64_t next = 0;
    std::memcpy(&next, bytes.data(), sizeof next);
    crc = static_cast<uint32_t>(_mm_crc32_u64(crc, next));
  }
  for (std::byte next : bytes) crc = _mm_crc32_u8(crc, std::to_integer<uint8_t>(next));
  return crc;
}

#elif defined(__aarch64__)

bool has_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }

__attribute__((target("+crc"))) uint32_t with_instruction(uint32_t crc, std::span<const std::byte> bytes) {
  for (; bytes.size() >= sizeof(uint64_t); bytes = bytes.subspan(sizeof(uint64_t))) {
    uint64_t next = 0;
    std::memcpy(&next, bytes.data(), sizeof next);
    crc = __crc32cd(crc, next);
  }
  for (std::byte next : bytes) crc = __crc32cb(crc, std::to_integer<uint8_t>(next));
  return crc;
}

#else

bool has_instruction() { return false; }
uint32_t with_instruction(uint32_t crc, std::span<const std::byte>) { return crc; }

#endif

}  // namespace

uint32_t crc32c_portable(uint32_t before, std::span<const std::byte> bytes) {
  uint32_t crc = ~before;
  for (std::byte byte : bytes) crc = (crc >> 8) ^ kTable[(crc ^ std::to_integer<uint32_t>(byte)) & 0xff];
  return ~crc;
}

uint32_t crc32c(uint32_t before, std::span<const std::byte> bytes) {
  static const bool fast = has_instruction();
  return fast ? ~with_instruction(~before, bytes) : crc32c_portable(before, bytes);
}

}  // namespace jaxhetero
