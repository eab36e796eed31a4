// An op that works on what reducers keep of an optimizer: what is done with each of its chunks. A step, that is a
// round, goes by inputs that all workers send alike.
//
// The state machine owns it, calls it once all pieces of a chunk are here, and sends its answer. One thread; nothing
// blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/reducer/kept_states.h"
#include "xla_ffi/update/bucket_update.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {

class StateOp {
 public:
  // `states` outlives it. An error where the description is none, or does not fit the state.
  static Result<StateOp> make(const OpDescription& description, KeptStates& states);

  // The elements that the reducer has.
  [[nodiscard]] const Range& share() const { return state_->share(); }

  // A worker's inputs of a round are here. An error where they are of another step than the state is at, or do not fit
  // the description.
  Status start_step(uint32_t rank, uint64_t round, StepInputs inputs);
  // Whether some worker has sent the inputs of this round; and the one that sent them first.
  [[nodiscard]] bool has_step(uint64_t round) const { return round_ == round; }
  [[nodiscard]] uint32_t first_rank() const { return first_rank_; }
  [[nodiscard]] bool agrees(const StepInputs& inputs) const { return inputs_ == inputs; }

  // All of a chunk is here. `contribution`: the root's elements of a store, or the summed gradients; empty where there
  // are none. Writes the answer, which may be in the memory of a contribution of float32.
  Status run(const Range& chunk, std::span<const float> contribution, std::span<std::byte> answer);
  // The round is over.
  void finish_step();
  // Of a measure's round.
  [[nodiscard]] StepTotals totals() const;

 private:
  StateOp(OpSpec spec, KeptState& state) : spec_(std::move(spec)), state_(&state) {}
  Status compute(const Range& chunk, std::span<const float> gradient, std::span<std::byte> answer);

  OpSpec spec_;
  KeptState* state_;
  std::optional<BucketUpdate> update_;
  // Of the running round.
  std::optional<uint64_t> round_;
  uint32_t first_rank_ = 0;
  StepInputs inputs_;
  std::vector<PartialTotal> totals_;
};

}  // namespace jaxhetero
