#include "xla_ffi/reducer/state_machine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "xla_ffi/codec/float_code.h"
#include "xla_ffi/codec/number_code.h"
#include "xla_ffi/sum/convert.h"
#include "xla_ffi/sum/mean.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {
namespace {

size_t bytes_of(const OpSpec& spec, const Range& range) { return range.count * item_bytes(spec.dtype); }

Arithmetic arithmetic_of(Kind kind) {
  if (kind == Kind::kMax) return Arithmetic::kMax;
  return kind == Kind::kMin ? Arithmetic::kMin : Arithmetic::kSum;
}

}  // namespace

ReducerStateMachine::ReducerStateMachine(Job job, std::shared_ptr<LentMemory> lent_memory,
                                         std::shared_ptr<KeptOptimizers> kept)
    : job_(std::move(job)),
      pool_(std::make_shared<ChunkPool>(std::move(lent_memory))),
      kept_(std::move(kept)),
      gone_(job_.worker_hosts.size(), false),
      waiting_(job_.worker_hosts.size()) {}

ReducerStateMachine::~ReducerStateMachine() = default;

std::string ReducerStateMachine::worker_name(uint32_t rank) const {
  const std::string host = rank < job_.worker_hosts.size() ? job_.worker_hosts[rank] : "?";
  return "rank " + std::to_string(rank) + " (host " + host + ")";
}

std::string ReducerStateMachine::op_name(uint64_t op_id, const OpState& op) const {
  const std::string& text = op.descriptions[op.first_rank]->text;
  return text.empty() ? "op " + std::to_string(op_id) : text;
}

Status ReducerStateMachine::describe_op(uint32_t rank, const FrameHeader& header, OpDescription description,
                                        std::vector<Outgoing>& outgoing) {
  if (!fault_.ok()) return fault_;
  if (const Status status = narrow(description.spec); !status.ok()) {
    fail({status.code(), status.message() + " in " + description.text}, outgoing);
    return fault_;
  }
  const OpSpec& spec = description.spec;
  if (const Status status = check(spec, worker_count()); !status.ok()) {
    return {Code::kProtocol, worker_name(rank) + " sent a " + status.message()};
  }
  if (ops_.size() >= kMaxOps && !ops_.contains(header.op)) {
    return {Code::kProtocol, worker_name(rank) + " uses more than " + std::to_string(kMaxOps) + " ops"};
  }
  const auto [found, is_new] = ops_.try_emplace(header.op);
  OpState& op = found->second;
  if (is_new) {
    op.spec = spec;
    op.first_rank = rank;
    op.descriptions.resize(worker_count());
  }
  std::optional<Description>& own = op.descriptions[rank];
  if (own.has_value() && header.round <= own->round) {
    return {Code::kProtocol, worker_name(rank) + " described " + op_name(header.op, op) + " twice"};
  }
  own = {std::move(description.text), header.round, op.change_count};
  if (!spec.has_member(rank)) {
    fail(disagreement(header, says(rank, spec, op) + ", and is none of these ranks itself"), outgoing);
    return fault_;
  }
  // No worker describes a later round before all have completed the running one.
  const bool is_later = !op.running && header.round > op.spec_round;
  const bool changes = spec != op.spec;
  if (changes && !is_later) {
    fail(other_spec(header, rank, spec, op), outgoing);
    return fault_;
  }
  if (changes) own->change = change_spec(op, spec);
  if (is_later) {
    op.spec_round = header.round;
    op.first_rank = rank;
  }
  if (uses_state(spec.kind)) {
    const Status status = use_state(header.op, op, description, is_new || changes);
    if (status.code() == Code::kProtocol) return {status.code(), worker_name(rank) + " sent a " + status.message()};
    if (!status.ok()) fail({status.code(), op_name(header.op, op) + ": " + status.message()}, outgoing);
  }
  return fault_;
}

