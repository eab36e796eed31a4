// A round on the worker: what the program asked for, and how far each segment of it has got.
//
// Plain data, changed on the strand's thread by Op, ReducerLink, StallWatch and the strand.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/convert.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/kept_contribution.h"
#include "xla_ffi/worker/shard_plan.h"
#include "xla_ffi/worker/timeline.h"

namespace jaxhetero {

// Where the bytes of a strand's part lie in the whole bucket's inputs or outputs: pieces of equal size, at equal
// distances. Without pieces the part is the whole.
struct PartPlace {
  size_t piece_bytes = 0;
  size_t first = 0;     // the offset of the first piece
  size_t distance = 0;  // the distance from one piece's offset to the next one's

  [[nodiscard]] size_t whole_offset(size_t offset) const {
    if (piece_bytes == 0) return offset;
    return first + offset / piece_bytes * distance + offset % piece_bytes;
  }
  // How many bytes from this offset on lie side by side.
  [[nodiscard]] size_t run_bytes(size_t offset, size_t bytes) const {
    return piece_bytes == 0 ? bytes : std::min(bytes, piece_bytes - offset % piece_bytes);
  }
};

// For buckets of another device, whose bytes come and go slice by slice. Null functions stand for memory that the
// program itself reads and writes. Offsets are those of the whole bucket.
struct SlicedTransfer {
  // The front of the inputs that is ready; feed() says that it grew.
  std::shared_ptr<const std::atomic<size_t>> ready_bytes;
  // Called with ranges of the outputs, on the threads of the strands.
  std::function<void(size_t offset, size_t bytes)> received;
  // The same ranges, of a round that begins anew: `received` will be called with them once more.
  std::function<void(size_t offset, size_t bytes)> revoked;
  PartPlace place;         // the place of a part's inputs
  PartPlace result_place;  // the place of its outputs, which may have another dtype
  Ranges reported;         // the bytes of the part given to `received`, each once for all views

  // Whether the inputs are ready up to the end of this part.
  [[nodiscard]] bool is_ready(size_t offset, size_t bytes) const {
    if (ready_bytes == nullptr || bytes == 0) return true;
    return place.whole_offset(offset + bytes - 1) < ready_bytes->load(std::memory_order_acquire);
  }
  void report(size_t offset, size_t bytes) {
    if (received == nullptr || bytes == 0) return;
    reported.add(offset, offset + bytes, [this](size_t fresh, size_t count) { tell(received, fresh, count); });
  }
  // The round begins anew, and its totals may be others.
  void revoke() {
    reported.take_all([this](size_t offset, size_t bytes) { tell(revoked, offset, bytes); });
  }

