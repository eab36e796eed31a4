// The payloads of control frames: what processes tell each other about the job.
//
// Everything that arrives is untrusted until the decode function of its message has checked it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {

inline constexpr uint32_t kMaxOps = 65536;

enum class Role : uint8_t { kWorker = 1, kReducer = 2 };

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

}  // namespace jaxhetero