// In an elastic job, the members of the view take part in an op of all workers, and those in a group in one of that.
Status ReducerStateMachine::narrow(OpSpec& spec) const {
  const std::vector<uint32_t>& members = job_.members;
  if (members.empty()) return {};
  if (spec.kind == Kind::kBroadcast && !std::ranges::binary_search(members, spec.root)) {
    return {Code::kWorkerLost, worker_name(spec.root) + " is no member of the job any more, and others wait for it"};
  }
  if (spec.group.empty()) {
    if (members.size() < worker_count()) spec.group = members;
  } else {
    std::erase_if(spec.group, [&](uint32_t rank) { return !std::ranges::binary_search(members, rank); });
  }
  return {};
}

Status ReducerStateMachine::note_held(uint32_t rank, const FrameHeader& header, std::vector<Outgoing>& outgoing) {
  const auto found = ops_.find(header.op);
  if (found == ops_.end() || !found->second.descriptions[rank].has_value()) {
    return {Code::kProtocol, worker_name(rank) + " holds the total of an op that it never described"};
  }
  OpState& op = found->second;
  if (op.running || header.round + 1 != op.round) {
    return {Code::kProtocol,
            worker_name(rank) + " holds the total of a round that has not just ended, of " + op_name(header.op, op)};
  }
  op.holders.resize(member_count(op));
  const uint32_t place = op.spec.place_of(rank);
  if (op.holders[place]) {
    return {Code::kProtocol, worker_name(rank) + " holds the total of " + op_name(header.op, op) + " twice"};
  }
  op.holders[place] = true;
  if (std::ranges::find(op.holders, false) != op.holders.end()) return {};
  op.holders.clear();
  FrameHeader safe;
  safe.type = FrameType::kSafe;
  safe.op = header.op;
  safe.round = header.round;
  for (uint32_t member = 0; member < member_count(op); ++member) {
    outgoing.push_back({op.spec.rank_at(member), safe, nullptr, {}});
  }
  return {};
}

// Of the rounds from now on. Returns its number.
uint64_t ReducerStateMachine::change_spec(OpState& op, const OpSpec& spec) {
  op.earlier_spec = std::exchange(op.spec, spec);
  op.state.reset();
  op.told.clear();
  return ++op.change_count;
}

Status ReducerStateMachine::use_state(uint64_t op_id, OpState& op, const OpDescription& description, bool is_new) {
  if (is_new) {
    Result<StateOp> made = StateOp::make(op_id, description, kept_->states);
    if (!made.ok()) return made.status();
    op.state = std::move(*made);
    op.steps.resize(worker_count());
    op.description = description;
    op.description.spec.group.clear();  // partners have nothing to do with the members
  }
  if (!op.state || op.description.shard != description.shard) {
    return malformed("op: another shard than the other workers'");
  }
  return {};
}

Status ReducerStateMachine::take_step(uint32_t rank, const FrameHeader& header, StepInputs inputs,
                                      std::vector<Outgoing>& outgoing) {
  if (!fault_.ok()) return fault_;
  const auto found = ops_.find(header.op);
  if (found == ops_.end() || !found->second.state || !found->second.descriptions[rank].has_value()) {
    return {Code::kProtocol, worker_name(rank) + " sent the inputs of a step of no update"};
  }
  OpState& op = found->second;
  std::optional<uint64_t>& sent = op.steps[op.spec.place_of(rank)];
  if (sent == header.round) {
    return {Code::kProtocol, worker_name(rank) + " sent the inputs of a step of " + op_name(header.op, op) + " twice"};
  }
  sent = header.round;
  if (!op.state->has_step(header.round)) {
    const Status status = op.state->start_step(rank, header.round, std::move(inputs));
    if (status.code() == Code::kProtocol) return {status.code(), worker_name(rank) + " sent a " + status.message()};
    if (!status.ok()) fail({status.code(), op_name(header.op, op) + ": " + status.message()}, outgoing);
  } else if (op.state->inputs() != inputs) {
    fail(disagreement(header, worker_name(rank) + " and " + worker_name(op.state->first_rank()) +
                                  " have other numbers for the step of " + op_name(header.op, op) +
                                  ", such as its learning rate or its count of steps"),
         outgoing);
  }
  return fault_;
}