 private:
  void tell(const std::function<void(size_t, size_t)>& whom, size_t offset, size_t bytes) const {
    while (bytes > 0) {
      const size_t run = result_place.run_bytes(offset, bytes);
      whom(result_place.whole_offset(offset), run);
      offset += run;
      bytes -= run;
    }
  }
};

class WholeRound;  // see round_ledger.h

// What a round of an op that uses a state brings beside the bucket.
struct StepRequest {
  std::shared_ptr<const Bytes> update;  // the encoded UpdateDescription of a measure or an update
  // Where the contributions are numbers of scales: the element before which each leaf of the bucket ends.
  std::shared_ptr<const std::vector<uint64_t>> leaf_ends;
  StepInputs inputs;
  // Of a measure: takes the sums over parts of tensors, once for each part of the round; on the threads of the strands.
  std::function<void(const StepTotals&)> totals;
};

// A strand's part of a complete round.
struct StrandPart {
  uint32_t strand = 0;
  RoundRecord::Time end;
  std::chrono::nanoseconds cpu{0};  // the time that the strand's thread was on a core meanwhile
  uint64_t message_count = 0;       // the chunks that it pushed and the totals that it received
};

// A complete round, and what each strand did of it.
struct RoundOutcome {
  Timeline::Entry entry;
  std::vector<StrandPart> strand_parts;
};

// One collective of a bucket, as the FFI handler asks for it. The memory of inputs and outputs stays valid until `done`
// has been called. They hold the whole bucket; but the inputs of a gather, and the outputs of a scatter, this rank's
// row.
struct RoundRequest {
  uint64_t op = 0;
  int64_t priority = 0;        // all workers push rounds of a lower one first
  uint64_t sequence = 0;       // the number of the call; of equal priority, rounds of a lower one are pushed first
  int32_t device = 0;          // the device that the call runs on
  std::optional<int64_t> run;  // the run of the program that has the call; XLA numbers runs as they are launched
  std::string description;
  OpSpec spec;
  Leaves inputs;
  Leaves outputs;                            // none: the results are thrown away
  bool narrows = false;                      // the inputs are float32; the wire has the 16-bit floats of `spec`
  bool widens = false;                       // the outputs are float32; the wire has the 16-bit floats of `spec`
  std::shared_ptr<const void> inputs_owner;  // held to keep the inputs readable after `done`
  std::optional<LongLived> inputs_home;      // the memory that they are a part of, if a fabric may send from there
  SlicedTransfer sliced;
  std::shared_ptr<const StepRequest> step;  // null where the op uses no state
  std::function<void(const Status&)> done;  // called once, on a thread of its own
  // In place of a round, an exchange over channels: called in the order of the op, with its number, on the loop's
  // thread.
  std::function<void(uint64_t op)> exchange;
  // In place of the timeline: called with the record of the complete round, on a strand's thread.
  std::function<void(const RoundOutcome&)> recorded;
  // Set by the worker itself.
  std::shared_ptr<WholeRound> whole;  // the round of which this is the request or, on a strand, a part
  Stake stake{};
  std::shared_ptr<const ShardPlan> plan;  // a plan in place of the job's, whose shards need not go in step
  bool is_internal = false;               // a round of the measurement of rates
  bool is_compiled_anew = false;          // the first round since this process compiled the call again
  EventLoop::Clock::time_point requested_at{};
};

// A part of a round's inputs or outputs, as they are on the wire.
struct ByteRange {
  size_t offset = 0;
  size_t bytes = 0;
  [[nodiscard]] size_t end() const { return offset + bytes; }
};

// A chunk that was pushed and whose total is not back.
struct InFlightChunk {
  uint64_t frame = 0;  // the frame's number on the connection
  uint32_t bytes = 0;  // header included
  EventLoop::Clock::time_point pushed_at;
};

// The part of a round that goes through one reducer. Offsets and counts are in elements, counted in the bucket; a shard
// may go on at the bucket's beginning, and then so do its offsets.
struct Segment {
  Shard shard;
  uint64_t bucket_count = 0;
  uint64_t items_per_chunk = 0;  // the last chunk of the shard, and that at the bucket's end, may have fewer
  uint64_t next_push = 0;        // the offset of the next chunk to push
  uint64_t next_result = 0;      // the offset of the next total
  std::deque<InFlightChunk> in_flight;
  size_t in_flight_bytes = 0;
  bool was_fed = false;        // a chunk was pushed out of turn, in a stall
  uint64_t awaited_count = 0;  // the totals of it for which all other segments waited
  bool all_pushed = false;
  bool done = false;
  uint64_t first_link_bytes = 0;  // what has come over the link, with the first total
  uint64_t link_bytes = 0;        // what comes from then on until all is here, of other rounds too
  EventLoop::Clock::time_point first_result_at;
  EventLoop::Clock::time_point done_at;

  Segment(const Shard& of, uint64_t items, uint64_t bucket = std::numeric_limits<uint64_t>::max())
      : shard(of), bucket_count(bucket), items_per_chunk(items), next_push(of.offset), next_result(of.offset) {}
  [[nodiscard]] uint64_t end() const { return shard.offset + shard.count; }
  [[nodiscard]] Range next_chunk() const { return chunk_at(next_push); }
  [[nodiscard]] Range awaited_chunk() const { return chunk_at(next_result); }
  [[nodiscard]] Range chunk_at(uint64_t offset) const {
    if (offset >= bucket_count) return {offset - bucket_count, std::min(items_per_chunk, end() - offset)};
    return {offset, std::min(items_per_chunk, std::min(end(), bucket_count) - offset)};
  }
  [[nodiscard]] uint64_t chunk_count() const {
    return std::max<uint64_t>(1, (shard.count + items_per_chunk - 1) / items_per_chunk);
  }
  // How much of its total is here, from 0 to 1.
  [[nodiscard]] double done_part() const {
    return done ? 1
                : static_cast<double>(next_result - shard.offset) /
                      static_cast<double>(std::max<uint64_t>(shard.count, 1));
  }
};

struct Round {
  using Time = EventLoop::Clock::time_point;

