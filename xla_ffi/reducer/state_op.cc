#include "xla_ffi/reducer/state_op.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "xla_ffi/sum/convert.h"

namespace jaxhetero {
namespace {

Status is_lost() {
  return {Code::kReducerLost,
          "a part of its weights and states was on reducers that are lost, and nowhere else; start again from a "
          "checkpoint"};
}

// A version has the number of updates behind that of the store: see StateModels::start().
Status is_elsewhere(uint64_t wanted, uint64_t kept) {
  constexpr uint64_t kUpdates = (uint64_t{1} << 24) - 1;
  if ((wanted | kUpdates) != (kept | kUpdates)) {
    return {Code::kInvalidArgument,
            "the weights of another init() or push() have taken the place of those that this state of the optimizer is "
            "for; give push() the state whose place its weights are to take"};
  }
  return {Code::kInvalidArgument, "this state of the optimizer is that after " + std::to_string(wanted & kUpdates) +
                                      " updates, and the reducers keep the one after " +
                                      std::to_string(kept & kUpdates) +
                                      "; an update changes the state there, so that each one can be used once"};
}

}  // namespace

Result<StateOp> StateOp::make(uint64_t op, const OpDescription& description, KeptStates& states) {
  const OpSpec& spec = description.spec;
  if (description.shard.offset > spec.total_count || description.shard.count > spec.total_count) {
    return malformed("op: an impossible shard");
  }
  const bool computes = spec.kind == Kind::kMeasure || spec.kind == Kind::kUpdate;
  if (!computes && !description.update.empty()) return malformed("op: an update that it does not use");
  std::optional<BucketUpdate> update;
  if (computes) {
    Result<UpdateDescription> decoded = decode_update(description.update);
    if (!decoded.ok()) return decoded.status();
    const OutputType weights = spec.state.weights == DType::kBF16 ? OutputType::kBF16 : OutputType::kF32;
    if (decoded->has_outputs != (spec.kind == Kind::kUpdate) || decoded->weights != weights ||
        decoded->state_count + size_t{1} > spec.state.slot_count) {
      return malformed("op: an update that does not fit it");
    }
    const uint64_t bucket_count = std::max(spec.bucket_count, spec.total_count);
    Result<BucketUpdate> made = BucketUpdate::make(*decoded, bucket_count, states.runners());
    if (!made.ok()) return made.status();
    update = std::move(*made);
  }
  Result<KeptState*> state = states.find(spec);
  if (!state.ok()) return state.status();
  StateOp made(op, spec, **state);
  made.update_ = std::move(update);
  return made;
}

Status StateOp::no_memory() const {
  return {Code::kInternal, "there is no memory for " + std::to_string(state_->count()) + " elements of it"};
}

Status StateOp::start_step(uint32_t rank, uint64_t round, StepInputs inputs) {
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
  if (overlap(chunk, {0, state_->count()}) != chunk || !round_.has_value()) return malformed("chunk: it is not there");
  const size_t item = spec_.result_item_bytes();
  for (const KeptState::Run& run : state_->runs(chunk)) {
    const uint64_t at = run.range.offset - chunk.offset;
    const auto given = contribution.empty() ? contribution : contribution.subspan(at, run.range.count);
    const auto wanted = answer.empty() ? answer : answer.subspan(at * item, run.range.count * item);
    if (Status status = run_alike(run, given, wanted); !status.ok()) return status;
  }
  return {};
}

// On elements that are equally far.
Status StateOp::run_alike(const KeptState::Run& run, std::span<const float> contribution, std::span<std::byte> answer) {
  if (spec_.kind == Kind::kStore && (spec_.state.slot == 0 || run.stamp.has_value())) {
    return store(run.range, contribution);
  }
  if (!run.stamp.has_value()) return is_lost();
  const KeptState::Stamp done{inputs_.version + 1, op_, *round_};
  const bool is_done = spec_.kind == Kind::kUpdate && *run.stamp == done;
  // In a later view of an elastic job, others may take part in the same round.
  if (is_done && state_->can_undo()) {
    state_->undo(run.range);
    return compute(run.range, contribution, answer);
  }
  // Nobody has a later state than the reducers. What is behind was kept here once, for a reducer that is lost now.
  if (run.stamp->version < inputs_.version) return is_lost();
  if (run.stamp->version > inputs_.version && !is_done) return is_elsewhere(inputs_.version, run.stamp->version);
  if (!update_ || is_done) return answer.empty() ? Status() : give(run.range, answer);
  const bool updates = spec_.kind == Kind::kUpdate;
  if (updates && state_->can_undo() && !state_->note_earlier(run.range)) return no_memory();
  if (Status status = compute(run.range, contribution, answer); !status.ok()) return status;
  if (updates) state_->stamp(run.range, done);
  return {};
}

Status StateOp::store(const Range& part, std::span<const float> values) {
  const std::span<float> slot = state_->slot(spec_.state.slot, part);
  if (slot.empty()) return no_memory();
  std::ranges::copy(values, slot.begin());
  if (spec_.state.slot > 0) return {};
  state_->clear_states(part);
  state_->stamp(part, {inputs_.version, op_, *round_});
  return {};
}

Status StateOp::compute(const Range& part, std::span<const float> gradient, std::span<std::byte> answer) {
  if (spec_.state.resumes || spec_.kind == Kind::kMeasure) {
    const std::span<float> kept = state_->gradient(part);
    if (kept.empty()) return no_memory();
    if (!spec_.state.resumes) std::ranges::copy(gradient, kept.begin());
    gradient = kept;
  }
  std::vector<std::span<float>> slots;
  for (uint32_t slot = 0; slot < state_->slot_count(); ++slot) {
    slots.push_back(state_->slot(slot, part));
    if (slots.back().empty()) return no_memory();
  }
  std::span<std::byte> narrowed;
  if (narrows()) {
    if (answer.empty()) unwanted_.resize(part.count * sizeof(uint16_t));
    narrowed = answer.empty() ? std::span(unwanted_) : answer;
  }
  Status status = update_->run(spec_.state.first + part.offset, {gradient, slots, narrowed}, totals_);
  if (!status.ok() || answer.empty() || narrows()) return status;
  return give(part, answer);
}

// The weights, or the slot that is loaded, as workers get it.
Status StateOp::give(const Range& part, std::span<std::byte> answer) {
  const std::span<float> slot = state_->slot(spec_.state.slot, part);
  if (slot.empty()) return no_memory();
  if (narrows()) {
    narrow(DType::kBF16, slot, answer.data());
  } else {
    std::memcpy(answer.data(), slot.data(), answer.size());
  }
  return {};
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
