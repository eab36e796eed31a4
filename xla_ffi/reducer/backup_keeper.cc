#include "xla_ffi/reducer/backup_keeper.h"

#include <cstring>
#include <utility>

namespace jaxhetero {

Status BackupKeeper::describe_op(uint64_t op, const OpDescription& description) {
  if (!uses_state(description.spec.kind)) return malformed("op: nothing to back up");
  if (ops_.size() >= kMaxOps) return malformed("op: too many to back up");
  Result<StateOp> made = StateOp::make(op, description, states_);
  if (!made.ok()) return made.status();
  ops_.insert_or_assign(op, std::move(*made));
  return {};
}

Status BackupKeeper::take_step(const FrameHeader& header, StepInputs inputs) {
  const auto op = ops_.find(header.op);
  if (op == ops_.end()) return malformed("inputs of a step: of an op that is not known");
  return op->second.start_step(0, header.round, std::move(inputs));
}

Status BackupKeeper::back_up(const FrameHeader& header, std::span<const std::byte> contributions) {
  const auto op = ops_.find(header.op);
  if (op == ops_.end() || !op->second.has_step(header.round)) return malformed("chunk: of a round that is not known");
  if (!contributions.empty() && contributions.size() != header.count * sizeof(float)) return malformed("chunk");
  const OpSpec& spec = op->second.spec();
  const bool has_some = spec.kind == Kind::kStore || !spec.state.resumes;
  if (spec.kind == Kind::kLoad || (header.count > 0 && contributions.empty() == has_some)) return malformed("chunk");
  std::vector<float> values(contributions.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), contributions.data(), contributions.size());
  return op->second.run({header.offset, header.count}, values, {});
}

Status BackupKeeper::take_copy(const StateCopy& copy) {
  KeptState* const state = states_.open(copy.number, copy.count, copy.slot_count, copy.is_backed_up);
  if (state == nullptr) return malformed("copy of a state: of another size");
  if (state->can_undo() != copy.has_earlier) return malformed("copy of a state: of another kind of job");
  const size_t bytes = copy.part.count * sizeof(float);
  const std::byte* from = copy.values.data();
  for (const std::span<float> to : arrays_of(*state, copy.part, copy.has_gradient)) {
    if (to.size() != copy.part.count) return {Code::kInternal, "there is no memory to back up a state"};
    if (bytes > 0) std::memcpy(to.data(), from, bytes);
    from += bytes;
  }
  state->stamp(copy.part, {copy.version, copy.op, copy.round});
  return {};
}

}  // namespace jaxhetero
