// A run of a call that is about the state that reducers keep for an optimizer: what its operands and results are, and
// what of the results is written here when the round is over.
#pragma once

#include <functional>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/ffi/call_site.h"
#include "xla_ffi/worker/round.h"

namespace jaxhetero {

struct StateCall {
  RoundRequest request;
  std::function<Status()> finish;  // after the round: writes the rest of the results
};

// Operands and results, in this order:
//   a store    leaves, version                         version
//   a load     version                                 leaves, version
//   a measure  leaves, scalars..., version             leaves, totals, version
//   an update  leaves, scalars..., version             leaves, version
// Leaves are those of the bucket. A call that resumes does not read them, and a measure does not write them: they pass
// on the memory of the gradients to the new weights. Scalars are one or more float32[...], one behind the other;
// totals are float32[...]; a version is uint32[].
Result<StateCall> make_state_call(CallSite& site, const xla::ffi::RemainingArgs& args,
                                  const xla::ffi::RemainingRets& rets);

}  // namespace jaxhetero
