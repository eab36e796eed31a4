// One op of the program on the worker: its rounds, one after the other, and what has to stay in case a reducer is lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/transport/lent_memory.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/kept_contribution.h"
#include "xla_ffi/worker/round.h"

namespace jaxhetero {

class Op {
 public:
  // What is kept lies in `lent_memory`.
  explicit Op(const std::shared_ptr<LentMemory>& lent_memory = std::make_shared<LentMemory>())
      : kept_(std::make_unique<KeptContribution>(lent_memory)),
        narrowed_(std::make_unique<KeptContribution>(lent_memory)) {}

  void add(RoundRequest request) { waiting_.push_back(std::move(request)); }
  // Whether this is what the reducers were told of the op's rounds.
  [[nodiscard]] bool agrees(const OpSpec& spec);
  // The request that is next in turn; null if none waits.
  [[nodiscard]] const RoundRequest* next() const { return waiting_.empty() ? nullptr : &waiting_.front(); }
  [[nodiscard]] Round* running() const { return running_.get(); }
  // How many rounds have begun; so many are over when none is running.
  [[nodiscard]] uint64_t begun_count() const { return begun_count_; }

  // The next one runs.
  Round& begin();
  // A round that is over here, and not elsewhere, runs again, with what is kept. Only if that is of this round.
  Round& begin_again(uint64_t number);
  [[nodiscard]] bool keeps(uint64_t number) const { return kept_->holds(number); }
  // A total of the running round comes, so nobody needs the round before any more: from here on its place is taken.
  void keep(bool has_data);
  // The running round is over.
  std::unique_ptr<Round> finish();
  // The reducers change. The running round will begin anew as the next one, unless it ran for others only: whether so.
  bool stop();
  // All that was asked for and is not over.
  std::vector<RoundRequest> give_up();

  // Whether none of its rounds has run or waited since then. Said once, so that the coordinator hears it once.
  bool is_still(EventLoop::Clock::time_point since);
  // Every worker has completed so many: where that is all there were, nobody can need the last one again.
  void forget(uint64_t completed_count);
  [[nodiscard]] size_t kept_bytes() const { return kept_->bytes() + narrowed_->bytes(); }

  // Whether this is the first time in this view that a reducer hears of the op.
  bool is_new_to(uint32_t reducer);
  void enter_view() { described_.clear(); }

  // What messages call the op's kept round.
  [[nodiscard]] const std::string& kept_description() const { return replay_.description; }

 private:
  std::unique_ptr<Round> running_;
  std::deque<RoundRequest> waiting_;
  std::optional<OpSpec> spec_;
  uint64_t begun_count_ = 0;
  uint64_t still_count_ = 0;  // begun_count_ when it was still last
  EventLoop::Clock::time_point ended_;
  std::vector<bool> described_;  // by reducer
  // Each stays where it is when the two are swapped: frames that are queued point into the running round's.
  std::unique_ptr<KeptContribution> kept_;
  std::unique_ptr<KeptContribution> narrowed_;  // of the running round
  RoundRequest replay_;                         // the round that kept_ is of, for those who have not completed it
};

}  // namespace jaxhetero
