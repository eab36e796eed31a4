// An op that works on what reducers keep of an optimizer: what is done with each of its chunks. A step, that is a
// round, goes by inputs that all workers send alike. The reducer that has a share of the bucket runs it, and so does
// the one that backs the share up.
//
// One thread; nothing blocks.
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
  static Result<StateOp> make(uint64_t op, const OpDescription& description, KeptStates& states);

  [[nodiscard]] const OpSpec& spec() const { return spec_; }
  [[nodiscard]] KeptState& state() { return *state_; }

  // A worker's inputs of a round are here. An error where they do not fit the description.
  Status start_step(uint32_t rank, uint64_t round, StepInputs inputs);
  // Whether some worker has sent the inputs of this round; and the one that sent them first.
  [[nodiscard]] bool has_step(uint64_t round) const { return round_ == round; }
  [[nodiscard]] uint32_t first_rank() const { return first_rank_; }
  [[nodiscard]] const StepInputs& inputs() const { return inputs_; }

  // All of a chunk is here. `contribution`: the root's elements of a store, or the summed gradients; empty where there
  // are none. Writes the answer, which is empty where nobody wants one. What a round has done already it does not do
  // again; but where updates can be undone it undoes and does it again, as its contributions may be others. An error
  // where the elements are not kept here, or are of another step.
  Status run(const Range& chunk, std::span<const float> contribution, std::span<std::byte> answer);
  // The round is over.
  void finish_step() { round_.reset(); }
  // Of a measure's round.
  [[nodiscard]] StepTotals totals() const;

 private:
  StateOp(uint64_t op, OpSpec spec, KeptState& state) : op_(op), spec_(std::move(spec)), state_(&state) {}
  Status run_alike(const KeptState::Run& run, std::span<const float> contribution, std::span<std::byte> answer);
  Status store(const Range& part, std::span<const float> values);
  Status compute(const Range& part, std::span<const float> gradient, std::span<std::byte> answer);
  Status give(const Range& part, std::span<std::byte> answer);
  [[nodiscard]] Status no_memory() const;
  // The weights that workers get are bfloat16.
  [[nodiscard]] bool narrows() const { return spec_.kind == Kind::kUpdate && spec_.state.weights == DType::kBF16; }

  uint64_t op_;
  OpSpec spec_;
  KeptState* state_;
  std::optional<BucketUpdate> update_;
  // Of the running round.
  std::optional<uint64_t> round_;
  uint32_t first_rank_ = 0;
  StepInputs inputs_;
  std::vector<PartialTotal> totals_;
  std::vector<std::byte> unwanted_;  // an answer that nobody wants
};

}  // namespace jaxhetero
