#include "xla_ffi/reducer/state_op.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

namespace jaxhetero {
namespace {

Status no_memory(const Range& share) {
  return {Code::kInternal, "there is no memory for " + std::to_string(share.count) + " elements of it"};
}

Status misses_chunk() { return malformed("chunk: it is not the shard's"); }

}  // namespace

Result<StateOp> StateOp::make(const OpDescription& description, KeptStates& states) {
  const OpSpec& spec = description.spec;
  if (overlap(description.shard, {0, spec.total_count}) != description.shard)
    return malformed("op: an impossible shard");
  Result<KeptState*> state = states.find(spec, description.shard);
  if (!state.ok()) return state.status();
  StateOp op(spec, **state);
  if (spec.kind != Kind::kMeasure && spec.kind != Kind::kUpdate) {
    return description.update.empty() ? Result<StateOp>(std::move(op))
                                      : malformed("op: an update that it does not use");
  }
  Result<UpdateDescription> decoded = decode_update(description.update);
  if (!decoded.ok()) return decoded.status();
  const OutputType weights = spec.state.weights == DType::kBF16 ? OutputType::kBF16 : OutputType::kF32;
  if (decoded->has_outputs != (spec.kind == Kind::kUpdate) || decoded->weights != weights ||
      decoded->state_count + size_t{1} > spec.state.slot_count) {
    return malformed("op: an update that does not fit it");
  }
  const uint64_t bucket_count = std::max(spec.bucket_count, spec.total_count);
  Result<BucketUpdate> update = BucketUpdate::make(*decoded, bucket_count, states.runners());
  if (!update.ok()) return update.status();
  op.update_ = std::move(*update);
  return op;
}

Status StateOp::start_step(uint32_t rank, uint64_t round, StepInputs inputs) {
  if (spec_.kind != Kind::kStore && inputs.version != state_->version) {
    return {Code::kInvalidArgument, "this state of the optimizer is that after " + std::to_string(inputs.version) +
                                        " updates, and the reducers keep the one after " +
                                        std::to_string(state_->version) +
                                        "; an update changes the state there, so that each one can be used once"};
  }
  round_ = round;
  first_rank_ = rank;
  inputs_ = std::move(inputs);
  totals_.clear();
  if (!update_) return inputs_.scalars.empty() ? Status() : malformed("inputs of a step: scalars that nothing needs");
  std::vector<float> scalars(inputs_.scalars.size());
  std::ranges::transform(inputs_.scalars, scalars.begin(), [](uint32_t bits) { return std::bit_cast<float>(bits); });
  return update_->start_step(scalars);
}

Status StateOp::run(const Range& chunk, std::span<const float> contribution, std::span<std::byte> answer) {
  if (overlap(chunk, state_->share()) != chunk) return misses_chunk();
  if (chunk.count == 0) return {};
  if (update_) return compute(chunk, contribution, answer);
  const std::span<float> slot = state_->slot(spec_.state.slot, chunk);
  if (slot.empty()) return no_memory(state_->share());
  if (spec_.kind == Kind::kStore) {
    std::ranges::copy(contribution, slot.begin());
    if (spec_.state.slot == 0) state_->clear_states(chunk);
  } else {
    std::memcpy(answer.data(), slot.data(), answer.size());
  }
  return {};
}

Status StateOp::compute(const Range& chunk, std::span<const float> gradient, std::span<std::byte> answer) {
  const bool is_kept = spec_.state.resumes || spec_.kind == Kind::kMeasure;
  if (is_kept) {
    const std::span<float> kept = state_->gradient(chunk);
    if (kept.empty()) return no_memory(state_->share());
    if (!spec_.state.resumes) std::ranges::copy(gradient, kept.begin());
    gradient = kept;
  }
  std::vector<std::span<float>> slots;
  for (uint32_t slot = 0; slot < state_->slot_count(); ++slot) {
    slots.push_back(state_->slot(slot, chunk));
    if (slots.back().empty()) return no_memory(state_->share());
  }
  const bool narrows = spec_.kind == Kind::kUpdate && spec_.state.weights == DType::kBF16;
  const BucketUpdate::Operands operands{gradient, slots, narrows ? answer : std::span<std::byte>()};
  if (Status status = update_->run(spec_.state.first + chunk.offset, operands, totals_); !status.ok()) return status;
  if (spec_.kind == Kind::kUpdate && !narrows) std::memcpy(answer.data(), slots[0].data(), answer.size());
  return {};
}

void StateOp::finish_step() {
  round_.reset();
  if (spec_.kind == Kind::kStore) state_->version = 0;
  if (spec_.kind == Kind::kUpdate) ++state_->version;
}

StepTotals StateOp::totals() const {
  StepTotals totals;
  for (const PartialTotal& partial : totals_) {
    for (const Subtree& subtree : partial.sum.subtrees()) {
      totals.parts.push_back({partial.total, subtree.first, subtree.level, std::bit_cast<uint64_t>(subtree.sum)});
    }
  }
  return totals;
}

}  // namespace jaxhetero