Result<std::span<std::byte>> ReducerStateMachine::start_push(uint32_t rank, const FrameHeader& header, int64_t now_ms,
                                                             std::vector<Outgoing>& outgoing) {
  Result<Piece*> started = start_piece(rank, header, now_ms, outgoing);
  if (!started.ok()) return started.status();
  if (header.payload_bytes == 0) return std::span<std::byte>{};
  Piece& piece = **started;
  std::shared_ptr<std::byte>& memory = header.has_code() ? piece.coded : piece.memory;
  memory = pool_->take(header.payload_bytes);
  piece.data = piece.memory;
  return std::span(memory.get(), header.payload_bytes);
}

Result<bool> ReducerStateMachine::take_lent(uint32_t rank, const FrameHeader& header,
                                            std::shared_ptr<const std::byte> payload, int64_t now_ms,
                                            std::vector<Outgoing>& outgoing) {
  const auto found = ops_.find(header.op);
  if (found == ops_.end() || passes_on(found->second.spec.kind) || header.has_code()) return false;
  Result<Piece*> piece = start_piece(rank, header, now_ms, outgoing);
  if (!piece.ok()) return piece.status();
  (*piece)->data = std::move(payload);
  if (Status status = finish_push(rank, header, now_ms, outgoing); !status.ok()) return status;
  return true;
}

Result<ReducerStateMachine::Piece*> ReducerStateMachine::start_piece(uint32_t rank, const FrameHeader& header,
                                                                     int64_t now_ms, std::vector<Outgoing>& outgoing) {
  if (!fault_.ok()) return fault_;
  const auto found = ops_.find(header.op);
  if (found == ops_.end() || !found->second.descriptions[rank].has_value()) {
    return Status(Code::kProtocol, worker_name(rank) + " pushed a chunk of an op it never described");
  }
  OpState& op = found->second;
  if (op.descriptions[rank]->change != op.change_count) {
    fail(other_spec(header, rank, op.earlier_spec, op), outgoing);
    return fault_;
  }
  if (Status status = check_chunk(op, rank, header); !status.ok()) return status;
  if (!op.running) start_round(op, rank, header, now_ms);
  if (header.round != op.round) {
    return Status(Code::kProtocol, worker_name(rank) + " pushed round " + std::to_string(header.round) + " of " +
                                       op_name(header.op, op) + " while round " + std::to_string(op.round) + " runs");
  }
  if (op.state && op.steps[op.spec.place_of(rank)] != header.round) {
    return Status(Code::kProtocol,
                  worker_name(rank) + " pushed to " + op_name(header.op, op) + " before the inputs of the step");
  }
  Result<Chunk*> chunk = next_chunk(op, rank, header, outgoing);
  if (!chunk.ok()) return chunk.status();

  const uint32_t place = op.spec.place_of(rank);
  op.pushed[place] = {op.pushed[place].chunk_count + 1, header.offset + header.count, header.last};
  Piece& piece = chunk.value()->pieces[place];
  piece.is_coded = header.is_coded;
  return &piece;
}

// Ok if the chunk lies in its bucket and has the payload that the worker contributes.
Status ReducerStateMachine::check_chunk(const OpState& op, uint32_t rank, const FrameHeader& header) const {
  const OpSpec& spec = op.spec;
  if (header.offset > spec.total_count || header.count > spec.total_count - header.offset) {
    return {Code::kProtocol, worker_name(rank) + " pushed a chunk that lies outside of " + op_name(header.op, op)};
  }
  const Range part = stake_of(spec, worker_count(), rank).pushed({header.offset, header.count});
  if (header.has_numbers && spec.state.numbers == Numbers::kNone) {
    return {Code::kProtocol, worker_name(rank) + " pushed numbers of a scale to " + op_name(header.op, op)};
  }
  if (!may_carry(header, bytes_of(spec, part))) {
    return {Code::kProtocol, worker_name(rank) + " pushed " + std::to_string(header.payload_bytes) + " bytes for " +
                                 std::to_string(header.count) + " elements of " + op_name(header.op, op)};
  }
  return {};
}

