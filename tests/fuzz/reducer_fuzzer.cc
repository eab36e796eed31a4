// The reducer's state machine, driven as its server drives it: whatever workers push, describe and leave, in any order.
// A partner backs up what it keeps of an optimizer. In an elastic job, which an input of odd length is about, a worker
// that is lost makes another view, in which the others begin anew what has not ended.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/reducer/backup_keeper.h"
#include "xla_ffi/reducer/backups.h"
#include "xla_ffi/reducer/state_machine.h"
#include "xla_ffi/update/bucket_update.h"
#include "xla_ffi/wire/state_plan.h"

namespace {

using namespace jaxhetero;

constexpr uint32_t kWorkers = 3;
constexpr uint32_t kChunkBytes = 64;
constexpr uint32_t kWindow = 2;
constexpr uint64_t kTotalCount = 24;
constexpr uint64_t kOps = 9;

// w -= rate * g, and the same with a sum of g * g and no outputs.
Bytes an_update(bool has_outputs) {
  Program program{2, 1, 2, {{Opcode::kMul, 3, 0, 2, 0}, {Opcode::kSub, 3, 1, 3, 0}}, {}, {{3, OutputType::kF32}}};
  UpdateDescription update;
  update.sent_count = 1;
  if (!has_outputs) {
    program.outputs.clear();
    program.summands = {{3}};
    update.has_outputs = false;
    update.total_count = 1;
  }
  update.programs = {encode(program)};
  update.leaves = {{kTotalCount, {0, {{Origin::kSent, 0}}}, {}}};
  if (!has_outputs) update.leaves[0].totals = {0};
  return encode(update);
}

OpSpec spec_with_state(Kind kind, bool is_elastic) {
  OpSpec spec{kind, DType::kF32, 0, 1, kTotalCount, 0};
  spec.state = {.number = 9, .slot_count = 2};
  spec.state.averages = is_elastic && kind >= Kind::kMeasure;
  spec.state.is_of_all = is_elastic && kind == Kind::kStore;
  return spec;
}

// Of two reducers, of which this is the first.
StatePlan a_plan() {
  const std::vector<StatePlan::Member> members = {{0, 0, "a", 1, 1}, {1, 0, "b", 1, 1}};
  return StatePlan(members);
}

class Server {
 public:
  Server(FuzzedDataProvider& input, bool is_elastic)
      : input_(input),
        is_elastic_(is_elastic),
        kept_(std::make_shared<KeptOptimizers>(0, is_elastic)),
        partners_(is_elastic) {
    kept_->backups.enter(a_plan(), kept_->states);
    begin_view();
  }

  void act() {
    const auto rank = input_.ConsumeIntegralInRange<uint32_t>(0, kWorkers - 1);
    if (gone_[rank]) return;
    now_ms_ += 10;
    switch (input_.ConsumeIntegralInRange(0, 10)) {
      case 0:
        describe(rank);
        break;
      case 1:
        leave(rank, {});
        break;
      case 2:
        if (is_elastic_) return lose(rank);
        leave(rank, {Code::kInternal, "it closed the connection"});
        break;
      case 3:
        reducer_->report_late(now_ms_, 20, outgoing_);
        break;
      case 4:
        finish(rank);
        break;
      case 5:
        step(rank, op());
        break;
      default:
        // The next frame's header comes behind the payload before it.
        finish(rank);
        if (!gone_[rank]) begin(rank);
    }
    take_outgoing();
  }

 private:
  struct Push {
    FrameHeader header;
    std::span<std::byte> memory;
  };

  uint64_t op() { return input_.ConsumeIntegralInRange<uint64_t>(0, kOps - 1); }

  // Mostly what the others say as well.
  void describe(uint32_t rank) {
    FrameHeader header;
    header.op = op();
    if (is_elastic_) header.round = next_[rank][header.op].round;
    OpDescription description{specs_[header.op], input_.ConsumeRandomLengthString(20), {}, {}};
    if (uses_state(description.spec.kind)) description.shard = {0, kTotalCount};
    if (description.spec.kind >= Kind::kMeasure) description.update = an_update(description.spec.kind == Kind::kUpdate);
    const bool errs = input_.ConsumeIntegralInRange(0, 7) == 0;
    if (!errs && !description.spec.has_member(rank)) return;
    if (errs) {
      OpSpec& spec = description.spec;
      spec.kind = static_cast<Kind>(input_.ConsumeIntegralInRange(0, 11));
      spec.state.slot = input_.ConsumeIntegralInRange<uint32_t>(0, 3);
      spec.state.resumes = input_.ConsumeBool();
      spec.state.weights = input_.ConsumeBool() ? DType::kF32 : DType::kBF16;
      spec.state.first = input_.ConsumeIntegral<uint64_t>() >> input_.ConsumeIntegralInRange(0, 63);
      description.shard.offset = input_.ConsumeIntegral<uint64_t>() >> input_.ConsumeIntegralInRange(0, 63);
      if (!description.update.empty()) {
        const size_t at = input_.ConsumeIntegralInRange<size_t>(0, description.update.size() - 1);
        description.update[at] = static_cast<std::byte>(input_.ConsumeIntegral<uint8_t>());
      }
      spec.dtype = static_cast<DType>(input_.ConsumeIntegralInRange(0, 14));
      spec.root = input_.ConsumeIntegralInRange<uint32_t>(0, 4);
      spec.total_count = input_.ConsumeIntegral<uint64_t>() >> input_.ConsumeIntegralInRange(0, 63);
      spec.signature = input_.ConsumeIntegralInRange<uint32_t>(0, 1);
      for (uint32_t rank = 0; rank <= kWorkers; ++rank) {
        if (input_.ConsumeIntegralInRange(0, 3) == 0) spec.group.push_back(rank);
      }
    }
    Result<OpDescription> received = decode_op_description(encode(description));
    if (!received.ok()) return leave(rank, received.status());
    check(rank, reducer_->describe_op(rank, header, std::move(*received), outgoing_));
  }

