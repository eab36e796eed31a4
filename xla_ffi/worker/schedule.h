// The ops of a worker's program on one strand: which of their rounds wait, run and have completed, and what is kept of
// them.
//
// The strand asks it what to run next; it sends nothing. The strand's thread only.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/transport/lent_memory.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/worker/op.h"
#include "xla_ffi/worker/round.h"

namespace jaxhetero {

class Schedule {
 public:
  using Clock = EventLoop::Clock;

  // Kept contributions lie in `lent_memory`.
  explicit Schedule(std::shared_ptr<LentMemory> lent_memory) : lent_memory_(std::move(lent_memory)) {}

  // This worker comes to a job that has run so many rounds of these ops.
  void begin_behind(const std::vector<View::Count>& counts);
  // Queues the request behind the op's others and returns the op.
  Op& add(RoundRequest request);

  // Of an op that has a request and no running round.
  Round& start_next_round(Op& op);
  // Of an op without a running round: runs a round again that is complete here and not on every other worker.
  Round& replay_round(Op& op, uint64_t number);
  std::unique_ptr<Round> finish_round(Op& op);
  // The reducers change: every round that runs will run anew as its op's next one. Replays end, and are returned.
  std::vector<std::unique_ptr<Round>> stop_rounds();
  // Ends all rounds and returns the requests that are not complete.
  std::vector<RoundRequest> give_up();

  [[nodiscard]] std::unordered_map<uint64_t, Op>& ops() { return ops_; }
  [[nodiscard]] const std::unordered_map<uint64_t, Op>& ops() const { return ops_; }
  // Null if there is no such op.
  [[nodiscard]] Op* find(uint64_t op_id);
  // The round of this number, if it is the op's running one; else null.
  [[nodiscard]] Round* running_round(uint64_t op_id, uint64_t number);
  // Whether no round runs or waits.
  [[nodiscard]] bool is_empty() const { return running_count_ + waiting_count_ == 0; }

  // How many rounds of each op are complete, if none runs.
  [[nodiscard]] std::vector<Progress::OpProgress> progress() const;
  // The same of the ops that had no running or waiting round since then. Each standstill is reported once.
  [[nodiscard]] std::vector<Progress::OpProgress> take_still(Clock::time_point since);
  // All workers have completed so many rounds: frees the contributions that no reducer can need again.
  void forget(const Progress& completed);
  [[nodiscard]] size_t kept_bytes() const;

  // The running round that has had no total for longest; null if none runs.
  [[nodiscard]] const Round* most_patient_round() const;

 private:
  Round& note_started(Round& round);

  const std::shared_ptr<LentMemory> lent_memory_;
  std::unordered_map<uint64_t, Op> ops_;
  std::unordered_map<uint64_t, View::Count> earlier_;  // by op: before this worker came
  size_t running_count_ = 0;
  size_t waiting_count_ = 0;
};

}  // namespace jaxhetero