  struct Times {
    Time started_at;
    Time first_result_at;                      // the epoch until a total is here
    Time progress_at;                          // the time of the start, or of the latest total
    std::chrono::nanoseconds cpu_at_start{0};  // the time on a core, of the strand's thread, until then
  };
  // What the watch for stalls knows of it.
  struct Delay {
    std::string late_workers;  // the reducers wait for them, by their last word
    Time moved_at;             // the latest time when reducers said that a late worker is slow, not stuck
    Time next_report_at;
    bool disagree = false;  // one of them waits in the same call over another group
    bool has_accused = false;
    // Of an elastic job.
    std::vector<uint32_t> absent;  // the ranks of the late workers
    bool has_accused_absent = false;
  };

  RoundRequest request;
  uint64_t number = 0;
  std::vector<Segment> segments;
  size_t open_segment_count = 0;
  double slowest_part = 0;        // the least done_part() of the segments
  size_t slowest_count = 0;       // how many segments have the least
  size_t least_window_bytes = 0;  // the least window of any link
  bool is_uneven = false;         // its shards are of different sizes
  Times times;
  Delay delay;
  StepTotals totals;                     // the totals of a measure
  bool is_replay = false;                // the round is complete here, but not on every worker
  bool is_answered = false;              // the header of a total has come
  bool is_timed = false;                 // it tells what links carry
  bool is_measured = false;              // its links need not go in step, so that each shows what it carries
  KeptContribution* keeps_in = nullptr;  // where every chunk is copied when it is pushed; null: nowhere
  // Of an elastic job.
  bool is_held = false;  // all of the total is here, on this strand
  bool is_safe = false;  // all members hold the total

  // Of several rounds that run, all workers push the chunks of the same one first: their programs may start rounds in
  // different orders, and a chunk waits at its reducer for those of all workers.
  using Turn = std::tuple<int64_t, uint64_t, uint64_t, uint64_t>;  // priority, round, sequence, op
  [[nodiscard]] Turn turn() const { return {request.priority, number, request.sequence, request.op}; }

  [[nodiscard]] std::string name() const { return request.description + " round " + std::to_string(number); }

  // The memory that chunks are sent from. The inputs, which a copy has just brought into the cache; but the copy where
  // it is narrowed, or a peer on this host reads it in place.
  [[nodiscard]] const Leaves& wire_inputs(bool lends) const {
    return keeps_in != nullptr && (lends || request.narrows) ? keeps_in->leaves() : request.inputs;
  }

  // What of a range of the bucket is pushed, in the inputs; and what of a chunk is answered, in the outputs.
  [[nodiscard]] ByteRange pushed(const Range& range) const {
    return in(request.stake.operands, request.stake.pushed(range), item_bytes(request.spec.dtype));
  }
  [[nodiscard]] ByteRange answered(const Range& chunk) const {
    return in(request.stake.results, request.stake.answered(chunk), request.spec.result_item_bytes());
  }

  // Copies what is pushed of the segment from one offset to another to where it is kept.
  void keep(const Segment& segment, uint64_t begin, uint64_t end) const {
    for (const Range& range : unwrapped({begin, end - begin}, segment.bucket_count)) keep(pushed(range));
  }
  // Copies this part of the inputs to where it is kept. `lends`: a peer on this host will read it there.
  void keep(const ByteRange& part, bool lends = false) const {
    if (keeps_in == nullptr) return;
    if (request.narrows) {
      keeps_in->copy_narrowed(request.spec.dtype, request.inputs, part.offset, part.bytes);
    } else {
      keeps_in->copy(request.inputs, part.offset, part.bytes, lends);
    }
  }

