// A reducer without sockets: frames of workers go in, frames for workers come out.
//
// A chunk of a round is open until the piece of every worker of the op's group is here; then the pieces are summed in
// rank order and the total goes to these workers. Stake tells which part of the chunk a worker pushes, and which part
// of the total it is sent. A worker's window bounds how many chunks of a shard it may have open, so memory is bounded
// by workers x window x chunk for each op that runs.
//
// There are two kinds of errors. A Status returned for a frame means that this one worker broke the protocol: the
// caller closes its connection. A fault means that the job cannot go on: every worker is told why.
//
// A strand calls it on its thread; nothing here blocks. Every function appends the frames to send to
// `outgoing`, and the caller sends them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/reducer/backups.h"
#include "xla_ffi/reducer/chunk_pool.h"
#include "xla_ffi/reducer/state_op.h"
#include "xla_ffi/transport/lent_memory.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {

// A frame for a worker, or for a partner, that is a reducer that backs this one up. `owner` keeps the memory of
// `payload` alive.
struct Outgoing {
  uint32_t rank = 0;  // the worker that gets it; or the number of a partner
  FrameHeader header;
  std::shared_ptr<const void> owner;
  std::span<const std::byte> payload;
  bool is_for_partner = false;
  size_t saved_bytes = 0;  // by which the payload is shorter than its elements
};

// By rank, how long rounds have waited for it, in milliseconds: as a process names its late workers.
std::vector<ProcessState::LateWorker> latest_first(const std::map<uint32_t, int64_t>& waited_ms);

class ReducerStateMachine {
 public:
  struct Job {
    std::vector<std::string> worker_hosts;  // indexed by rank
    JobShape shape;
    std::vector<uint32_t> members = {};  // of an elastic job, the ranks of the view
    uint32_t own_number = 0;             // the number of this reducer
  };

  // Totals lie in `lent_memory`.
  explicit ReducerStateMachine(Job job, std::shared_ptr<LentMemory> lent_memory = std::make_shared<LentMemory>(),
                               std::shared_ptr<KeptOptimizers> kept = std::make_shared<KeptOptimizers>(0));
  ~ReducerStateMachine();
  ReducerStateMachine(const ReducerStateMachine&) = delete;
  ReducerStateMachine& operator=(const ReducerStateMachine&) = delete;

  // The spec of header.op from header.round on, as `rank` sees it, before its first push of that round. If it is not
  // the spec of the other workers in that round, the job has a fault.
  Status describe_op(uint32_t rank, const FrameHeader& header, OpDescription description,
                     std::vector<Outgoing>& outgoing);

  // What `rank` knows of the round's step, before its first push of the round, of an op that uses a state.
  Status take_step(uint32_t rank, const FrameHeader& header, StepInputs inputs, std::vector<Outgoing>& outgoing);

  // The header of a kPush frame from `rank` is here. Returns the memory for its payload, header.payload_bytes long and
  // valid until finish_push() or a fault. `now_ms` is any steady clock; only report_late() uses it.
  Result<std::span<std::byte>> start_push(uint32_t rank, const FrameHeader& header, int64_t now_ms,
                                          std::vector<Outgoing>& outgoing);

  // The payload is in the memory that start_push() returned.
  Status finish_push(uint32_t rank, const FrameHeader& header, int64_t now_ms, std::vector<Outgoing>& outgoing);

  // Elastic jobs: `rank` holds all of the total of a round. Once all members of the op's group do, they are told.
  Status note_held(uint32_t rank, const FrameHeader& header, std::vector<Outgoing>& outgoing);

  // A partner has what kBackUp said: answers that waited for it are sent.
  void note_backed_up(const FrameHeader& header, std::vector<Outgoing>& outgoing);

  // Both in one, for a payload that the worker lends until the total is sent to it. False, with nothing done, where
  // that is too short and the payload has to be copied: the total of a broadcast or a gather is a worker's own piece.
  // Nor where it is coded.
  Result<bool> take_lent(uint32_t rank, const FrameHeader& header, std::shared_ptr<const std::byte> payload,
                         int64_t now_ms, std::vector<Outgoing>& outgoing);

  // `rank` is gone: in order when `why` is ok, lost otherwise. A fault if a round still needs it.
  void leave(uint32_t rank, const Status& why, std::vector<Outgoing>& outgoing);

  // `rank` waits in this round for other workers, as a reducer has told it.
  void note_waiting(uint32_t rank, std::string round, int64_t now_ms);

