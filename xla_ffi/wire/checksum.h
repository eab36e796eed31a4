// CRC-32C (Castagnoli; the polynomial of iSCSI, RFC 3720), for which processors have an instruction. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace jaxhetero {

// Extends a checksum: `before` is the checksum of the bytes before `bytes`, 0 if there are none. Uses the processor's
// instruction if it has one, which is detected at run time.
uint32_t crc32c(uint32_t before, std::span<const std::byte> bytes);

// The same function without that instruction.
uint32_t crc32c_portable(uint32_t before, std::span<const std::byte> bytes);

}  // namespace jaxhetero
