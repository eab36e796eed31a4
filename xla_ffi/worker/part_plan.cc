#include "xla_ffi/worker/part_plan.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/mix.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/shard_plan.h"

namespace jaxhetero {
namespace {

// A part of a bucket has at least this for every reducer: each part costs wake-ups.
constexpr uint64_t kLeastPartShardBytes = uint64_t{64} << 10;
constexpr uint64_t kLeastShardChunks = 2;  // the fewest chunks of a shard where the job sets their size
// Where the cost of a message is known, a part of a shard may be smaller: as large as makes its bytes cost as much.
constexpr uint64_t kLeastDearShardBytes = uint64_t{16} << 10;

uint64_t least_part_shard_bytes(const JobShape& job, const MessageCosts& costs) {
  if (job.chunk_bytes > 0) return kLeastShardChunks * job.chunk_bytes;
  if (costs.message_ps == 0) return kLeastPartShardBytes;
  const uint64_t even_bytes = costs.message_ps * 1000 / std::max<uint64_t>(costs.byte_fs, 1);
  return std::clamp(even_bytes, kLeastDearShardBytes, kLeastPartShardBytes);
}

// Columns of a bucket that consists of rows of `width` elements.
struct Columns {
  uint64_t width = 0;
  uint64_t first = 0;
  uint64_t count = 0;

  [[nodiscard]] PartPlace place(size_t item) const { return {count * item, first * item, width * item}; }
};

// These columns of all the rows that `rows` has; an element takes `item` bytes there.
Leaves take_columns(const Leaves& rows, const Columns& columns, size_t item) {
  std::vector<iovec> pieces;
  for (size_t row = 0; row < rows.bytes(); row += columns.width * item) {
    rows.slice(row + columns.first * item, columns.count * item, pieces);
  }
  Leaves taken;
  for (const iovec& piece : pieces) taken.append(piece.iov_base, piece.iov_len);
  return taken;
}

// The coordinator compares the progress of ops, and every part makes its own. Workers that disagree about a bucket's
// size, and so about its parts, meet at the reducers under one number all the same.
uint64_t op_of_part(uint64_t op, uint32_t strand) { return strand == 0 ? op : mix(mix(op) + strand); }

RoundRequest part_of(const RoundRequest& whole, uint32_t number, const Columns& columns) {
  RoundRequest part = whole;
  part.spec.part = number;
  part.spec.bucket_count = whole.spec.total_count;
  part.spec.total_count = whole.spec.total_count / columns.width * columns.count;
  if (uses_state(part.spec.kind)) part.spec.state.first = columns.first;
  const size_t item = item_bytes(whole.spec.dtype);
  const size_t result_item = whole.spec.result_item_bytes();
  part.inputs = take_columns(whole.inputs, columns, whole.narrows ? sizeof(float) : item);
  part.outputs = take_columns(whole.outputs, columns, whole.widens ? sizeof(float) : result_item);
  part.sliced.place = columns.place(item);
  part.sliced.result_place = columns.place(result_item);
  return part;
}

}  // namespace

PartPlan::PartPlan(const JobShape& job, std::vector<uint32_t> shares, const MessageCosts& costs)
    : shares_(std::move(shares)),
      worker_count_(job.worker_count),
      least_bytes_(total_reducer_count(job) * least_part_shard_bytes(job, costs)) {}

PartPlan PartPlan::of_all_strands(const JobShape& job, uint32_t strand_count) {
  PartPlan plan(job, std::vector<uint32_t>(strand_count, 1));
  plan.least_bytes_ = 1;
  return plan;
}

uint32_t PartPlan::part_count(const OpSpec& spec) const {
  const uint64_t bytes = spec.total_count * spec.cut_item_bytes();
  return static_cast<uint32_t>(std::clamp<uint64_t>(bytes / least_bytes_, 1, shares_.size()));
}

std::vector<RoundPart> PartPlan::cut(RoundRequest request) const {
  const OpSpec& spec = request.spec;
  const uint32_t count = part_count(spec);
  const auto strand_count = static_cast<uint32_t>(shares_.size());
  const uint64_t first_strand = count == strand_count ? 0 : mix(spec.number_to_meet(request.op)) % strand_count;
  std::vector<uint32_t> strands(count);
  for (uint32_t number = 0; number < count; ++number) {
    strands[number] = static_cast<uint32_t>((first_strand + number) % strand_count);
  }
  std::vector<RoundPart> parts;
  if (count == 1) {
    request.op = op_of_part(request.op, strands[0]);
    parts.push_back({strands[0], std::move(request)});
    return parts;
  }
  uint64_t whole = 0;  // the sum of the shares
  for (const uint32_t strand : strands) whole += shares_[strand];
  const uint64_t width = spec.total_count / (has_rows(spec.kind) ? spec.member_count(worker_count_) : 1);
  const uint64_t align = std::max<uint64_t>(1, kAlignBytes / spec.cut_item_bytes());
  uint64_t first = 0;
  uint64_t cut_off = 0;  // the sum of the shares that are cut off
  for (uint32_t number = 0; number < count; ++number) {
    cut_off += shares_[strands[number]];
    // Without overflow: the width may be near 2^60, the sum of the shares is below 2^20.
    uint64_t end = width / whole * cut_off + width % whole * cut_off / whole;
    if (cut_off < whole) end -= end % align;
    RoundPart& part =
        parts.emplace_back(RoundPart{strands[number], part_of(request, number, {width, first, end - first})});
    part.request.op = op_of_part(request.op, part.strand);
    first = end;
  }
  return parts;
}

}  // namespace jaxhetero