  // Tells each worker that has waited in a round for `patience_ms` without progress which workers it waits for, in
  // which rounds these wait themselves, and how many of them still move data (`moving`, by rank): they are slow, not
  // stuck.
  void report_late(int64_t now_ms, int64_t patience_ms, std::vector<Outgoing>& outgoing,
                   const std::vector<bool>& moving = {}) const;

  // The workers that running rounds wait for, those first for which one has waited longest.
  [[nodiscard]] std::vector<ProcessState::LateWorker> late_workers(int64_t now_ms) const;

  // Ends the job: every worker that has not left is told `why`. Only the first call counts.
  void fail(const Status& why, std::vector<Outgoing>& outgoing);

  // Ok until the job failed.
  [[nodiscard]] const Status& fault() const { return fault_; }
  // Of several parts of a bucket's rounds, only those of part 0 count.
  [[nodiscard]] uint64_t completed_round_count() const { return completed_round_count_; }
  [[nodiscard]] uint32_t worker_count() const { return static_cast<uint32_t>(job_.worker_hosts.size()); }
  [[nodiscard]] std::string worker_name(uint32_t rank) const;  // "rank 3 (host b)"
  // As many as there were: of the workers that have the ranks now.
  void name_hosts(std::vector<std::string> hosts) { job_.worker_hosts = std::move(hosts); }

 private:
  struct Piece {
    std::shared_ptr<std::byte> coded;       // the payload as it comes, where it is coded
    std::shared_ptr<std::byte> memory;      // null where the payload is lent or the rank contributes none
    std::shared_ptr<const std::byte> data;  // the elements, in `memory` or lent
    bool arrived = false;
    bool is_coded = false;  // the rank pushed it so, and may be answered so
  };
  struct Chunk {
    uint64_t offset = 0;
    uint32_t count = 0;
    bool last = false;
    uint32_t first_rank = 0;  // the worker that pushed it first
    uint32_t arrived_count = 0;
    std::vector<Piece> pieces;  // indexed by place in the group

    [[nodiscard]] Range range() const { return {offset, count}; }
    // Where a part of the chunk lies in the chunk's memory, in bytes.
    [[nodiscard]] size_t place_of(const Range& part, const OpSpec& spec) const {
      return (part.offset - offset) * item_bytes(spec.dtype);
    }
  };
  // The answers to a chunk of an op that uses a state. They wait until all partners have what they are to back up of
  // it.
  struct Held {
    Range chunk;
    uint64_t round = 0;
    size_t awaited_count = 0;
    std::vector<Outgoing> answers;
  };
  struct PushPosition {  // where one worker is in the running round
    uint64_t chunk_count = 0;
    uint64_t end = 0;   // the offset of its next chunk
    bool last = false;  // the worker has no next chunk
  };
  // An op as one worker described it.
  struct Description {
    std::string text;
    uint64_t round = 0;   // the first round that it holds for
    uint64_t change = 0;  // the change of the op's spec up to which it holds
  };
  // In which round a worker waits.
  struct Waiting {
    std::string round;
    int64_t told_ms = 0;
  };
  struct OpState {
    OpSpec spec;
    OpSpec earlier_spec;                                   // the spec before the latest change
    uint64_t change_count = 0;                             // how often the spec has changed
    uint64_t spec_round = 0;                               // the latest round of which a worker described it
    uint32_t first_rank = 0;                               // the worker that described it so first
    std::vector<std::optional<Description>> descriptions;  // indexed by rank
    uint64_t round = 0;                                    // the running one, or the next if none runs
    // Of the running round.
    bool running = false;
    int64_t progress_ms = 0;  // the time of its start, or of its latest complete chunk
    uint64_t completed_chunk_count = 0;
    uint32_t items_per_chunk = 0;      // elements; the shard's last chunk may have fewer
    std::deque<Chunk> open;            // the chunks behind the completed ones
    std::vector<PushPosition> pushed;  // indexed by place in the group
    std::vector<bool> holders;         // who holds the total of the round before; empty where nobody has said so
    // Of an op that uses a state.
    std::optional<StateOp> state;
    std::vector<std::optional<uint64_t>> steps;  // the round whose inputs each member has sent, indexed by place
    OpDescription description;
    // The round whose step a partner knows, keyed by partners that know the op.
    std::map<uint32_t, std::optional<uint64_t>> told;
    std::deque<Held> held;

