// Frames: a fixed header of 40 bytes, then a payload. After the handshake, connections carry nothing but frames. Pure:
// no I/O here.
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

inline constexpr uint16_t kProtocolVersion = 21;
inline constexpr size_t kHeaderBytes = 40;
inline constexpr size_t kMaxControlBytes = size_t{64} << 20;
inline constexpr size_t kMaxChunkBytes = size_t{1} << 24;

enum class FrameType : uint8_t {
  kRegister = 1,   // worker or reducer -> coordinator: Registration
  kWaiting = 2,    // coordinator -> all: text, the processes that are missing
  kView = 3,       // coordinator -> all: View; at the start, and after every change
  kReady = 4,      // reducer -> coordinator: it has the view and accepts workers
  kJoin = 5,       // worker -> reducer, or another worker that it sends messages to: Join
  kDescribe = 6,   // worker -> reducer: OpDescription, before the op's first chunk in a view, and where it changes
  kPush = 7,       // worker -> reducer: one chunk of a contribution
  kResult = 8,     // reducer -> worker: one chunk of the total
  kLate = 9,       // reducer -> worker: Late, and text: the ranks a round waits for
  kFault = 10,     // any: Fault; the job has failed
  kGoodbye = 11,   // worker -> reducer, coordinator: Idle, no more rounds; coordinator -> all: you may exit
  kLost = 12,      // worker -> coordinator: Lost; a reducer of the view is lost; coordinator -> that reducer
  kHalt = 13,      // coordinator -> worker: Halt; stop pushing, and reply with kProgress
  kProgress = 14,  // worker -> coordinator: Progress; the reply to kHalt
  kLeaving = 15,   // coordinator -> worker: a worker wants to leave; reply kIdle once you run no round
  kIdle = 16,      // worker -> coordinator: Idle; the reply to kLeaving
  kAlive = 17,     // coordinator <-> all: heartbeat
  kShare = 18,     // connecting side -> accepting side: SharedOffer; continue in this memory if you can open it
  kShared = 19,    // reply to kShare, then echoed: all later frames use shared memory; SharedOffer if I lend payloads
  kStill = 20,     // worker -> coordinator: Progress of ops that have been idle for a while
  kForget = 21,    // coordinator -> worker: Progress that all share: free the kept contributions of these ops
  kReads = 22,     // reply to a kShared with SharedOffer: I opened the memory that you lend
  kAsk = 23,       // visitor -> coordinator: how is the job; coordinator -> all: how are you
  kState = 24,     // the reply to kAsk: ProcessState to the coordinator, JobState to the visitor
  kCredit = 25,    // worker -> worker: text, what it has posted memory for; send me the message
  kMessage = 26,   // worker -> worker: a part of a message, for which it has the credit
  kStep = 27,      // worker -> reducer: StepInputs, before the first chunk of a round of an op that uses a state
  kTotals = 28,    // reducer -> worker: StepTotals, before the last chunk of a round of a measure
  // Between reducers, of which one backs up what the other one keeps of an optimizer.
  // To the one that backs up: Join, with the number of the reducer as the rank; in an elastic job in each view, and the
  // reply has the number of the view as the round.
  kPartner = 29,
  kBackUp = 30,    // to the one that backs up: the summed contributions to a chunk, or nothing where it has them
  kBackedUp = 31,  // the reply to kBackUp
  kCopy = 32,      // to the one that backs up: StateCopy
  kCopied = 33,    // the reply to kCopy
  kPlan = 34,      // worker -> reducer: StatePlan
  kSettled = 35,   // reducer -> coordinator: Settled
  kWaits = 36,     // worker -> reducer: text, the round in which it waits for other workers
  // Of elastic jobs; see held_rounds.h and elastic_coordinator.h.
  kHeld = 37,    // worker -> reducer: all of the total of this op's round is here
  kSafe = 38,    // reducer -> worker: and at all members
  kReport = 39,  // worker -> coordinator: Report; the reply to kHalt
  kReturn = 40,  // member -> coordinator, in place of kRegister: Return
  kAccuse = 41,  // worker or reducer -> coordinator: Accusation
  kAbsent = 42,  // reducer -> worker, before a kLate: the ranks that the round waits for
  // Of gates; see gate.h.
  kMeet = 43,     // coordinator <-> worker: Meeting; at which gate do you stand, the reply, and at which all meet
  kMet = 44,      // worker -> coordinator: Meeting; it stands there, and its programs have ended
  kPresent = 45,  // worker -> coordinator: Presence; it may come in, or it has the state
  kGo = 46,       // coordinator -> worker: Presence; all have the state, or nobody comes: pass on
  kLeave = 47,    // worker -> coordinator: it wants to leave at a gate
  // Of connections that move to a fabric; see fabric_session.h.
  kFabric = 48,    // connecting side -> accepting side: FabricOffer; continue over this fabric if you can
  kOnFabric = 49,  // reply to kFabric, FabricOffer, then echoed without: all later frames go over the fabric
  kNoFabric = 50,  // reply to kFabric: text, why not
  // Of rates that change while a job runs; see rate_watch.h.
  kGoodput = 51,   // worker -> coordinator: Goodput
  kHold = 52,      // coordinator -> worker: Hold; begin no more rounds, and reply with kBegun
  kBegun = 53,     // worker -> coordinator: Progress, how many rounds of each op have begun; the reply to kHold
  kNewRates = 54,  // coordinator -> worker: NewRates; go on
};
inline constexpr FrameType kLastFrameType = FrameType::kNewRates;

