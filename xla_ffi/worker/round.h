// A round on the worker: what the program asked for, and how far each part of it has come.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/convert.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/kept_contribution.h"
#include "xla_ffi/worker/shard_plan.h"

namespace jaxhetero {

// One all-reduce, as the FFI handler asks for it. The memory of both buckets stays valid until `done` has been called.
//
// Where another device has the operands and takes the results, they come and go piece by piece: `ready_bytes` and
// `received`, which are null for memory that the program itself reads and writes.
struct RoundRequest {
  uint64_t op = 0;
  uint64_t sequence = 0;  // where workers should prefer the same of several rounds: the lower one first
  std::string description;
  OpSpec spec;
  Leaves inputs;
  Leaves outputs;
  bool narrows = false;  // the inputs are float32, which goes to the wire as the 16-bit floats of `spec`
  bool widens = false;   // and so are the outputs
  std::function<void(const Status&)> done;                   // called once, on a thread of its own
  std::shared_ptr<const std::atomic<size_t>> ready_bytes;    // of the inputs, from the front; feed() says that it grew
  std::function<void(size_t begin, size_t bytes)> received;  // of the outputs; called on the communicator's own thread
  std::shared_ptr<const void> inputs_owner;                  // who holds it may read the inputs after `done` as well
  Ranges reported;                                           // what `received` was called for, also before a halt
  std::shared_ptr<const ShardPlan> plan;                     // if not the job's: then its shards need not go in step
  bool is_internal = false;                                  // nothing that the program asked for
  EventLoop::Clock::time_point requested{};
};

// A chunk whose total is not back.
struct InFlightChunk {
  uint64_t frame = 0;  // its number on the connection
  uint32_t bytes = 0;  // header included
  EventLoop::Clock::time_point at;
};

// The part of a round that goes through one reducer.
struct Segment {
  Shard shard;
  uint64_t chunk_count = 0;  // elements of every chunk but perhaps the last one
  uint64_t next_push = 0;    // elements, counted in the bucket
  uint64_t next_result = 0;
  std::deque<InFlightChunk> in_flight;
  size_t in_flight_bytes = 0;
  bool was_starved = false;
  bool all_pushed = false;
  bool done = false;

  Segment(const Shard& from, uint64_t count_of_chunks)
      : shard(from), chunk_count(count_of_chunks), next_push(from.begin), next_result(from.begin) {}
  [[nodiscard]] uint64_t end() const { return shard.begin + shard.count; }
  // How much of its total is here, from 0 to 1.
  [[nodiscard]] double done_part() const {
    return done ? 1
                : static_cast<double>(next_result - shard.begin) /
                      static_cast<double>(std::max<uint64_t>(shard.count, 1));
  }
};

struct Round {
  RoundRequest request;
  uint64_t number = 0;
  std::vector<Segment> segments;
  size_t least_window_bytes = 0;  // of every link
  size_t open_segment_count = 0;
  EventLoop::Clock::time_point begin;
  EventLoop::Clock::time_point first_result;
  EventLoop::Clock::time_point progress;
  EventLoop::Clock::time_point others_moved;  // by the reducers' word: whom it waits for is slow, not stuck
  std::string late;                           // whom the reducers wait for, by their last word
  EventLoop::Clock::time_point next_late_report;
  bool is_replay = false;                // it is over here, but not for others
  bool is_answered = false;              // a total has begun to come
  KeptContribution* keeps_in = nullptr;  // takes a copy of every chunk that is pushed, and that is what is sent
  bool has_accused = false;
  double slowest_part = 0;  // of the segments' done_part()

  // Of several rounds that run, all workers push the chunks of the same one first: the order they got them in may
  // differ, and chunks wait at a reducer until everybody's are there.
  using Turn = std::tuple<uint64_t, uint64_t, uint64_t>;  // round, sequence, op
  [[nodiscard]] Turn turn() const { return {number, request.sequence, request.op}; }

  [[nodiscard]] std::string name() const { return request.description + " round " + std::to_string(number); }

  // What the chunks are sent from.
  [[nodiscard]] const Leaves& wire_inputs() const { return keeps_in != nullptr ? keeps_in->leaves() : request.inputs; }

  // Copies this much of the inputs, as it is on the wire, to where it is kept.
  void keep(size_t offset, size_t bytes) const {
    if (keeps_in == nullptr) return;
    if (request.narrows) {
      keeps_in->copy_narrowed(request.spec.dtype, request.inputs, offset, bytes);
    } else {
      keeps_in->copy(request.inputs, offset, bytes);
    }
  }

  // Where this much of the totals is received. What is to be widened, in the last half of the place that it then fills.
  void place(size_t offset, size_t bytes, std::vector<iovec>& into) const {
    if (!request.widens) return request.outputs.slice(offset, bytes, into);
    const size_t first = into.size();
    request.outputs.slice(2 * offset, 2 * bytes, into);
    for (iovec& piece : std::span(into).subspan(first)) {
      piece.iov_len /= 2;
      piece.iov_base = static_cast<std::byte*>(piece.iov_base) + piece.iov_len;
    }
  }

  // Such totals are received: spreads them over their place, which is found by way of `pieces`.
  void widen(size_t offset, size_t bytes, std::vector<iovec>& pieces) const {
    pieces.clear();
    request.outputs.slice(2 * offset, 2 * bytes, pieces);
    for (const iovec& piece : pieces) {
      widen_in_place(request.spec.dtype, {static_cast<std::byte*>(piece.iov_base), piece.iov_len});
    }
  }

  // A total has come. Whether the slowest segment is further now.
  bool note_slowest() {
    double part = 1;
    for (const Segment& segment : segments) part = std::min(part, segment.done_part());
    return part > std::exchange(slowest_part, part);
  }

  // The segment that goes through this reducer, by its place in the view; null if none does.
  [[nodiscard]] Segment* segment_at(uint32_t reducer) {
    const auto found = std::ranges::find_if(segments, [&](const Segment& s) { return s.shard.reducer == reducer; });
    return found == segments.end() ? nullptr : &*found;
  }
};

}  // namespace jaxhetero