    // Whether a shard that has come to this offset goes on at the bucket's beginning.
    [[nodiscard]] bool goes_on_at_the_beginning(uint64_t offset) const {
      const Range& shard = description.shard;
      return state && offset == spec.total_count && shard.offset + shard.count > spec.total_count;
    }
    // Whether its round waits for a worker, and has made no progress for so long.
    [[nodiscard]] bool is_late(int64_t now_ms, int64_t patience_ms) const {
      return running && !open.empty() && now_ms - progress_ms >= patience_ms;
    }
  };

  Status narrow(OpSpec& spec) const;
  static uint64_t change_spec(OpState& op, const OpSpec& spec);
  Result<Piece*> start_piece(uint32_t rank, const FrameHeader& header, int64_t now_ms, std::vector<Outgoing>& outgoing);
  Status decode_piece(const OpState& op, uint32_t rank, const FrameHeader& header, Piece& piece);
  [[nodiscard]] Status check_chunk(const OpState& op, uint32_t rank, const FrameHeader& header) const;
  void start_round(OpState& op, uint32_t rank, const FrameHeader& header, int64_t now_ms);
  Result<Chunk*> next_chunk(OpState& op, uint32_t rank, const FrameHeader& header, std::vector<Outgoing>& outgoing);
  void complete_front(uint64_t op_id, OpState& op, std::vector<Outgoing>& outgoing);
  Status use_state(uint64_t op_id, OpState& op, const OpDescription& description, bool is_new);
  void answer_state(uint64_t op_id, OpState& op, const Chunk& chunk, std::vector<Outgoing>& outgoing);
  Result<std::shared_ptr<std::byte>> run_state(OpState& op, const Chunk& chunk,
                                               const std::shared_ptr<const std::byte>& contribution);
  std::shared_ptr<const std::byte> contribution_of(const OpState& op, const Chunk& chunk);
  size_t back_up(uint64_t op_id, OpState& op, const Chunk& chunk, const std::shared_ptr<const std::byte>& contribution,
                 std::vector<Outgoing>& outgoing);
  static void release_answers(OpState& op, std::vector<Outgoing>& outgoing);
  static void tell_partner(uint64_t op_id, OpState& op, uint32_t partner, std::vector<Outgoing>& outgoing);
  void send_totals(uint64_t op_id, const OpState& op, std::vector<Outgoing>& outgoing) const;
  void send_answers(uint64_t op_id, const OpState& op, const Chunk& chunk, const std::shared_ptr<std::byte>& total,
                    std::vector<Outgoing>& outgoing) const;
  [[nodiscard]] Outgoing coded(const Outgoing& plain, DType dtype) const;
  std::shared_ptr<std::byte> reduce(const OpSpec& spec, const Chunk& chunk);
  std::shared_ptr<std::byte> reduce_widened(const OpSpec& spec, const Chunk& chunk);
  std::shared_ptr<std::byte> join(const OpSpec& spec, const Chunk& chunk);
  [[nodiscard]] Status disagreement(const FrameHeader& header, const std::string& how) const;
  [[nodiscard]] Status other_spec(const FrameHeader& header, uint32_t rank, const OpSpec& spec,
                                  const OpState& op) const;
  [[nodiscard]] std::string says(uint32_t rank, const OpSpec& spec, const OpState& op) const;
  [[nodiscard]] std::string op_name(uint64_t op_id, const OpState& op) const;
  [[nodiscard]] const OpState* find_other_group(const OpState& op, uint32_t rank, int64_t now_ms,
                                                int64_t patience_ms) const;
  static void tell_absent(uint64_t op_id, uint64_t round, uint32_t rank, std::vector<uint32_t> ranks,
                          std::vector<Outgoing>& outgoing);
  void report_holders(uint64_t op_id, const OpState& op, int64_t since_ms, std::vector<Outgoing>& outgoing) const;
  [[nodiscard]] static std::vector<uint32_t> missing_workers(const OpState& op);
  [[nodiscard]] uint32_t member_count(const OpState& op) const { return op.spec.member_count(worker_count()); }

  Job job_;
  std::shared_ptr<ChunkPool> pool_;
  std::shared_ptr<KeptOptimizers> kept_;
  std::unordered_map<uint64_t, OpState> ops_;
  std::vector<bool> gone_;  // indexed by rank, like the next
  std::vector<Waiting> waiting_;
  Status fault_;
  uint64_t completed_round_count_ = 0;
};

}  // namespace jaxhetero
