// The reducer's state machine, driven as its server drives it: whatever workers push, describe and leave, in any order.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/reducer/state_machine.h"

namespace {

using namespace jaxhetero;

constexpr uint32_t kWorkers = 3;
constexpr uint32_t kChunkBytes = 64;
constexpr uint32_t kWindow = 2;
constexpr uint64_t kTotalCount = 24;
constexpr uint64_t kOps = 5;

class Server {
 public:
  explicit Server(FuzzedDataProvider& input) : input_(input) {}

  void act() {
    const auto rank = input_.ConsumeIntegralInRange<uint32_t>(0, kWorkers - 1);
    if (gone_[rank]) return;
    now_ms_ += 10;
    switch (input_.ConsumeIntegralInRange(0, 9)) {
      case 0:
        describe(rank);
        break;
      case 1:
        leave(rank, {});
        break;
      case 2:
        leave(rank, {Code::kInternal, "it closed the connection"});
        break;
      case 3:
        reducer_.report_late(now_ms_, 20, outgoing_);
        break;
      case 4:
        finish(rank);
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
    OpDescription description{specs_[header.op], input_.ConsumeRandomLengthString(20)};
    const bool errs = input_.ConsumeIntegralInRange(0, 7) == 0;
    if (!errs && !description.spec.has_member(rank)) return;
    if (errs) {
      OpSpec& spec = description.spec;
      spec.kind = static_cast<Kind>(input_.ConsumeIntegralInRange(0, 7));
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
    check(rank, reducer_.describe_op(rank, header, std::move(*received), outgoing_));
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
    Result<FrameHeader> header = decode(encode(sent));
    if (!header.ok()) return leave(rank, header.status());
    if (header->payload_bytes > 0 && input_.ConsumeBool() && lend(rank, *header)) return;
    Result<std::span<std::byte>> memory = reducer_.start_push(rank, *header, now_ms_, outgoing_);
    if (!memory.ok()) return leave(rank, memory.status());
    if (!memory->empty() && memory->size() != header->payload_bytes) std::abort();
    std::ranges::fill(*memory, std::byte{1});
    pushing_[rank] = Push{*header, *memory};
    if (memory->empty()) finish(rank);
  }

  // Whether that settles it.
  bool lend(uint32_t rank, const FrameHeader& header) {
    const auto payload = std::make_shared<std::vector<std::byte>>(header.payload_bytes, std::byte{2});
    Result<bool> is_read = reducer_.take_lent(rank, header, {payload, payload->data()}, now_ms_, outgoing_);
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
    if (reducer_.fault().ok()) std::ranges::fill(push.memory, std::byte{2});
    const Status status = reducer_.finish_push(rank, push.header, now_ms_, outgoing_);
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
    reducer_.leave(rank, why, outgoing_);
  }

  // What a server would send: headers that a worker can decode, and payloads that are there.
  void take_outgoing() {
    for (const Outgoing& frame : outgoing_) {
      if (frame.rank >= kWorkers || frame.payload.size() != frame.header.payload_bytes) std::abort();
      if (!decode(encode(frame.header)).ok()) std::abort();
      uint32_t sum = 0;
      for (std::byte byte : frame.payload) sum += std::to_integer<uint32_t>(byte);
      sink_ = sum;
    }
    outgoing_.clear();
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
  const std::array<OpSpec, kOps> specs_{OpSpec{Kind::kSum, DType::kF32, 0, 1, kTotalCount, 0},
                                        OpSpec{Kind::kBroadcast, DType::kF32, 0, 1, kTotalCount, 0},
                                        OpSpec{Kind::kSum, DType::kBF16, 0, 1, kTotalCount, 0, 0, 0, 0, {0, 2}},
                                        OpSpec{Kind::kScatter, DType::kF32, 0, 1, kTotalCount, 0},
                                        OpSpec{Kind::kGather, DType::kF32, 0, 1, kTotalCount, 0}};
  ReducerStateMachine reducer_{{{"a", "b", "c"}, {kWorkers, 1, 0, kChunkBytes, kWindow}}};
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
  Server server(input);
  while (input.remaining_bytes() > 0) server.act();
  return 0;
}
