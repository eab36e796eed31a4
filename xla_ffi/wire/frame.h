// A frame: a fixed header of 40 bytes and a payload. Everything that travels over a connection is a frame.
//
// Numbers are little-endian and encoded field by field. A header from the network is untrusted until decode() has
// checked it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "xla_ffi/base/status.h"

namespace jaxhetero {

inline constexpr uint32_t kProtocolVersion = 8;
inline constexpr size_t kHeaderBytes = 40;
inline constexpr size_t kMaxControlBytes = size_t{2} << 20;
inline constexpr size_t kMaxChunkBytes = size_t{1} << 24;

enum class FrameType : uint8_t {
  kRegister = 1,   // worker or reducer -> coordinator: Registration
  kWaiting = 2,    // coordinator -> all: text, who is still missing
  kView = 3,       // coordinator -> all: View, of the job's start or of a new view
  kReady = 4,      // reducer -> coordinator: it knows the members and accepts workers
  kJoin = 5,       // worker -> reducer: Join
  kDescribe = 6,   // worker -> reducer: OpDescription, once per op and view, before its first chunk
  kPush = 7,       // worker -> reducer: one chunk of a contribution
  kResult = 8,     // reducer -> worker: one chunk of the total
  kLate = 9,       // reducer -> worker: text, whom the round waits for, and how many of those still move data
  kFault = 10,     // any: Fault; the job cannot go on
  kGoodbye = 11,   // worker -> reducer, coordinator: no more rounds from here; coordinator -> all: nobody needs you
  kLost = 12,      // worker -> coordinator: Lost, a reducer of the view
  kHalt = 13,      // coordinator -> worker: Halt; stop pushing and say how far you are
  kProgress = 14,  // worker -> coordinator: Progress, the answer
  kLeaving = 15,   // coordinator -> worker: somebody wants to leave; say when you have no round running
  kIdle = 16,      // worker -> coordinator: the answer
  kAlive = 17,     // coordinator <-> all: nothing else to say
  kShare = 18,     // who connected -> who accepted: SharedOffer, memory to go on in if both are on one host
  kShared = 19,  // the answer, and its echo: what I send from here on is in that memory; SharedOffer, if I lend as well
  kStill = 20,   // worker -> coordinator: Progress, of ops of which no round has run for a while
  kForget = 21,  // coordinator -> worker: Progress, all have completed so many: nobody needs what you keep of them
  kReads = 22,   // the answer to kShared: I read what you lend me
};
inline constexpr FrameType kLastFrameType = FrameType::kReads;

struct FrameHeader {
  FrameType type = FrameType::kFault;
  bool last = false;           // the shard's last chunk
  uint32_t payload_bytes = 0;  // bytes that follow the header
  uint32_t count = 0;          // elements in the chunk (kPush, kResult); who is slow, not stuck (kLate)
  uint64_t op = 0;
  uint64_t round = 0;
  uint64_t offset = 0;  // first element of the chunk, counted in the bucket
  bool has_checksum = false;
  uint32_t checksum = 0;
  bool is_lent = false;  // the payload does not follow: it is in memory of the sender's that the receiver reads
  uint32_t place = 0;    // there: see lent_memory.h
};

using EncodedHeader = std::array<std::byte, kHeaderBytes>;
EncodedHeader encode(const FrameHeader& header);

// Checks what can be checked without knowing the op: types, flags, lengths.
Result<FrameHeader> decode(std::span<const std::byte, kHeaderBytes> bytes);

// A frame's checksum is the CRC-32C of its header, without the checksum itself, and of its payload. start_checksum()
// says in the header that there is one, and gives that of the header; set_checksum() writes the whole one.
uint32_t start_checksum(EncodedHeader& header);
void set_checksum(EncodedHeader& header, uint32_t checksum);

// Says in the header of a frame without a checksum that the payload is lent, and where it is.
void set_place(EncodedHeader& header, uint32_t place);

}  // namespace jaxhetero
