// One op of the program on a worker: its rounds, one after the other, and the contribution that is kept of the latest
// one in case a reducer is lost.
//
// Schedule owns the ops. The strand's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/transport/lent_memory.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/kept_contribution.h"
#include "xla_ffi/worker/round.h"

namespace jaxhetero {

class Op {
 public:
  // Kept contributions lie in `lent_memory`. So many rounds were before this worker came.
  explicit Op(const std::shared_ptr<LentMemory>& lent_memory = std::make_shared<LentMemory>(),
              uint64_t earlier_count = 0)
      : started_count_(earlier_count),
        kept_(std::make_unique<KeptContribution>(lent_memory)),
        narrowed_(std::make_unique<KeptContribution>(lent_memory)) {}

  void add(RoundRequest request);
  // How many workers take part, in every round; 0: all of the job.
  [[nodiscard]] uint32_t group_size() const { return spec_ ? static_cast<uint32_t>(spec_->group.size()) : 0; }
  [[nodiscard]] std::vector<uint32_t> group() const { return spec_ ? spec_->group : std::vector<uint32_t>(); }
  // The request of the next round; null if none waits.
  [[nodiscard]] const RoundRequest* next() const { return waiting_.empty() ? nullptr : &waiting_.front(); }
  // Null if none runs.
  [[nodiscard]] Round* running() const { return running_.get(); }
  // How many rounds have started; if none runs, as many are complete.
  [[nodiscard]] uint64_t started_count() const { return started_count_; }
  // How many rounds the program has been given.
  [[nodiscard]] uint64_t given_count() const { return started_count_ - (running_ ? 1 : 0); }

  Round& start_next_round();
  // Runs a round that is complete here once more, from the kept contribution. Requires keeps(number).
  Round& replay_round(uint64_t number);
  [[nodiscard]] bool keeps(uint64_t number) const { return kept_->holds(number); }
  // The running round's first total comes, so no worker needs the kept contribution of the round before: keeps that of
  // the running round in its place.
  void keep_running_round();
  std::unique_ptr<Round> finish_round();
  // The reducers change. Queues the running round's request again as the next one; but a replay ends, and is returned.
  std::unique_ptr<Round> stop_round();
  // Ends the running round and empties the queue; returns all their requests.
  std::vector<RoundRequest> give_up();

  // Whether no round has run or waited since then. True once after each standstill, so that the coordinator hears of it
  // once.
  bool becomes_still(EventLoop::Clock::time_point since);
  // Every worker has completed so many rounds. If the kept one is the last of them, no reducer can need it again.
  void forget(uint64_t completed_count);
  [[nodiscard]] size_t kept_bytes() const { return kept_->bytes() + narrowed_->bytes(); }

  // Whether the reducer has not yet been told in this view what the op's rounds are of now. From now on it has.
  bool is_new_to(uint32_t reducer);
  void enter_view() { describe_anew(); }
  // Its shards are others from now on, so the reducers may not know how far it has got.
  void describe_anew() { described_.clear(); }

  // For messages: of the round that runs or, if none does, of the latest one; empty before the first.
  [[nodiscard]] const std::string& name() const {
    return running_ ? running_->request.description : replay_.description;
  }
  // The description of the kept round's request, for messages.
  [[nodiscard]] const std::string& kept_description() const { return replay_.description; }

 private:
  void set_spec(const OpSpec& spec);

  std::unique_ptr<Round> running_;
  std::deque<RoundRequest> waiting_;
  // The spec of the latest round that has started; before that, of the first one that waits.
  std::optional<OpSpec> spec_;
  uint64_t started_count_ = 0;
  uint64_t still_count_ = 0;  // started_count_ at the latest standstill
  EventLoop::Clock::time_point ended_at_;
  std::vector<bool> described_;  // indexed by reducer
  // Pointers, so that swapping the two moves no memory: queued frames point into the running round's.
  std::unique_ptr<KeptContribution> kept_;
  std::unique_ptr<KeptContribution> narrowed_;  // the contribution of the running round
  RoundRequest replay_;  // the request of the round in kept_, for workers that have not completed it
};

}  // namespace jaxhetero