  // Mostly the inputs of the step that comes next.
  void step(uint32_t rank, uint64_t op) {
    FrameHeader header;
    header.op = op;
    header.round = next_[rank][op].round;
    StepInputs inputs{.version = specs_[op].kind == Kind::kUpdate ? header.round : 0, .scalars = {}};
    if (specs_[op].kind >= Kind::kMeasure) inputs.scalars = {0x3f000000};
    if (input_.ConsumeIntegralInRange(0, 15) == 0) inputs.version = input_.ConsumeIntegralInRange<uint64_t>(0, 3);
    if (input_.ConsumeIntegralInRange(0, 15) == 0) inputs.scalars.push_back(input_.ConsumeIntegral<uint32_t>());
    Result<StepInputs> received = decode_step_inputs(encode(inputs));
    if (!received.ok()) std::abort();
    check(rank, reducer_->take_step(rank, header, std::move(*received), outgoing_));
  }

  // Mostly what a worker would push next, so that rounds do end.
  FrameHeader make_push(uint32_t rank) {
    const bool honest = input_.ConsumeIntegralInRange(0, 7) > 0;
    FrameHeader header = next_[rank][op()];
    header.op = honest ? header.op : op();
    if (!honest) {
      header.round += input_.ConsumeIntegralInRange<uint64_t>(0, 2);
      header.offset = input_.ConsumeIntegral<uint64_t>() >> input_.ConsumeIntegralInRange(0, 63);
      header.count = input_.ConsumeIntegralInRange<uint32_t>(0, 40);
      header.last = input_.ConsumeBool();
    }
    const OpSpec& spec = specs_[header.op];
    const bool says_so = honest || input_.ConsumeBool();
    const Range chunk{header.offset, header.count};
    const Range part = says_so ? stake_of(spec, kWorkers, rank).pushed(chunk) : chunk;
    header.payload_bytes = static_cast<uint32_t>(part.count * item_bytes(spec.dtype));
    return header;
  }

  void begin(uint32_t rank) {
    const FrameHeader sent = make_push(rank);
    const bool begins = sent.offset == 0 && uses_state(specs_[sent.op].kind);
    if (begins && input_.ConsumeIntegralInRange(0, 7) > 0) step(rank, sent.op);
    if (gone_[rank]) return;
    Result<FrameHeader> header = decode(encode(sent));
    if (!header.ok()) return leave(rank, header.status());
    if (header->payload_bytes > 0 && input_.ConsumeBool() && lend(rank, *header)) return;
    Result<std::span<std::byte>> memory = reducer_->start_push(rank, *header, now_ms_, outgoing_);
    if (!memory.ok()) return leave(rank, memory.status());
    if (!memory->empty() && memory->size() != header->payload_bytes) std::abort();
    std::ranges::fill(*memory, std::byte{1});
    pushing_[rank] = Push{*header, *memory};
    if (memory->empty()) finish(rank);
  }

  // Whether that settles it.
  bool lend(uint32_t rank, const FrameHeader& header) {
    const auto payload = std::make_shared<std::vector<std::byte>>(header.payload_bytes, std::byte{2});
    Result<bool> is_read = reducer_->take_lent(rank, header, {payload, payload->data()}, now_ms_, outgoing_);
    if (!is_read.ok()) {
      leave(rank, is_read.status());
    } else if (*is_read) {
      advance(rank, header);
    }
    return !is_read.ok() || *is_read;
  }

  void finish(uint32_t rank) {
    if (!pushing_[rank].has_value()) return;
    const Push push = *pushing_[rank];
    pushing_[rank].reset();
    if (reducer_->fault().ok()) std::ranges::fill(push.memory, std::byte{2});
    const Status status = reducer_->finish_push(rank, push.header, now_ms_, outgoing_);
    if (!status.ok()) return leave(rank, status);
    advance(rank, push.header);
  }

  void advance(uint32_t rank, const FrameHeader& pushed) {
    FrameHeader& next = next_[rank][pushed.op];
    next = pushed;
    next.offset += next.count;
    if (pushed.last) {
      next.offset = 0;
      ++next.round;
    }
    next.last = next.offset + next.count >= kTotalCount;
  }

