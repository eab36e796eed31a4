// A run of a call that is about the state that reducers keep for an optimizer: what its operands and results are.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/ffi/call_site.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/state_models.h"

namespace jaxhetero {

struct StateCall {
  RoundRequest request;  // without its step and its model, which `begin` sets
  // What is not of the bucket: small values that the round needs, and that come of it.
  Leaves step_operands;
  Leaves step_results;
  std::function<void(std::span<const std::byte> step_operands, RoundRequest& request)> begin;
  std::function<Status(std::span<std::byte> step_results)> finish;  // called after the round
};

// Operands and results, in this order:
//   a store    leaves, version                         version
//   a load     version                                 leaves, version
//   a measure  leaves, scalars..., version             leaves, totals, version
//   an update  leaves, scalars..., version             leaves, version
// A measure or an update may also be packed: behind the leaves it has one operand, uint32[...], and it has one result,
// the weights side by side or the totals as uint32[...]. The bits of the version are at the end of both.
//
// Leaves are those of the bucket. A call that resumes does not read them, and a measure does not write them: they pass
// on the memory of the gradients to the new weights. Scalars are one or more float32[...], one behind the other;
// totals are float32[...]; a version is uint32[]. A store of weights takes what StateModels::start() does in its place.
// Only the types of the buffers are read, not their contents. `models` outlives the call.
Result<StateCall> make_state_call(CallSite& site, int64_t run, int32_t device, const xla::ffi::RemainingArgs& args,
                                  const xla::ffi::RemainingRets& rets, StateModels& models);

// A measure or an update whose results are taken by another call. They lie side by side in memory of ours: the weights,
// if it is an update, and behind them what comes of the step, as in a packed call.
struct StateStart {
  StateCall call;  // without outputs and results
  size_t output_bytes = 0;
  size_t step_result_bytes = 0;
};

// The operands are those of make_state_call().
Result<StateStart> make_state_start(CallSite& site, int64_t run, int32_t device, const xla::ffi::RemainingArgs& args,
                                    StateModels& models);

}  // namespace jaxhetero