void ReducerStateMachine::start_round(OpState& op, uint32_t rank, const FrameHeader& header, int64_t now_ms) {
  // Earlier rounds ran in an earlier view, or were smaller and went through other reducers. Then it is described anew.
  if (op.descriptions[rank]->round == header.round) op.round = std::max(op.round, header.round);
  op.running = true;
  op.progress_ms = now_ms;
  op.completed_chunk_count = 0;
  op.items_per_chunk = header.count;
  op.pushed.assign(member_count(op), {});
}

Result<ReducerStateMachine::Chunk*> ReducerStateMachine::next_chunk(OpState& op, uint32_t rank,
                                                                    const FrameHeader& header,
                                                                    std::vector<Outgoing>& outgoing) {
  const PushPosition& pushed = op.pushed[op.spec.place_of(rank)];
  const uint64_t position = pushed.chunk_count - op.completed_chunk_count;
  const size_t item = item_bytes(op.spec.dtype);
  const size_t chunk_bytes = std::max(op.items_per_chunk * item, least_chunk_bytes(job_.shape));
  if (position >= most_chunks_under_way(job_.shape, chunk_bytes) ||
      header.count * item > most_chunk_bytes(job_.shape)) {
    return Status(Code::kProtocol, worker_name(rank) + " pushed more than its window in " + op_name(header.op, op));
  }
  // The chunk at the bucket's end may be short, and the first one.
  const bool wraps = pushed.chunk_count > 0 && op.goes_on_at_the_beginning(pushed.end) && header.offset == 0;
  if (wraps) op.items_per_chunk = std::max(op.items_per_chunk, header.count);
  const bool follows = (wraps || header.offset == pushed.end) && header.count <= op.items_per_chunk;
  if (pushed.last || (pushed.chunk_count > 0 && !follows)) {
    return Status(Code::kProtocol, worker_name(rank) + " pushed a chunk out of order in " + op_name(header.op, op));
  }
  if (position == op.open.size()) {
    op.open.push_back({header.offset, header.count, header.last, rank, 0, std::vector<Piece>(member_count(op))});
  }
  Chunk& chunk = op.open[position];
  if (chunk.offset != header.offset || chunk.count != header.count || chunk.last != header.last) {
    fail(disagreement(header, worker_name(rank) + " and " + worker_name(chunk.first_rank) +
                                  " cut the bucket differently; start every worker with the same settings"),
         outgoing);
    return fault_;
  }
  for (uint32_t place = 0; place < chunk.pieces.size(); ++place) {
    const uint32_t other = op.spec.rank_at(place);
    if (!gone_[other] || chunk.pieces[place].arrived) continue;
    fail({Code::kWorkerLost, worker_name(other) + " shut down, but " + worker_name(rank) + " waits for it in " +
                                 op_name(header.op, op) + " round " + std::to_string(header.round)},
         outgoing);
    return fault_;
  }
  return &chunk;
}

Status ReducerStateMachine::finish_push(uint32_t rank, const FrameHeader& header, int64_t now_ms,
                                        std::vector<Outgoing>& outgoing) {
  if (!fault_.ok()) return fault_;
  OpState& op = ops_[header.op];
  const uint32_t place = op.spec.place_of(rank);
  const uint64_t position = op.pushed[place].chunk_count - 1 - op.completed_chunk_count;
  Chunk& chunk = op.open[position];
  if (Status status = decode_piece(op, rank, header, chunk.pieces[place]); !status.ok()) return status;
  chunk.pieces[place].arrived = true;
  // Every worker pushes the chunks of a shard in order, so the first chunk is always the first to be complete.
  if (++chunk.arrived_count == chunk.pieces.size()) {
    complete_front(header.op, op, outgoing);
    op.progress_ms = now_ms;
  }
  return {};
}

Status ReducerStateMachine::decode_piece(const OpState& op, uint32_t rank, const FrameHeader& header, Piece& piece) {
  const std::shared_ptr<std::byte> coded = std::move(piece.coded);
  if (coded == nullptr) return {};
  const Range part = stake_of(op.spec, worker_count(), rank).pushed({header.offset, header.count});
  const size_t bytes = bytes_of(op.spec, part);
  piece.memory = pool_->take(bytes);
  piece.data = piece.memory;
  const std::span<const std::byte> code(coded.get(), header.payload_bytes);
  auto* const floats = reinterpret_cast<float*>(piece.memory.get());
  const bool is_code = header.has_numbers ? decode_numbers(op.spec.state.numbers, code, {floats, bytes / sizeof(float)})
                                          : decode(op.spec.dtype, code, {piece.memory.get(), bytes});
  if (is_code) return {};
  return {Code::kProtocol, worker_name(rank) + " pushed a chunk of " + op_name(header.op, op) + " in a malformed code"};
}

