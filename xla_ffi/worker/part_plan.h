// Which strand of a worker carries which elements of a round's bucket.
//
// Pure functions and values: all workers cut a bucket alike, in every view.
#pragma once

#include <cstdint>
#include <vector>

#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/round.h"

namespace jaxhetero {

// A strand's part of a round, as a request for a bucket of its own.
struct RoundPart {
  uint32_t strand = 0;
  RoundRequest request;
};

class PartPlan {
 public:
  PartPlan(const JobShape& job, uint32_t strand_count);

  // Into how many parts such a bucket is cut: one for each strand, or one in all if it is small.
  [[nodiscard]] uint32_t part_count(const OpSpec& spec) const;

  // Cuts a round. A large bucket has an equal part for each strand, cut by bytes and not by leaves; of a bucket of
  // rows, each part has equal columns. A small one goes to a single strand, chosen by the op's number. The parts use
  // the memory of the whole, and report to the same WholeRound.
  [[nodiscard]] std::vector<RoundPart> cut(RoundRequest request) const;

 private:
  uint32_t strand_count_;
  uint32_t worker_count_;
  uint64_t least_bytes_;  // of a bucket that is cut
};

}  // namespace jaxhetero
