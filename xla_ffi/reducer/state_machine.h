// What a reducer does, without sockets: frames of workers go in, frames for workers come out.
//
// A chunk of a round is open until every worker's piece of it is here; then the pieces are summed in rank order and the
// total goes to every worker. A worker's window bounds how many chunks of a shard it may have open, so memory is
// bounded by workers x window x chunk for each op that is running.
//
// Two kinds of trouble: a Status returned by begin() or commit() means that this one worker broke the protocol, and its
// connection should be closed; a fault means that the job as a whole cannot go on, and every worker is told why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/lent_memory.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {

// A frame that the reducer wants sent to a worker. `owner` keeps the memory of `payload` alive.
struct Outgoing {
  uint32_t rank = 0;
  FrameHeader header;
  std::shared_ptr<const void> owner;
  std::span<const std::byte> payload;
};

class ReducerStateMachine {
 public:
  struct Job {
    std::vector<std::string> worker_hosts;  // by rank
    JobShape shape;
    bool resumed = false;  // not the first view: ops begin with the round that everybody resumes from
  };

  // Totals lie in `lent_memory`.
  explicit ReducerStateMachine(Job job, std::shared_ptr<LentMemory> lent_memory = std::make_shared<LentMemory>());
  ~ReducerStateMachine();
  ReducerStateMachine(const ReducerStateMachine&) = delete;
  ReducerStateMachine& operator=(const ReducerStateMachine&) = delete;

  // What header.op is, as `rank` sees it, of which it will push round header.round first. Workers that disagree are a
  // fault.
  Status describe_op(uint32_t rank, const FrameHeader& header, OpDescription description,
                     std::vector<Outgoing>& outgoing);

  // The header of a kPush frame from `rank` is here. Returns where its payload belongs, header.payload_bytes long and
  // valid until commit() or a fault. `now_ms` is any steady clock; it only feeds report_late().
  Result<std::span<std::byte>> begin(uint32_t rank, const FrameHeader& header, int64_t now_ms,
                                     std::vector<Outgoing>& outgoing);

  // The payload that begin() asked for is complete.
  Status commit(uint32_t rank, const FrameHeader& header, int64_t now_ms, std::vector<Outgoing>& outgoing);

  // Both in one, for a payload that is here already, and stays until the total is sent to `rank`. False where that is
  // too short, so that it has to be copied: a broadcast's total is the root's own piece.
  Result<bool> take_lent(uint32_t rank, const FrameHeader& header, std::shared_ptr<const std::byte> payload,
                         int64_t now_ms, std::vector<Outgoing>& outgoing);

  // `rank` is gone: in order when `why` is ok, lost otherwise. Faults the job if somebody still needs it.
  void leave(uint32_t rank, const Status& why, std::vector<Outgoing>& outgoing);

  // Tells every worker that waits in a round without progress for `patience_ms` whom it waits for, and of how many of
  // those data still `moving` (by rank) says that it moves: they are slow, not stuck.
  void report_late(int64_t now_ms, int64_t patience_ms, std::vector<Outgoing>& outgoing,
                   const std::vector<bool>& moving = {}) const;

  // Ends the job: every worker that is still here gets `why`. Only the first call counts.
  void fail(const Status& why, std::vector<Outgoing>& outgoing);

  // Ok until the job failed.
  [[nodiscard]] const Status& fault() const { return fault_; }
  [[nodiscard]] uint64_t completed_round_count() const { return completed_round_count_; }
  [[nodiscard]] uint32_t worker_count() const { return static_cast<uint32_t>(job_.worker_hosts.size()); }
  [[nodiscard]] std::string worker_name(uint32_t rank) const;  // "rank 3 (host b)"

 private:
  class Pool;
  struct Piece {
    std::shared_ptr<std::byte> memory;      // none where it is lent, or the round takes no payload from this rank
    std::shared_ptr<const std::byte> data;  // there, or where it is lent
    bool arrived = false;
  };
  struct Chunk {
    uint64_t offset = 0;
    uint32_t count = 0;
    bool last = false;
    uint32_t first_rank = 0;  // who pushed it first
    uint32_t arrived_count = 0;
    std::vector<Piece> pieces;  // by rank
  };
  struct PushPosition {  // by one worker, of the running round
    uint64_t chunk_count = 0;
    uint64_t end = 0;   // where the next chunk begins
    bool last = false;  // there is no next one
  };
  struct OpState {
    OpSpec spec;
    uint32_t first_rank = 0;                               // who described it first
    std::vector<std::optional<std::string>> descriptions;  // by rank
    uint64_t round = 0;                                    // the running one, or the next if none is running
    bool fresh = true;                                     // none has run
    bool running = false;
    int64_t progress_ms = 0;             // when it started, or last completed a chunk
    uint64_t completed_chunk_count = 0;  // of the running round
    uint32_t chunk_count = 0;            // elements of each of its chunks, but perhaps of the shard's last one
    std::deque<Chunk> open;              // the chunks after those
    std::vector<PushPosition> pushed;    // by rank
  };

  Result<Piece*> begin_piece(uint32_t rank, const FrameHeader& header, int64_t now_ms, std::vector<Outgoing>& outgoing);
  [[nodiscard]] Status check_chunk(const OpState& op, uint32_t rank, const FrameHeader& header) const;
  void start_round(OpState& op, const FrameHeader& header, int64_t now_ms);
  Result<Chunk*> next_chunk(OpState& op, uint32_t rank, const FrameHeader& header, std::vector<Outgoing>& outgoing);
  void complete_front(uint64_t op_id, OpState& op, std::vector<Outgoing>& outgoing);
  [[nodiscard]] Status disagreement(const FrameHeader& header, const std::string& how) const;
  [[nodiscard]] std::string says(uint32_t rank, const OpSpec& spec, const OpState& op) const;
  [[nodiscard]] std::string op_name(uint64_t op_id, const OpState& op) const;
  [[nodiscard]] std::vector<uint32_t> missing_workers(const OpState& op) const;

  Job job_;
  std::shared_ptr<Pool> pool_;
  std::unordered_map<uint64_t, OpState> ops_;
  std::vector<bool> gone_;  // by rank
  Status fault_;
  uint64_t completed_round_count_ = 0;
  std::string last_completed_ = "none";
};

}  // namespace jaxhetero
