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
};
std::string_view kind_name(Kind kind);

// The reducer compares the workers' specs, and fails the job if two differ. An op has one spec for all its rounds.
struct OpSpec {
  Kind kind = Kind::kSum;
  DType dtype = DType::kF32;
  uint32_t root = 0;         // of a broadcast, else 0
  uint32_t leaf_count = 0;   // leaves in the bucket
  uint64_t total_count = 0;  // elements in the bucket
  uint32_t signature = 0;    // hash of the leaves' shapes
  uint64_t call_bytes = 0;   // on the wire, of all buckets of the collective call that this bucket is part of; else 0

  bool operator==(const OpSpec&) const = default;
};

// Whether this rank's chunks carry bytes. Every rank pushes every chunk, if only as a header: that shows that it has
// reached the round.
inline bool contributes(const OpSpec& spec, uint32_t rank) {
  return spec.kind != Kind::kBroadcast || spec.root == rank;
}

// A protocol error if no peer of ours would send this spec.
Status check(const OpSpec& spec);

// For people: "sum of float32[1024] in 2 leaves".
std::string describe(const OpSpec& spec);

template <typename Codec, typename Spec>
void fields(Codec& codec, Spec& spec)
  requires IsA<Spec, OpSpec>
{
  codec(spec.kind, spec.dtype, spec.root, spec.leaf_count, spec.total_count, spec.signature, spec.call_bytes);
}

}  // namespace jaxhetero
