#include "xla_ffi/worker/part_plan.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/shard_plan.h"

namespace jaxhetero {
namespace {

constexpr uint64_t kAlignBytes = 64;
// A bucket with less than this for every reducer and strand goes through one strand: each strand costs a wake-up.
constexpr uint64_t kLeastShardBytes = uint64_t{64} << 10;
constexpr uint64_t kLeastShardChunks = 2;  // likewise, where the job sets the chunks

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

RoundRequest part_of(const RoundRequest& whole, uint32_t strand, const Columns& columns) {
  RoundRequest part = whole;
  part.op = op_of_part(whole.op, strand);
  part.spec.part = strand;
  part.spec.bucket_count = whole.spec.total_count;
  part.spec.total_count = whole.spec.total_count / columns.width * columns.count;
  if (uses_state(part.spec.kind)) part.spec.state.first = columns.first;
  const size_t item = item_bytes(whole.spec.dtype);
  const size_t result_item = whole.spec.result_item_bytes();
  part.inputs = take_columns(whole.inputs, columns, whole.narrows ? sizeof(float) : item);
  part.outputs = take_columns(whole.outputs, columns, whole.widens ? sizeof(float) : result_item);
  part.sliced.place = columns.place(item);
  return part;
}

}  // namespace

PartPlan::PartPlan(const JobShape& job, std::vector<uint32_t> shares)
    : shares_(std::move(shares)),
      whole_(std::accumulate(shares_.begin(), shares_.end(), uint64_t{0})),
      worker_count_(job.worker_count),
      least_bytes_(shares_.size() * total_reducer_count(job) *
                   (job.chunk_bytes > 0 ? kLeastShardChunks * job.chunk_bytes : kLeastShardBytes)) {}

uint32_t PartPlan::part_count(const OpSpec& spec) const {
  return spec.total_count * spec.cut_item_bytes() < least_bytes_ ? 1 : static_cast<uint32_t>(shares_.size());
}

std::vector<RoundPart> PartPlan::cut(RoundRequest request) const {
  const OpSpec& spec = request.spec;
  std::vector<RoundPart> parts;
  if (part_count(spec) == 1) {
    const auto strand = static_cast<uint32_t>(mix(spec.number_to_meet(request.op)) % shares_.size());
    request.op = op_of_part(request.op, strand);
    parts.push_back({strand, std::move(request)});
    return parts;
  }
  const uint64_t width = spec.total_count / (has_rows(spec.kind) ? spec.member_count(worker_count_) : 1);
  const uint64_t align = std::max<uint64_t>(1, kAlignBytes / spec.cut_item_bytes());
  uint64_t first = 0;
  uint64_t cut_off = 0;  // of the shares
  for (uint32_t strand = 0; strand < shares_.size(); ++strand) {
    cut_off += shares_[strand];
    // Without overflow: the width may be near 2^60, the sum of the shares is below 2^20.
    uint64_t end = width / whole_ * cut_off + width % whole_ * cut_off / whole_;
    if (cut_off < whole_) end -= end % align;
    parts.push_back({strand, part_of(request, strand, {width, first, end - first})});
    first = end;
  }
  return parts;
}

}  // namespace jaxhetero
