// What goes over a connection: frames of a fixed 40-byte header and a payload, all numbers little-endian, encoded field
// by field. Everything that arrives here is untrusted until a function of this file has checked it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/reduce.h"

namespace jaxhetero {

inline constexpr uint32_t kProtocolVersion = 8;
inline constexpr size_t kHeaderBytes = 40;
inline constexpr size_t kMaxControlBytes = size_t{2} << 20;
inline constexpr size_t kMaxChunkBytes = size_t{1} << 24;
inline constexpr uint32_t kMaxWorkers = 4096;
inline constexpr uint32_t kMaxReducers = 4096;
inline constexpr uint32_t kMaxOps = 65536;

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

// What a round does with the contributions.
enum class Kind : uint8_t {
  kSum = 1,
  kBroadcast = 2,  // the root's contribution, unchanged; the others push headers without payload
  kMax = 3,
  kMin = 4,
};
std::string_view kind_name(Kind kind);

// What every worker must agree on in an op, compared by the reducer. It is the same in all of the op's rounds.
struct OpSpec {
  Kind kind = Kind::kSum;
  DType dtype = DType::kF32;
  uint32_t root = 0;         // of a broadcast, else 0
  uint32_t leaf_count = 0;   // leaves in the bucket
  uint64_t total_count = 0;  // elements in the bucket
  uint32_t signature = 0;    // hash of the leaves' shapes
  uint64_t call_bytes = 0;   // on the wire, of all buckets of the collective that this is one of; else 0

  bool operator==(const OpSpec&) const = default;
};

// Whether this rank has bytes in such a round. All push their chunks in any case, which tells that they have come to
// it.
inline bool contributes(const OpSpec& spec, uint32_t rank) {
  return spec.kind != Kind::kBroadcast || spec.root == rank;
}

// For people: "sum of float32[1024] in 2 leaves".
std::string describe(const OpSpec& spec);

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

enum class Role : uint8_t { kWorker = 1, kReducer = 2 };

// What every worker of a job must have been started with.
struct JobShape {
  uint32_t worker_count = 0;
  uint32_t reducer_count = 0;    // dedicated ones
  uint32_t colocated_count = 0;  // inside workers, the first ranks
  uint32_t chunk_bytes = 0;      // 0: by the size of the shards
  uint32_t window_chunks = 0;    // 0: as many as the path needs
  bool checksums = false;        // of every frame
  bool failover = false;         // go on when a reducer is lost
  bool measure_rates = false;    // of the interfaces, at the start: see rate_probe.h

  bool operator==(const JobShape&) const = default;
};
// Where two processes' ideas of the job differ: "chunk_bytes is 4096, not 0".
std::string difference(const JobShape& job, const JobShape& from);

// Every reducer of a job: the dedicated ones and those inside workers. None for a worker alone.
uint32_t total_reducer_count(const JobShape& job);

// Where the job does not say how large chunks are, the plan does, between these.
inline constexpr size_t kLeastAutoChunkBytes = size_t{8} << 10;
inline constexpr size_t kMostAutoChunkBytes = size_t{256} << 10;
size_t most_chunk_bytes(const JobShape& job);
size_t least_chunk_bytes(const JobShape& job);  // of a shard that takes several

// What a worker may have under way at one reducer when its window adapts to the path. A reducer holds that much for
// each worker and round.
inline constexpr size_t kMostWindowBytes = size_t{4} << 20;
// Two at least: while the total of one comes back, the other goes out.
uint64_t most_chunks_under_way(const JobShape& job, size_t chunk_bytes);

struct Registration {
  Role role = Role::kWorker;
  int32_t rank = -1;  // of the worker, or of the worker that a co-located reducer lives in; -1 for a dedicated reducer
  JobShape job;       // workers only
  std::string version;
  std::string host_name;
  uint16_t port = 0;    // where a reducer listens
  std::string address;  // where a reducer is reached; empty: the address it came from
};

// Who takes part, as the coordinator tells everybody. Indices are ranks and reducer numbers.
//
// A view is who reduces from now on. The job starts with view 0; every reducer that is lost or comes makes another,
// with new connections from every worker to every reducer of it, so that nothing of an earlier view can come in late.
struct View {
  struct Reducer {
    uint32_t number = 0;  // its name, the same in every view
    std::string address;
    uint16_t port = 0;
    std::string host_name;
    int32_t colocated_rank = -1;
  };
  struct Resume {
    uint64_t op = 0;
    uint64_t round = 0;
  };
  uint64_t job_id = 0;
  uint32_t number = 0;
  JobShape job;
  uint32_t own_index = 0;
  std::vector<std::string> worker_hosts;
  std::vector<Reducer> reducers;
  std::vector<Resume> resume;  // the ops of which some workers have completed a round that others have not: that one
};

struct OpDescription {
  OpSpec spec;
  std::string text;  // for people: "psum 3 of grads (float32[1024])"
};

struct Join {
  uint64_t job_id = 0;
  uint32_t rank = 0;
  uint32_t view = 0;
  uint64_t plan = 0;  // ShardPlan::digest()
};

// Where a process finds the memory that another one offers to share: see shared_memory.h.
inline constexpr size_t kSharedKeyBytes = 32;
struct SharedOffer {
  uint32_t process = 0;
  uint32_t descriptor = 0;  // of that process
  std::array<std::byte, kSharedKeyBytes> key{};
};

struct Lost {
  uint32_t view = 0;
  uint32_t reducer = 0;  // its number
  std::string why;
};

struct Halt {
  uint32_t view = 0;  // the next one
  std::string why;
};

// How many rounds a worker has completed, of every op that it has begun or of some.
struct Progress {
  struct OpProgress {
    uint64_t op = 0;
    uint64_t completed_count = 0;
  };
  uint32_t view = 0;
  std::vector<OpProgress> ops;
};

using Bytes = std::vector<std::byte>;

Bytes encode(const Registration& registration);
Bytes encode(const View& view);
Bytes encode(const OpDescription& description);
Bytes encode(const Join& join);
Bytes encode(const SharedOffer& offer);
Bytes encode(const Lost& lost);
Bytes encode(const Halt& halt);
Bytes encode(const Progress& progress);
Bytes encode(const Status& fault);
Bytes encode(std::string_view text);

Result<Registration> decode_registration(std::span<const std::byte> bytes);
Result<View> decode_view(std::span<const std::byte> bytes);
Result<OpDescription> decode_op_description(std::span<const std::byte> bytes);
Result<Join> decode_join(std::span<const std::byte> bytes);
Result<SharedOffer> decode_shared_offer(std::span<const std::byte> bytes);
Result<Lost> decode_lost(std::span<const std::byte> bytes);
Result<Halt> decode_halt(std::span<const std::byte> bytes);
Result<Progress> decode_progress(std::span<const std::byte> bytes);
Status decode_fault(std::span<const std::byte> bytes);
// Text from a peer, fit to be shown: cut to a sane length, control characters replaced.
std::string decode_text(std::span<const std::byte> bytes);

}  // namespace jaxhetero