  // Where this part of the outputs is received. Totals that will be widened go to the last half of their place.
  void place(const ByteRange& part, std::vector<iovec>& into) const {
    if (!request.widens) return request.outputs.slice(part.offset, part.bytes, into);
    const size_t first = into.size();
    request.outputs.slice(2 * part.offset, 2 * part.bytes, into);
    for (iovec& piece : std::span(into).subspan(first)) {
      piece.iov_len /= 2;
      piece.iov_base = static_cast<std::byte*>(piece.iov_base) + piece.iov_len;
    }
  }

  // The answer to this chunk has been received where place() said: makes its part of the outputs complete and returns
  // it. Nothing without outputs. `pieces` is scratch memory.
  ByteRange settle(const Range& chunk, std::vector<iovec>& pieces) const {
    if (request.outputs.bytes() == 0) return {};
    if (request.stake.is_own(chunk)) {
      const ByteRange from = pushed(chunk);
      const ByteRange to = in(request.stake.results, chunk, request.spec.result_item_bytes());
      copy(request.inputs, from.offset, request.outputs, to.offset, from.bytes);
      return to;
    }
    const ByteRange part = answered(chunk);
    if (request.widens) widen(part, pieces);
    return part;
  }

  void widen(const ByteRange& part, std::vector<iovec>& pieces) const {
    pieces.clear();
    request.outputs.slice(2 * part.offset, 2 * part.bytes, pieces);
    for (const iovec& piece : pieces) {
      widen_in_place(request.spec.dtype, {static_cast<std::byte*>(piece.iov_base), piece.iov_len});
    }
  }

  // Cuts the bucket into segments, one for each of the plan's shards.
  void cut(const ShardPlan& plan) {
    const OpSpec& spec = request.spec;
    cut(plan, plan.cut(spec.number_to_meet(request.op), spec.total_count, item_bytes(spec.dtype), has_rows(spec.kind)));
  }
  // One for each of these shards; the plan tells the chunks.
  void cut(const ShardPlan& plan, std::span<const Shard> shards) {
    const OpSpec& spec = request.spec;
    const size_t item = item_bytes(spec.dtype);
    // An answer that waits for the partners of its reducer comes later by what a chunk takes: so a chunk is half as
    // large.
    const bool waits = uses_state(spec.kind) && spec.state.is_backed_up;
    const uint64_t count = waits ? spec.total_count / 2 : spec.total_count;
    for (const Shard& shard : shards) {
      const uint64_t items_per_chunk =
          carries_headers_alone(spec)
              ? plan.most_items_per_chunk(item)
              : plan.items_per_chunk(count, item, spec.call_bytes, has_rows(spec.kind), shard.reducer);
      segments.emplace_back(shard, items_per_chunk, spec.total_count);
      is_uneven |= shard.count > 5 * shards.front().count / 4 || shard.count < 3 * shards.front().count / 4;
    }
    open_segment_count = slowest_count = segments.size();
    least_window_bytes = plan.least_window_bytes(spec.total_count, item);
  }

  // Calls `visit` with each segment, from another one on on each worker.
  template <typename Visit>
  void begin_segments(uint32_t rank, const JobShape& job, Visit&& visit) {
    const size_t first = first_peer(segments.size(), rank, job.worker_count);
    for (size_t i = 0; i < segments.size(); ++i) visit(segments[(first + i) % segments.size()]);
  }

  // After each total, whose segment had got to `earlier_part` before: whether the slowest segment has got further. Then
  // all links may push more.
  bool note_slowest(double earlier_part) {
    if (earlier_part > slowest_part || --slowest_count > 0) return false;
    double part = 1;
    for (const Segment& segment : segments) part = std::min(part, segment.done_part());
    slowest_count = std::ranges::count(segments, part, &Segment::done_part);
    return part > std::exchange(slowest_part, part);
  }

  // The segment that goes through this reducer, by its place in the view; null if none does.
  [[nodiscard]] Segment* segment_at(uint32_t reducer) {
    const auto found = std::ranges::find_if(segments, [&](const Segment& s) { return s.shard.reducer == reducer; });
    return found == segments.end() ? nullptr : &*found;
  }

 private:
  // A part of what `held` holds of the bucket, counted from its beginning. An element takes `item` bytes.
  [[nodiscard]] static ByteRange in(const Range& held, const Range& part, size_t item) {
    if (part.count == 0) return {};
    return {(part.offset - held.offset) * item, part.count * item};
  }
};

}  // namespace jaxhetero
