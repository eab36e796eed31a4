// What control frames say, one struct a message: in their payload, or in their header alone. Pure: encode(),
// header_of() and decode_...() do no I/O.
//
// A message from the network is untrusted until its decode function has checked it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {

inline constexpr uint32_t kMaxOps = 65536;
inline constexpr uint32_t kMaxDeals = 4096;

enum class Role : uint8_t { kWorker = 1, kReducer = 2 };

struct Registration {
  Role role = Role::kWorker;
  int32_t rank = -1;          // the rank of the worker, or of a co-located reducer's worker; -1 for a dedicated reducer
  int32_t number = -1;        // the number that a dedicated reducer asks for; any where it is -1
  JobShape job;               // workers only
  uint32_t strand_count = 1;  // the most strands that this process can run
  uint32_t rail_count = 1;    // the interfaces of the process, of which each strand uses one
  std::string version;
  std::string host_name;
  uint16_t port = 0;    // the port that it listens on
  std::string address;  // the address at which workers reach it; the one it connects from where it is empty
  std::vector<std::string> more_addresses;  // the addresses of a reducer's other interfaces
};

// The members of the job, as the coordinator tells them to everybody.
//
// A view says which reducers are in use. The job starts with view 0. Every reducer that is lost or joins makes another
// view. Each view has its own connections from every worker to every reducer, so that no frame of an earlier view can
// arrive late.
struct View {
  struct Reducer {
    uint32_t number = 0;  // dedicated ones first; the same in every view, until it is lost and another takes its place
    std::string address;
    uint16_t port = 0;
    std::string host_name;
    int32_t colocated_rank = -1;
    std::vector<std::string> more_addresses;  // the addresses of its other interfaces
    uint32_t since = 0;                       // the view in which it came: another one may have had the number before
  };
  // An op of which some workers have completed a round that others have not, and that round.
  struct Resume {
    uint64_t op = 0;
    uint64_t round = 0;
  };
  // Of an elastic job: a worker that takes part.
  struct Member {
    uint32_t rank = 0;
    uint32_t since = 0;  // the view in which it came: another one may have had the rank before
  };
  // Of an elastic job: an op's round that every member has, or is given here.
  struct Commit {
    uint64_t op = 0;
    uint64_t round = 0;
    Bytes total;  // of a round that is given at once; else nothing
  };
  // Of an elastic job: from this gate on, steps are dealt to these ranks.
  struct Deal {
    uint64_t gate = 0;
    std::vector<uint32_t> ranks;
  };
  // Of an elastic job: how many rounds of an op there have been.
  struct Count {
    uint64_t op = 0;
    uint64_t rounds = 0;
    std::vector<uint32_t> group = {};  // the ranks that take part; empty: all
  };
  // Where a worker takes connections of other workers.
  struct Endpoint {
    std::string address;
    uint16_t port = 0;
  };
  uint64_t job_id = 0;
  uint32_t number = 0;
  JobShape job;
  uint32_t strand_count = 1;              // the strands of every process
  uint32_t rail_count = 1;                // the most interfaces of any process
  uint32_t own_index = 0;                 // the receiver's rank, or reducer number
  std::vector<std::string> worker_hosts;  // indexed by rank, like the next
  std::vector<Endpoint> worker_endpoints;
  std::vector<Reducer> reducers;
  std::vector<Resume> resume;
  bool is_settled = false;  // the reducers that joined before have what they are to keep of optimizers
  // Of an elastic job.
  bool is_candidate = false;    // the receiver waits to be let in; a member may have its rank meanwhile
  std::vector<Member> members;  // by rank
  std::vector<Commit> commits;
  std::vector<uint32_t> joining;  // members that get the state from the others now; nobody passes a gate meanwhile
  uint64_t gate = 0;              // where they join
  bool is_short = false;          // too few members are left: nobody passes a gate before more have come
  std::vector<Count> counts;      // for them
  std::vector<Deal> deals;        // in the order of the gates
  // The StatePlan of the latest view that any member has entered; nothing where none has used a state.
  Bytes states;

  // Whether this rank takes part.
  [[nodiscard]] bool has_member(uint32_t rank) const {
    return !job.is_elastic() || std::ranges::find(members, rank, &Member::rank) != members.end();
  }
  // The ranks that take part; empty: all.
  [[nodiscard]] std::vector<uint32_t> ranks() const {
    std::vector<uint32_t> ranks;
    for (const Member& member : members) ranks.push_back(member.rank);
    return ranks;
  }
};

struct OpDescription {
  OpSpec spec;
  std::string text;  // the name for people: "psum 3 of grads (float32[1024])"
  // Of an op that uses a state: the elements of the bucket that the reducer has, which may go on at the bucket's
  // beginning; and of an update its description.
  Range shard = {};
  Bytes update = {};
};

