// The description of an op that all workers must share: the kind of reduction, and the bucket that it reduces.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {

// How a round combines the contributions.
enum class Kind : uint8_t {
  kSum = 1,
  kBroadcast = 2,  // the root's contribution, unchanged; other ranks push headers without payload
  kMax = 3,
  kMin = 4,
  kScatter = 5,  // the sum, of which each rank gets its row
  kGather = 6,   // the rows of all ranks, each unchanged
};
std::string_view kind_name(Kind kind);

// The reducer compares the workers' specs, and fails the job if two differ. An op has one spec for all its rounds.
struct OpSpec {
  Kind kind = Kind::kSum;
  DType dtype = DType::kF32;
  uint32_t root = 0;          // of a broadcast, else 0
  uint32_t leaf_count = 0;    // leaves in the whole bucket
  uint64_t total_count = 0;   // elements in the bucket; where strands carry parts of it, in this part
  uint32_t signature = 0;     // hash of the leaves' shapes
  uint64_t call_bytes = 0;    // on the wire, of all buckets of the collective call that this bucket is part of; else 0
  uint64_t bucket_count = 0;  // elements in the whole bucket, where strands carry parts of it; else 0
  uint32_t part = 0;          // the number of this part; each bucket has a part 0

  bool operator==(const OpSpec&) const = default;
};

// The bucket of a scatter or a gather consists of rows of equal size, one for each rank and in their order. A row has
// the row of each leaf, one after the other.
inline bool has_rows(Kind kind) { return kind == Kind::kScatter || kind == Kind::kGather; }
// Whether each element of the result is one rank's, unchanged.
inline bool passes_on(Kind kind) { return kind == Kind::kBroadcast || kind == Kind::kGather; }

// Elements of a bucket.
struct Range {
  uint64_t offset = 0;
  uint64_t count = 0;

  bool operator==(const Range&) const = default;
};
// The part of `range` that lies in `other`. If that is nothing, it is at the offset of `range`.
Range overlap(const Range& range, const Range& other);

// What of a bucket one rank has to do with. Every rank pushes every chunk, and is answered every chunk, if only as a
// header: a push shows that the rank has reached the round, an answer that all have.
struct Stake {
  Range operands;  // what it contributes
  Range results;   // what it gets
  bool keeps_own;  // its operands are a part of its results

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

// For people: "sum of float32[1024] in 2 leaves".
std::string describe(const OpSpec& spec);

template <typename Codec, typename Spec>
void fields(Codec& codec, Spec& spec)
  requires IsA<Spec, OpSpec>
{
  codec(spec.kind, spec.dtype, spec.root, spec.leaf_count, spec.total_count, spec.signature, spec.call_bytes,
        spec.bucket_count, spec.part);
}

}  // namespace jaxhetero
