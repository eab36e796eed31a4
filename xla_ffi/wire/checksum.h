// CRC-32C (Castagnoli, the polynomial of iSCSI, RFC 3720), which processors compute with an instruction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace jaxhetero {

// The checksum of what `before` is the checksum of, followed by `bytes`; 0 is that of nothing. Uses the processor's
// instruction where it has one, which is found out at run time.
uint32_t crc32c(uint32_t before, std::span<const std::byte> bytes);

// The same without that instruction.
uint32_t crc32c_portable(uint32_t before, std::span<const std::byte> bytes);

}  // namespace jaxhetero