// A piece of what a reducer keeps of an optimizer, for one that is to back it up.
struct StateCopy {
  uint64_t number = 0;  // the number of the state
  uint64_t count = 0;   // the elements of the bucket, or of the strand's part of it
  uint32_t slot_count = 0;
  bool is_backed_up = true;
  Range part;
  uint64_t version = 0;  // a part of KeptState::Stamp, like the next two
  uint64_t op = 0;
  uint64_t round = 0;
  bool has_gradient = false;
  bool has_earlier = false;  // of an elastic job
  Bytes values;  // the float32 of each slot, then of the gradients, then of each slot before the latest update

  // How many arrays of float32 there are.
  [[nodiscard]] uint64_t array_count() const {
    return uint64_t{slot_count} * (has_earlier ? 2 : 1) + (has_gradient ? 1 : 0);
  }
};

// What workers know of a step of an optimizer whose state reducers keep. All workers send the same.
struct StepInputs {
  uint64_t version = 0;           // how many updates the state has seen before the step
  std::vector<uint32_t> scalars;  // the bits of float32

  bool operator==(const StepInputs&) const = default;
};

// Sums over parts of tensors.
struct StepTotals {
  struct Part {
    uint32_t total = 0;  // the number of the total
    uint64_t first = 0;  // a part of Subtree, like the next two
    uint32_t level = 0;
    uint64_t sum = 0;  // the bits of a float64
  };
  std::vector<Part> parts;
};
inline constexpr size_t kMaxStepScalars = 8192;
inline constexpr size_t kMaxTotalParts = size_t{1} << 20;

struct Join {
  uint64_t job_id = 0;
  uint32_t rank = 0;
  uint32_t view = 0;  // sent to a reducer alone, like the next
  uint64_t plan = 0;  // ShardPlan::digest()
  uint32_t to = 0;    // the number of the reducer, or the rank of the worker, whose connection this is to be
  // Of an elastic job, at a reducer: the ranks of the members of the view.
  std::vector<uint32_t> members = {};
};

// How a process finds the memory that another one offers to share: see shared_memory.h.
inline constexpr size_t kSharedKeyBytes = 32;
struct SharedOffer {
  uint32_t process = 0;
  uint32_t descriptor = 0;  // a descriptor of that process
  std::array<std::byte, kSharedKeyBytes> key{};
};

inline constexpr size_t kMaxEndpointNameBytes = 256;

// Where one side of a connection receives over a fabric.
struct FabricOffer {
  std::string provider;
  uint64_t session = 0;       // names the connection in each message to this side
  uint32_t slot_count = 0;    // how many messages may be under way to this side
  uint32_t slot_bytes = 0;    // the most bytes of a message
  std::vector<uint8_t> name;  // the endpoint's, as the provider has it
};

struct Lost {
  uint32_t view = 0;
  uint32_t reducer = 0;  // the reducer's number
  std::string why;
};

struct Halt {
  uint32_t view = 0;  // the next one
  std::string why;
};

// How many rounds of some ops, or of all that it has started, a worker has completed.
struct Progress {
  struct OpProgress {
    uint64_t op = 0;
    uint64_t completed_count = 0;
    uint32_t group_size = 0;  // the number of workers that take part; all where it is 0
  };
  uint32_t view = 0;
  std::vector<OpProgress> ops;
};

// What a worker's rounds tell of the links to the reducers, since its last word.
struct Goodput {
  struct Link {
    uint32_t reducer = 0;       // the reducer's number
    uint32_t planned_rate = 0;  // the rate that the plan has for it, in any unit
    uint64_t bytes = 0;         // of totals
    uint64_t us = 0;            // the time in which these came
  };
  // Of a job with reducers inside workers, whose links keep in step: how fast they are together, and who holds them up.
  struct InStep {
    uint64_t bytes = 0;         // of the totals that all links carried
    uint64_t us = 0;            // the time in which these came; 0 in other jobs
    uint64_t planned_time = 0;  // of a byte, by the plan and its rates; in parts of 2^32
    int32_t awaited = -1;       // the reducer for whose totals all other links waited mostly; -1: for none
  };
  uint32_t view = 0;
  uint32_t round_count = 0;  // the rounds that were measured
  std::vector<Link> links;
  InStep in_step = {};
};

// From these rounds on, all workers cut buckets by these rates; ops that are not named, from their first round on.
struct NewRates {
  struct Rate {
    uint32_t reducer = 0;  // the reducer's number
    uint32_t rate = 0;     // in parts of kFullRate
  };
  struct Begin {
    uint64_t op = 0;
    uint64_t round = 0;
  };
  static constexpr uint32_t kFullRate = 256;  // the rate of the fastest reducer, or of a usual one
  static constexpr uint32_t kMostRate = 64 * kFullRate;
  uint32_t view = 0;
  std::vector<Rate> rates;
  std::vector<Begin> begins;
};

inline constexpr size_t kMaxLateWorkers = 8;  // a process names so many at most

// How a process is doing, in its own words.
struct ProcessState {
  struct LateWorker {
    uint32_t rank = 0;
    uint32_t waited_ms = 0;
  };
  uint32_t view = 0;
  uint64_t round_count = 0;
  uint64_t sent_bytes = 0;
  uint64_t received_bytes = 0;
  std::string round;                     // a worker's running round without progress for longest; empty where none runs
  uint32_t waited_ms = 0;                // the time since that round began, or since its latest total
  std::vector<LateWorker> late_workers;  // the workers that a reducer's rounds wait for, the latest first
};