void ReducerStateMachine::complete_front(uint64_t op_id, OpState& op, std::vector<Outgoing>& outgoing) {
  Chunk chunk = std::move(op.open.front());
  op.open.pop_front();
  ++op.completed_chunk_count;

  if (op.state) {
    answer_state(op_id, op, chunk, outgoing);
    if (!fault_.ok()) return;
  } else {
    send_answers(op_id, op, chunk, passes_on(op.spec.kind) ? join(op.spec, chunk) : reduce(op.spec, chunk), outgoing);
  }
  if (chunk.last) {
    if (op.state) op.state->finish_step();
    if (op.spec.part == 0) ++completed_round_count_;
    ++op.round;
    op.running = false;
  }
}

// Each worker's part of the result of a chunk: coded for those that have pushed it so, once for all that get the same.
void ReducerStateMachine::send_answers(uint64_t op_id, const OpState& op, const Chunk& chunk,
                                       const std::shared_ptr<std::byte>& total, std::vector<Outgoing>& outgoing) const {
  const size_t item = op.spec.result_item_bytes();
  FrameHeader header;
  header.type = FrameType::kResult;
  header.last = chunk.last;
  header.count = chunk.count;
  header.op = op_id;
  header.round = op.round;
  header.offset = chunk.offset;
  std::optional<Range> coded_part;
  Outgoing code;
  const auto count = static_cast<uint32_t>(chunk.pieces.size());
  const size_t first = first_peer(count, job_.own_number, total_reducer_count(job_.shape));
  for (size_t i = 0; i < count; ++i) {
    const auto place = static_cast<uint32_t>((first + i) % count);
    const uint32_t rank = op.spec.rank_at(place);
    const Range part = stake_of(op.spec, worker_count(), rank).answered(chunk.range());
    const std::byte* const from = total == nullptr ? nullptr : total.get() + (part.offset - chunk.offset) * item;
    header.payload_bytes = static_cast<uint32_t>(part.count * item);
    Outgoing answer{rank, header, total, {from, header.payload_bytes}};
    if (chunk.pieces[place].is_coded) {
      if (part != coded_part) code = coded(answer, op.spec.result_dtype());
      coded_part = part;
      answer = code;
      answer.rank = rank;
    }
    outgoing.push_back(std::move(answer));
  }
}

// The frame with the code of its elements; as it is, where that is not shorter.
Outgoing ReducerStateMachine::coded(const Outgoing& plain, DType dtype) const {
  if (!has_code(dtype)) return plain;
  const std::shared_ptr<std::byte> memory = pool_->take(most_coded_bytes(dtype, plain.payload.size()));
  const std::span<std::byte> out(memory.get(), most_coded_bytes(dtype, plain.payload.size()));
  const size_t bytes = encode(dtype, plain.payload, out);
  if (bytes == 0) return plain;
  Outgoing frame = plain;
  frame.header.is_coded = true;
  frame.header.payload_bytes = static_cast<uint32_t>(bytes);
  frame.owner = memory;
  frame.payload = out.first(bytes);
  frame.saved_bytes = plain.payload.size() - bytes;
  return frame;
}

// The sum of 16-bit floats as float32, without rounding it.
std::shared_ptr<std::byte> ReducerStateMachine::reduce_widened(const OpSpec& spec, const Chunk& chunk) {
  std::shared_ptr<std::byte> total = pool_->take(chunk.count * sizeof(float));
  std::vector<const std::byte*> pieces;
  for (const Piece& piece : chunk.pieces) pieces.push_back(piece.data.get());
  sum_widened(spec.dtype, pieces, {reinterpret_cast<float*>(total.get()), chunk.count});
  return total;
}

