// The description of an op that all workers must share: the kind of reduction, and the bucket that it reduces.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/job_shape.h"

namespace jaxhetero {

// How a round combines the contributions.
enum class Kind : uint8_t {
  kSum = 1,
  kBroadcast = 2,  // the root's contribution, unchanged; other ranks push headers without payload
  kMax = 3,
  kMin = 4,
  kScatter = 5,  // the sum, of which each rank gets its row
  kGather = 6,   // the rows of all ranks, each unchanged
  // Of an optimizer whose state reducers keep: see StateUse.
  kStore = 7,    // the root's contribution goes into a slot of the state; after new weights, the other slots are 0
  kLoad = 8,     // nobody contributes; the result is a slot of the state
  kMeasure = 9,  // sums over tensors, of the summed contributions and the state, in kTotals frames
  kUpdate = 10,  // the summed contributions change the state; the result is the new weights
  // Of small whole numbers, or of floats of 8 bits, which go as int8: see sum/mean.h.
  kMean8 = 11,
  kMean4 = 12,
  kMeanFloat8 = 13,
};
std::string_view kind_name(Kind kind);
std::string_view numbers_name(Numbers numbers);

// What an op has to do with the state that reducers keep for an optimizer: of a bucket of weights, the weights and the
// states that belong to them, a slot of float32 each. Strands keep theirs apart, as they do with everything.
inline constexpr uint32_t kMaxStateSlots = 256;
struct StateUse {
  uint64_t number = 0;               // the number of the state; 0 where the op has to do with none
  uint32_t slot_count = 0;           // the slots of the state, of which slot 0 has the weights
  uint32_t slot = 0;                 // the slot that a store or a load is about
  uint64_t update = 0;               // the hash of the UpdateDescription that a measure or an update goes by
  bool resumes = false;              // the summed contributions are there already, from a measure of the same step
  DType weights = DType::kF32;       // the dtype of the result of an update
  Numbers numbers = Numbers::kNone;  // of a measure or an update: what its contributions, float32, are
  bool is_backed_up = true;          // other reducers back the state up
  uint64_t first = 0;                // the first element of this part, where strands carry parts of a bucket
  // Of elastic jobs, where nobody knows beforehand who takes part.
  bool averages = false;   // the mean of the contributions is wanted, not their sum
  bool is_of_all = false;  // all contribute the same to a store, and there is no root

  bool operator==(const StateUse&) const = default;
};

// The reducer compares the workers' specs, and fails the job if two differ. An op has one spec for all its rounds.
struct OpSpec {
  Kind kind = Kind::kSum;
  DType dtype = DType::kF32;
  uint32_t root = 0;         // the root of a broadcast; else 0
  uint32_t leaf_count = 0;   // leaves in the whole bucket
  uint64_t total_count = 0;  // elements in the bucket; where strands carry parts of it, in this part
  uint32_t signature = 0;    // hash of the leaves' shapes
  // The bytes on the wire of all buckets of the collective call that this bucket is part of; else 0.
  uint64_t call_bytes = 0;
  uint64_t bucket_count = 0;  // elements in the whole bucket, where strands carry parts of it; else 0
  uint32_t part = 0;          // the number of this part; each bucket has a part 0
  // The op's group, that is the ranks that take part in it, in their order; empty: all of the job.
  std::vector<uint32_t> group = {};
  // Of an op with a group: the call that it is of, which other groups may have as well; else 0.
  uint64_t site = 0;
  StateUse state = {};

  bool operator==(const OpSpec&) const = default;

  // The number by which a small op chooses its reducer and its strand. Workers that disagree about the group, and so
  // about the op's own number, meet there; and so do all ops of a state.
  [[nodiscard]] uint64_t number_to_meet(uint64_t op) const {
    if (state.number != 0) return state.number;
    return group.empty() ? op : site;
  }
  // By which a bucket is cut into parts and shards: all ops of a state are cut alike.
  [[nodiscard]] size_t cut_item_bytes() const { return state.number != 0 ? sizeof(float) : item_bytes(dtype); }
  [[nodiscard]] DType result_dtype() const { return kind == Kind::kUpdate ? state.weights : dtype; }
  // Of an element of the result.
  [[nodiscard]] size_t result_item_bytes() const { return item_bytes(result_dtype()); }