// What the fields say in a kIdle, kGoodbye, kSettled or kLate: see header_of() in messages.h.
struct FrameHeader {
  FrameType type = FrameType::kFault;
  bool last = false;           // the shard's last chunk, the message's last part
  uint32_t payload_bytes = 0;  // bytes that follow the header
  // Of kPush and kResult: elements in the chunk. Of kCredit and kMessage: the number of the channel.
  uint32_t count = 0;
  uint64_t op = 0;     // the message's tag in a kCredit or kMessage
  uint64_t round = 0;  // the message's number in its channel in a kCredit or kMessage
  // Of kPush and kResult: the first element of the chunk, counted in the bucket. Of kMessage: the part's first byte. Of
  // kCredit: the message's size in bytes.
  uint64_t offset = 0;
  bool has_checksum = false;
  uint32_t checksum = 0;
  bool is_lent = false;  // the payload does not follow: the receiver reads it in the sender's memory
  uint32_t place = 0;    // the place of a lent payload: see lent_memory.h
  // Of kPush and kResult: the payload is the code of the elements (codec/float_code.h), which is shorter. A worker that
  // pushes a code, or no elements in this way, may be answered one.
  bool is_coded = false;
  // Of a kPush: the payload is the code of such numbers as the op has (codec/number_code.h). Then the flag before it
  // says no more than that the answer may be coded.
  bool has_numbers = false;
  [[nodiscard]] bool has_code() const { return is_coded || has_numbers; }
};

using EncodedHeader = std::array<std::byte, kHeaderBytes>;
EncodedHeader encode(const FrameHeader& header);

// Whether frames of this type carry data of the program. Only these can be lent.
bool carries_data(FrameType type);

// Whether the payload can be that of a chunk whose elements have so many bytes. No code of elements is empty.
inline bool may_carry(const FrameHeader& header, size_t bytes) {
  if (header.has_code() && bytes > 0) return header.payload_bytes > 0 && header.payload_bytes < bytes;
  return header.payload_bytes == bytes;
}

// Checks types, flags and lengths: all that can be checked without knowing the op.
Result<FrameHeader> decode(std::span<const std::byte, kHeaderBytes> bytes);

// A frame's checksum is the CRC-32C of its header, without the checksum field, and its payload. start_checksum() sets
// the header's flag and returns the checksum of the header; set_checksum() writes the final one.
uint32_t start_checksum(EncodedHeader& header);
void set_checksum(EncodedHeader& header, uint32_t checksum);

// Marks the frame, which has no checksum, as one whose payload is lent, and sets its place.
void set_place(EncodedHeader& header, uint32_t place);

}  // namespace jaxhetero
