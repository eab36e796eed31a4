// Which strand of a worker carries which elements of a round's bucket.
//
// Pure functions and values: all workers cut a bucket alike, in every view.
#pragma once

#include <cstdint>
#include <vector>

#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/shard_plan.h"

namespace jaxhetero {

// A strand's part of a round, as a request for a bucket of its own.
struct RoundPart {
  uint32_t strand = 0;
  RoundRequest request;
};

class PartPlan {
 public:
  // `shares`: of each strand, relative to the others; none is 0. `costs`: of messages, where they are known.
  PartPlan(const JobShape& job, std::vector<uint32_t> shares, const MessageCosts& costs = {});
  // One that gives every strand a part, however small.
  static PartPlan of_all_strands(const JobShape& job, uint32_t strand_count);

  // Into how many parts such a bucket is cut: one for each strand; but fewer where the parts would be small.
  [[nodiscard]] uint32_t part_count(const OpSpec& spec) const;

  // Cuts a round. The parts go to as many strands, by their shares, cut by bytes and not by leaves; of a bucket of
  // rows, a part has columns. Where not all strands have one, the op's number chooses the first of those that do. The
  // parts use the memory of the whole, and report to the same WholeRound.
  [[nodiscard]] std::vector<RoundPart> cut(RoundRequest request) const;

 private:
  std::vector<uint32_t> shares_;
  uint32_t worker_count_;
  uint64_t least_bytes_;  // the least size of a part, where there are several
};

}  // namespace jaxhetero