  // The members of the group, by their places in it, in a job of so many workers.
  [[nodiscard]] uint32_t member_count(uint32_t worker_count) const {
    return group.empty() ? worker_count : static_cast<uint32_t>(group.size());
  }
  [[nodiscard]] uint32_t rank_at(uint32_t place) const { return group.empty() ? place : group[place]; }
  [[nodiscard]] bool has_member(uint32_t rank) const {
    return group.empty() || std::ranges::binary_search(group, rank);
  }
  // Of a member.
  [[nodiscard]] uint32_t place_of(uint32_t rank) const {
    return group.empty() ? rank : static_cast<uint32_t>(std::ranges::lower_bound(group, rank) - group.begin());
  }
};

// The bucket of a scatter or a gather consists of rows of equal size, one for each member and in their order. A row has
// the row of each leaf, one after the other.
inline bool has_rows(Kind kind) { return kind == Kind::kScatter || kind == Kind::kGather; }
// Of an elastic job, the largest bucket in one part whose total is given to the program at once, and not only when all
// members have it: 4 KiB, and what tells the participants. Not where reducers keep a state: they can undo what they
// have done in a round only as long as nobody has been given it.
inline constexpr size_t kMostBytesGivenAtOnce = size_t{5} << 10;
inline constexpr size_t kMostTotalBytes = 2 * kMostBytesGivenAtOnce;  // of such a total, as the program has it
inline bool is_given_at_once(const OpSpec& spec) {
  return spec.state.number == 0 && spec.bucket_count == 0 &&
         spec.total_count * item_bytes(spec.dtype) <= kMostBytesGivenAtOnce;
}

// Whether they are different, in their order, and below the most that a job can have.
inline bool are_ranks(std::span<const uint32_t> ranks) {
  return std::ranges::adjacent_find(ranks, std::greater_equal()) == ranks.end() &&
         (ranks.empty() || ranks.back() < kMaxWorkers);
}

// Whether each element of the result is one rank's, unchanged.
inline bool passes_on(Kind kind) { return kind == Kind::kBroadcast || kind == Kind::kGather; }

// Whether the op is one of those that StateUse is about.
inline bool uses_state(Kind kind) { return kind >= Kind::kStore && kind <= Kind::kUpdate; }

inline bool is_mean(Kind kind) { return kind >= Kind::kMean8 && kind <= Kind::kMeanFloat8; }

// Whether no element goes either way: a measure after the first one of a step.
inline bool carries_headers_alone(const OpSpec& spec) { return spec.kind == Kind::kMeasure && spec.state.resumes; }

// Elements of a bucket.
struct Range {
  uint64_t offset = 0;
  uint64_t count = 0;

  bool operator==(const Range&) const = default;
};
// The part of `range` that lies in `other`. If that is nothing, it is at the offset of `range`.
Range overlap(const Range& range, const Range& other);
// The one or two ranges of a bucket of `count` elements that a range is which may go on at the bucket's beginning. Not
// one that is empty.
std::vector<Range> unwrapped(const Range& range, uint64_t count);

// What of a bucket one member has to do with. Every member pushes every chunk, and is answered every chunk, if only as
// a header: a push shows that it has reached the round, an answer that all members have.
struct Stake {
  Range operands;  // the elements that it contributes
  Range results;   // the elements that it gets
  bool keeps_own;  // the operands are a part of the results

  // The part of a chunk that it pushes.
  [[nodiscard]] Range pushed(const Range& chunk) const { return overlap(chunk, operands); }
  // Whether it has the result of a chunk already.
  [[nodiscard]] bool is_own(const Range& chunk) const { return keeps_own && pushed(chunk) == chunk; }
  // The part of a chunk that it is sent.
  [[nodiscard]] Range answered(const Range& chunk) const {
    return is_own(chunk) ? Range{chunk.offset, 0} : overlap(chunk, results);
  }
};
Stake stake_of(const OpSpec& spec, uint32_t worker_count, uint32_t rank);

// A protocol error if no peer of ours would send this spec.
Status check(const OpSpec& spec);
// The same in a job of so many workers.
Status check(const OpSpec& spec, uint32_t worker_count);

// For people: "ranks 0, 2".
std::string describe_ranks(std::span<const uint32_t> ranks);
// For people: "sum of float32[1024] in 2 leaves over ranks 0, 2".
std::string describe(const OpSpec& spec);

// What needs few bits shares a byte.
template <typename Codec, typename Use>
void fields(Codec& codec, Use& use)
  requires IsA<Use, StateUse>
{
  auto how = static_cast<uint8_t>((use.resumes ? 1 : 0) + (use.averages ? 2 : 0) + (use.is_of_all ? 4 : 0) +
                                  8 * static_cast<uint8_t>(use.numbers));
  codec(use.number, use.slot_count, use.slot, use.update, how, use.weights, use.is_backed_up, use.first);
  if constexpr (!std::is_const_v<Use>) {
    use.resumes = (how & 1) != 0;
    use.averages = (how & 2) != 0;
    use.is_of_all = (how & 4) != 0;
    use.numbers = static_cast<Numbers>(how >> 3 & 3);
  }
}

template <typename Codec, typename Spec>
void fields(Codec& codec, Spec& spec)
  requires IsA<Spec, OpSpec>
{
  codec(spec.kind, spec.dtype, spec.root, spec.leaf_count, spec.total_count, spec.signature, spec.call_bytes,
        spec.bucket_count, spec.part, spec.site);
  codec.list(spec.group, kMaxWorkers);
  fields(codec, spec.state);
}

}  // namespace jaxhetero