  void check(uint32_t rank, const Status& status) {
    if (!status.ok()) leave(rank, status);
  }

  void leave(uint32_t rank, const Status& why) {
    gone_[rank] = true;
    pushing_[rank].reset();
    reducer_->leave(rank, why, outgoing_);
  }

  // With those who are there.
  void begin_view() {
    std::vector<uint32_t> members;
    for (uint32_t rank = 0; rank < kWorkers; ++rank) {
      if (is_elastic_ && !gone_[rank]) members.push_back(rank);
    }
    outgoing_.clear();
    reducer_ = std::make_unique<ReducerStateMachine>(
        ReducerStateMachine::Job{{"a", "b", "c"}, {kWorkers, 1, 0, kChunkBytes, kWindow}, members},
        std::make_shared<LentMemory>(), kept_);
  }

  // The partner takes nothing of the view that ends, and others push what not all of them have completed.
  void lose(uint32_t lost) {
    if (gone_[lost] || std::ranges::count(gone_, false) == 1) return;
    gone_[lost] = true;
    for (uint64_t op = 0; op < kOps; ++op) {
      uint64_t least = std::numeric_limits<uint64_t>::max();
      for (uint32_t rank = 0; rank < kWorkers; ++rank) {
        if (!gone_[rank]) least = std::min(least, next_[rank][op].round);
      }
      for (uint32_t rank = 0; rank < kWorkers; ++rank) {
        next_[rank][op] = first_pushes()[op];
        next_[rank][op].round = least;
      }
    }
    for (std::optional<Push>& push : pushing_) push.reset();
    begin_view();
  }

  // What a server would send: headers that a worker can decode, and payloads that are there.
  void take_outgoing() {
    for (const Outgoing& frame : std::exchange(outgoing_, {})) {
      if (frame.is_for_partner) {
        back_up(frame);
        continue;
      }
      if (frame.rank >= kWorkers || frame.payload.size() != frame.header.payload_bytes) std::abort();
      if (!decode(encode(frame.header)).ok()) std::abort();
      uint32_t sum = 0;
      for (std::byte byte : frame.payload) sum += std::to_integer<uint32_t>(byte);
      sink_ = sum;
    }
    if (!outgoing_.empty()) take_outgoing();
  }

  // As the partner does it.
  void back_up(const Outgoing& frame) {
    const Bytes payload(frame.payload.begin(), frame.payload.end());
    if (frame.header.type == FrameType::kDescribe) {
      Result<OpDescription> description = decode_op_description(payload);
      if (!description.ok() || !keeper_.describe_op(frame.header.op, *description).ok()) std::abort();
    } else if (frame.header.type == FrameType::kStep) {
      Result<StepInputs> inputs = decode_step_inputs(payload);
      if (!inputs.ok() || !keeper_.take_step(frame.header, *inputs).ok()) std::abort();
    } else if (keeper_.back_up(frame.header, payload).ok()) {
      reducer_->note_backed_up(frame.header, outgoing_);
    }
  }

  static std::array<FrameHeader, kOps> first_pushes() {
    std::array<FrameHeader, kOps> pushes;
    for (uint64_t op = 0; op < pushes.size(); ++op) {
      FrameHeader& push = pushes[op];
      push.type = FrameType::kPush;
      push.op = op;
      push.count = 8;
    }
    return pushes;
  }

  FuzzedDataProvider& input_;
  const bool is_elastic_;
  const std::array<OpSpec, kOps> specs_{OpSpec{Kind::kSum, DType::kF32, 0, 1, kTotalCount, 0},
                                        OpSpec{Kind::kBroadcast, DType::kF32, 0, 1, kTotalCount, 0},
                                        OpSpec{Kind::kSum, DType::kBF16, 0, 1, kTotalCount, 0, 0, 0, 0, {0, 2}},
                                        OpSpec{Kind::kScatter, DType::kF32, 0, 1, kTotalCount, 0},
                                        OpSpec{Kind::kGather, DType::kF32, 0, 1, kTotalCount, 0},
                                        spec_with_state(Kind::kStore, is_elastic_),
                                        spec_with_state(Kind::kLoad, is_elastic_),
                                        spec_with_state(Kind::kMeasure, is_elastic_),
                                        spec_with_state(Kind::kUpdate, is_elastic_)};
  const std::shared_ptr<KeptOptimizers> kept_;
  std::unique_ptr<ReducerStateMachine> reducer_;
  KeptStates partners_;
  BackupKeeper keeper_{partners_};
  std::array<std::array<FrameHeader, kOps>, kWorkers> next_{first_pushes(), first_pushes(), first_pushes()};
  std::array<std::optional<Push>, kWorkers> pushing_;
  std::array<bool, kWorkers> gone_{};
  std::vector<Outgoing> outgoing_;
  int64_t now_ms_ = 0;
  volatile uint32_t sink_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  Server server(input, size % 2 == 1);
  while (input.remaining_bytes() > 0) server.act();
  return 0;
}
