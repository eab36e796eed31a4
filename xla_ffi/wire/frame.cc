#include "xla_ffi/wire/frame.h"

#include <string>

#include "xla_ffi/wire/checksum.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {
namespace {

constexpr uint16_t kFrameMagic = 0x4a48;  // "HJ" on the wire
constexpr size_t kFlagsAt = 3;
constexpr size_t kChecksumAt = kHeaderBytes - sizeof(uint32_t);  // the checksum, or the place of a lent payload
constexpr uint8_t kLastFlag = 1;
constexpr uint8_t kChecksumFlag = 2;
constexpr uint8_t kLentFlag = 4;
constexpr uint8_t kCodedFlag = 8;
constexpr uint8_t kNumbersFlag = 16;

}  // namespace

bool carries_data(FrameType type) {
  return type == FrameType::kPush || type == FrameType::kResult || type == FrameType::kMessage;
}

EncodedHeader encode(const FrameHeader& header) {
  EncodedHeader encoded;
  size_t at = 0;
  const auto put = [&](auto value) {
    for (size_t i = 0; i < sizeof(value); ++i) {
      encoded[at++] = static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i));
    }
  };
  put(kFrameMagic);
  put(static_cast<uint8_t>(header.type));
  put(static_cast<uint8_t>((header.last ? kLastFlag : 0) | (header.has_checksum ? kChecksumFlag : 0) |
                           (header.is_lent ? kLentFlag : 0) | (header.is_coded ? kCodedFlag : 0) |
                           (header.has_numbers ? kNumbersFlag : 0)));
  put(header.payload_bytes);
  put(header.count);
  put(header.op);
  put(header.round);
  put(header.offset);
  put(header.is_lent ? header.place : header.checksum);
  return encoded;
}

uint32_t start_checksum(EncodedHeader& header) {
  header[kFlagsAt] |= std::byte{kChecksumFlag};
  return crc32c(0, std::span(header).first<kChecksumAt>());
}

void set_checksum(EncodedHeader& header, uint32_t checksum) {
  for (size_t i = 0; i < sizeof checksum; ++i) header[kChecksumAt + i] = static_cast<std::byte>(checksum >> (8 * i));
}

void set_place(EncodedHeader& header, uint32_t place) {
  header[kFlagsAt] |= std::byte{kLentFlag};
  set_checksum(header, place);
}

Result<FrameHeader> decode(std::span<const std::byte, kHeaderBytes> bytes) {
  Reader read(bytes);
  uint16_t magic = 0;
  uint8_t type = 0;
  uint8_t flags = 0;
  uint32_t checksum_or_place = 0;
  FrameHeader header;
  read(magic, type, flags, header.payload_bytes, header.count, header.op, header.round, header.offset,
       checksum_or_place);
  if (magic != kFrameMagic) return malformed("frame: wrong magic number");
  if (type < static_cast<uint8_t>(FrameType::kRegister) || type > static_cast<uint8_t>(kLastFrameType)) {
    return malformed("frame: unknown type " + std::to_string(type));
  }
  if (flags > (kLastFlag | kChecksumFlag | kLentFlag | kCodedFlag | kNumbersFlag))
    return malformed("frame: unknown flags");
  header.type = static_cast<FrameType>(type);
  header.last = (flags & kLastFlag) != 0;
  header.has_checksum = (flags & kChecksumFlag) != 0;
  header.is_lent = (flags & kLentFlag) != 0;
  header.is_coded = (flags & kCodedFlag) != 0;
  header.has_numbers = (flags & kNumbersFlag) != 0;
  (header.is_lent ? header.place : header.checksum) = checksum_or_place;
  if (header.is_lent && !carries_data(header.type)) return malformed("frame: only data can be lent");
  if (header.is_lent && header.has_checksum) return malformed("frame: what is lent has no checksum");
  const bool is_chunk = header.type == FrameType::kPush || header.type == FrameType::kResult;
  if (header.is_coded && !is_chunk) return malformed("frame: only chunks can be coded");
  if (header.has_numbers && header.type != FrameType::kPush) return malformed("frame: numbers that are not pushed");
  if (header.payload_bytes > (carries_data(header.type) ? kMaxChunkBytes : kMaxControlBytes)) {
    return malformed("frame: a payload of " + std::to_string(header.payload_bytes) + " bytes");
  }
  return header;
}

}  // namespace jaxhetero