// In the memory of the first piece, unless that is lent.
std::shared_ptr<std::byte> ReducerStateMachine::reduce(const OpSpec& spec, const Chunk& chunk) {
  std::shared_ptr<std::byte> total = chunk.pieces[0].memory;
  if (chunk.count == 0) return total;
  if (!total) total = pool_->take(bytes_of(spec, chunk.range()));
  std::vector<const std::byte*> pieces;
  for (const Piece& piece : chunk.pieces) pieces.push_back(piece.data.get());
  if (is_mean(spec.kind)) {
    const auto mean = spec.kind == Kind::kMean8   ? mean_of_8_bits
                      : spec.kind == Kind::kMean4 ? mean_of_4_bits
                                                  : mean_of_8_bit_floats;
    mean(pieces, total.get(), chunk.count);
  } else {
    reduce_in_order(arithmetic_of(spec.kind), spec.dtype, pieces, total.get(), chunk.count);
  }
  return total;
}

// Each worker's elements in their place; those of one worker alone stay where they are.
std::shared_ptr<std::byte> ReducerStateMachine::join(const OpSpec& spec, const Chunk& chunk) {
  std::shared_ptr<std::byte> total;
  for (uint32_t place = 0; place < chunk.pieces.size(); ++place) {
    const Piece& piece = chunk.pieces[place];
    const Range part = stake_of(spec, worker_count(), spec.rank_at(place)).pushed(chunk.range());
    if (part == chunk.range()) return piece.memory;
    if (part.count == 0) continue;
    if (!total) total = pool_->take(bytes_of(spec, chunk.range()));
    std::memcpy(total.get() + chunk.place_of(part, spec), piece.data.get(), bytes_of(spec, part));
  }
  return total;
}

Status ReducerStateMachine::disagreement(const FrameHeader& header, const std::string& how) const {
  return {Code::kMismatch, "the workers disagree in op " + std::to_string(header.op) + " round " +
                               std::to_string(header.round) + ": " + how};
}

// The rank's spec is not that of the worker that came to the round first.
Status ReducerStateMachine::other_spec(const FrameHeader& header, uint32_t rank, const OpSpec& spec,
                                       const OpState& op) const {
  const uint32_t other = op.open.empty() ? op.first_rank : op.open.front().first_rank;
  return disagreement(header, says(rank, spec, op) + "; " + says(other, op.spec, op) +
                                  ". Every worker must call the collective with the same tree, shapes and dtypes" +
                                  (spec.group == op.spec.group ? "" : ", for the same workers"));
}

std::string ReducerStateMachine::says(uint32_t rank, const OpSpec& spec, const OpState& op) const {
  return worker_name(rank) + " sent " + jaxhetero::describe(spec) + " (" + op.descriptions[rank]->text + ")";
}

void ReducerStateMachine::leave(uint32_t rank, const Status& why, std::vector<Outgoing>& outgoing) {
  if (gone_[rank]) return;
  gone_[rank] = true;
  if (!why.ok()) {
    return fail({Code::kWorkerLost, worker_name(rank) + " was lost: " + why.message()}, outgoing);
  }
  for (const auto& [op_id, op] : ops_) {
    if (!op.running || op.open.empty() || !op.spec.has_member(rank)) continue;
    if (op.open.front().pieces[op.spec.place_of(rank)].arrived) continue;
    fail({Code::kWorkerLost, worker_name(rank) + " shut down, but others wait for it in " + op_name(op_id, op) +
                                 " round " + std::to_string(op.round)},
         outgoing);
    return;
  }
}

void ReducerStateMachine::fail(const Status& why, std::vector<Outgoing>& outgoing) {
  if (!fault_.ok()) return;
  fault_ = why;
  const auto text = std::make_shared<const Bytes>(encode(why));
  FrameHeader header;
  header.type = FrameType::kFault;
  header.payload_bytes = static_cast<uint32_t>(text->size());
  for (uint32_t rank = 0; rank < worker_count(); ++rank) {
    if (!gone_[rank]) outgoing.push_back({rank, header, text, *text});
  }
}

}  // namespace jaxhetero
