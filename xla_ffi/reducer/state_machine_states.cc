// The part of the state machine that answers ops which use a state.
#include <algorithm>
#include <iterator>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "xla_ffi/reducer/state_machine.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {

void ReducerStateMachine::answer_state(uint64_t op_id, OpState& op, const Chunk& chunk,
                                       std::vector<Outgoing>& outgoing) {
  const std::shared_ptr<const std::byte> contribution = contribution_of(op, chunk);
  const size_t awaited_count = back_up(op_id, op, chunk, contribution, outgoing);
  Result<std::shared_ptr<std::byte>> answer = run_state(op, chunk, contribution);
  if (!answer.ok()) {
    return fail({answer.status().code(), op_name(op_id, op) + ": " + answer.status().message()}, outgoing);
  }
  op.held.push_back({chunk.range(), op.round, awaited_count, {}});
  std::vector<Outgoing>& answers = op.held.back().answers;
  if (chunk.last && op.spec.kind == Kind::kMeasure) send_totals(op_id, op, answers);
  send_answers(op_id, op, chunk, *answer, answers);
  release_answers(op, outgoing);
}

// What the program of the op works on: the root's elements of a store, or the summed gradients as float32; else null.
std::shared_ptr<const std::byte> ReducerStateMachine::contribution_of(const OpState& op, const Chunk& chunk) {
  const OpSpec& spec = op.spec;
  if (chunk.count == 0 || spec.kind == Kind::kLoad) return nullptr;
  if (spec.kind == Kind::kStore) return chunk.pieces[spec.state.is_of_all ? 0 : spec.place_of(spec.root)].data;
  if (spec.state.resumes) return nullptr;
  const std::shared_ptr<std::byte> total =
      spec.dtype == DType::kF32 ? reduce(spec, chunk) : reduce_widened(spec, chunk);
  if (spec.state.averages) {
    const float factor = 1.0f / static_cast<float>(chunk.pieces.size());
    for (float& sum : std::span(reinterpret_cast<float*>(total.get()), chunk.count)) sum *= factor;
  }
  return total;
}

Result<std::shared_ptr<std::byte>> ReducerStateMachine::run_state(
    OpState& op, const Chunk& chunk, const std::shared_ptr<const std::byte>& contribution) {
  const OpSpec& spec = op.spec;
  const bool wants_answer = spec.kind == Kind::kLoad || spec.kind == Kind::kUpdate;
  const size_t answer_bytes = wants_answer ? chunk.count * spec.result_item_bytes() : 0;
  std::shared_ptr<std::byte> answer;
  if (answer_bytes > 0) answer = pool_->take(answer_bytes);
  const auto* const floats = reinterpret_cast<const float*>(contribution.get());
  const Status status =
      op.state->run(chunk.range(), {floats, contribution == nullptr ? 0 : chunk.count}, {answer.get(), answer_bytes});
  if (!status.ok()) return status;
  return answer;
}

// Hands the chunk to the partners that back it up. Returns how many replies will come.
size_t ReducerStateMachine::back_up(uint64_t op_id, OpState& op, const Chunk& chunk,
                                    const std::shared_ptr<const std::byte>& contribution,
                                    std::vector<Outgoing>& outgoing) {
  const uint64_t number = op.spec.state.number;
  const KeptState& state = op.state->state();
  Backups& backups = kept_->backups;
  if (op.spec.kind == Kind::kLoad) return 0;
  // New weights: what a partner gets now is all that there is.
  if (op.spec.kind == Kind::kStore && op.spec.state.slot == 0) {
    for (const Backups::Copy& copy : backups.assigned(number, state, chunk.range())) backups.note(copy);
  }
  const std::vector<Backups::Copy> copies = backups.copied(number, state, chunk.range());
  for (const Backups::Copy& copy : copies) {
    tell_partner(op_id, op, copy.reducer, outgoing);
    FrameHeader header;
    header.type = FrameType::kBackUp;
    header.op = op_id;
    header.round = op.round;
    header.offset = copy.part.offset;
    header.count = static_cast<uint32_t>(copy.part.count);
    std::span<const std::byte> payload;
    if (contribution != nullptr) {
      payload = {contribution.get() + (copy.part.offset - chunk.offset) * sizeof(float),
                 copy.part.count * sizeof(float)};
    }
    header.payload_bytes = static_cast<uint32_t>(payload.size());
    outgoing.push_back({copy.reducer, header, contribution, payload, true});
  }
  return copies.size();
}

// The op, and the inputs of the running step, unless the partner knows them.
void ReducerStateMachine::tell_partner(uint64_t op_id, OpState& op, uint32_t partner, std::vector<Outgoing>& outgoing) {
  const auto tell = [&](FrameType type, Bytes bytes) {
    const auto payload = std::make_shared<const Bytes>(std::move(bytes));
    FrameHeader header;
    header.type = type;
    header.op = op_id;
    header.round = op.round;
    header.payload_bytes = static_cast<uint32_t>(payload->size());
    outgoing.push_back({partner, header, payload, *payload, true});
  };
  const auto [told, is_new] = op.told.try_emplace(partner);
  if (is_new) tell(FrameType::kDescribe, encode(op.description));
  if (told->second != op.round) tell(FrameType::kStep, encode(op.state->inputs()));
  told->second = op.round;
}

void ReducerStateMachine::note_backed_up(const FrameHeader& header, std::vector<Outgoing>& outgoing) {
  const auto found = ops_.find(header.op);
  if (found == ops_.end()) return;  // the op is of an earlier view
  for (Held& held : found->second.held) {
    const Range part{header.offset, header.count};
    if (held.round != header.round || held.awaited_count == 0 || overlap(part, held.chunk) != part) continue;
    --held.awaited_count;
    break;
  }
  release_answers(found->second, outgoing);
}

// Those of the first chunks, in order.
void ReducerStateMachine::release_answers(OpState& op, std::vector<Outgoing>& outgoing) {
  while (!op.held.empty() && op.held.front().awaited_count == 0) {
    std::ranges::move(op.held.front().answers, std::back_inserter(outgoing));
    op.held.pop_front();
  }
}

void ReducerStateMachine::send_totals(uint64_t op_id, const OpState& op, std::vector<Outgoing>& outgoing) const {
  const auto payload = std::make_shared<const Bytes>(encode(op.state->totals()));
  FrameHeader header;
  header.type = FrameType::kTotals;
  header.op = op_id;
  header.round = op.round;
  header.payload_bytes = static_cast<uint32_t>(payload->size());
  for (uint32_t place = 0; place < member_count(op); ++place) {
    outgoing.push_back({op.spec.rank_at(place), header, payload, *payload});
  }
}

}  // namespace jaxhetero