// How a job is doing, as its coordinator answers a visitor.
struct JobState {
  // A process that has registered.
  struct Process {
    Role role = Role::kWorker;
    int32_t rank = -1;    // the rank that it registered with
    int32_t number = -1;  // the number of a reducer; -1 where it has none yet
    std::string host_name;
    std::string address;        // the address that it connects from
    bool is_member = false;     // still takes part
    bool is_candidate = false;  // of an elastic job: waits to be let in
    bool has_answered = false;
    uint32_t silent_ms = 0;  // the time since its latest sign of life
    ProcessState state;      // the state, where it has answered
    // What a reducer's interface carries, of the fastest one's; 0: not known. Of a worker that has become slow, the
    // pace to which it holds all rounds, of the best one; 0: it has not.
    uint32_t rate_percent = 0;
  };
  uint64_t job_id = 0;
  uint32_t view = 0;
  bool has_started = false;
  uint32_t worker_count = 0;  // the workers that the job was started with; of an elastic job, its members
  uint32_t most_workers = 0;  // of an elastic job, how many there may be
  uint32_t reducer_count =
      0;                // the reducers that the job was started with; of an elastic job, those due to its members
  std::string missing;  // those whom the job waits for, before its start or at its gates
  std::vector<Process> processes;
};

// --- Messages in the header of a frame. A kLate has a text as its payload, too: the late workers.

// No round runs at this worker: kIdle, and kGoodbye to the coordinator.
struct Idle {
  bool has_groups = false;  // the worker has run an op of a group

  bool operator==(const Idle&) const = default;
};

// All that the sender keeps of optimizers has been copied to those who are to back it up, in this view: kSettled.
struct Settled {
  uint32_t view = 0;
  bool has_states = false;      // there is something to keep
  bool has_candidates = false;  // some of them are to keep it themselves in the next view

  bool operator==(const Settled&) const = default;
};

// A round waits for workers: kLate.
struct Late {
  uint64_t op = 0;
  uint64_t round = 0;
  uint32_t moving_count = 0;  // those of them that still move data: slow, not stuck
  bool disagree = false;      // one of them waits in the same call over another group

  bool operator==(const Late&) const = default;
};

// The view in which the rates of the plan are about to change: kHold.
struct Hold {
  uint32_t view = 0;

  bool operator==(const Hold&) const = default;
};

FrameHeader header_of(const Idle& idle);
FrameHeader header_of(const Settled& settled);
FrameHeader header_of(const Late& late);
FrameHeader header_of(const Hold& hold);

Result<Idle> decode_idle(const FrameHeader& header);
Result<Settled> decode_settled(const FrameHeader& header);
Result<Late> decode_late(const FrameHeader& header);
Result<Hold> decode_hold(const FrameHeader& header);

// --- Messages in the payload of a frame.

Bytes encode(const Registration& registration);
Bytes encode(const View& view);
Bytes encode(const OpDescription& description);
Bytes encode(const StepInputs& step);
Bytes encode(const StepTotals& totals);
Bytes encode(const StateCopy& copy);
Bytes encode(const Join& join);
Bytes encode(const SharedOffer& offer);
Bytes encode(const FabricOffer& offer);
Bytes encode(const Lost& lost);
Bytes encode(const Halt& halt);
Bytes encode(const Progress& progress);
Bytes encode(const Goodput& goodput);
Bytes encode(const NewRates& rates);
Bytes encode(const ProcessState& state);
Bytes encode(const JobState& state);
Bytes encode(const Status& fault);
Bytes encode(std::string_view text);

Result<Registration> decode_registration(std::span<const std::byte> bytes);
Result<View> decode_view(std::span<const std::byte> bytes);
Result<OpDescription> decode_op_description(std::span<const std::byte> bytes);
Result<StepInputs> decode_step_inputs(std::span<const std::byte> bytes);
Result<StepTotals> decode_step_totals(std::span<const std::byte> bytes);
Result<StateCopy> decode_state_copy(std::span<const std::byte> bytes);
Result<Join> decode_join(std::span<const std::byte> bytes);
Result<SharedOffer> decode_shared_offer(std::span<const std::byte> bytes);
Result<FabricOffer> decode_fabric_offer(std::span<const std::byte> bytes);
Result<Lost> decode_lost(std::span<const std::byte> bytes);
Result<Halt> decode_halt(std::span<const std::byte> bytes);
Result<Progress> decode_progress(std::span<const std::byte> bytes);
Result<Goodput> decode_goodput(std::span<const std::byte> bytes);
Result<NewRates> decode_new_rates(std::span<const std::byte> bytes);
Result<ProcessState> decode_process_state(std::span<const std::byte> bytes);
Result<JobState> decode_job_state(std::span<const std::byte> bytes);
Status decode_fault(std::span<const std::byte> bytes);

}  // namespace jaxhetero
