#include "xla_ffi/worker/launch_order.h"

#include <algorithm>
#include <cstddef>

#include "xla_ffi/base/mix.h"

namespace jaxhetero {
namespace {

constexpr size_t kMostCalls = 16;  // an op has so many calls remembered at most

}  // namespace

// Devices beside the first one are told apart by how far they are from it. Where workers come to them in another order,
// each waits for an op that the others do not have.
LaunchOrder::Calls& LaunchOrder::calls_of(RoundRequest& request) {
  Calls& calls = ops_[request.op];
  if (calls.latest.empty() || calls.device == request.device) return calls;
  request.op = mix(mix(request.op) + static_cast<uint64_t>(int64_t{request.device} - calls.device));
  return ops_[request.op];
}

Status LaunchOrder::note(RoundRequest& request) {
  if (!request.run.has_value()) return {};  // the round is of no program
  Calls& calls = calls_of(request);
  const Launch now{request.sequence, *request.run};
  if (calls.latest.empty()) {
    calls = {request.device, now.sequence, {now}};
    return {};
  }
  request.is_compiled_anew = now.sequence > calls.newest;
  calls.newest = std::max(calls.newest, now.sequence);
  const Launch before = calls.latest.back();
  if (now.run == before.run && now.sequence != before.sequence) {
    return {Code::kInvalidArgument, "XLA has made two calls of " + request.description +
                                        " in one program, and may run them in any order; write each call out, with a "
                                        "name of its own"};
  }
  const auto same = std::ranges::find(calls.latest, now.sequence, &Launch::sequence);
  const bool is_backwards = same != calls.latest.end() && static_cast<int32_t>(now.run - same->run) < 0;
  if (same != calls.latest.end()) {
    std::rotate(same, same + 1, calls.latest.end());
    calls.latest.back() = now;
  } else {
    if (calls.latest.size() == kMostCalls) calls.latest.erase(calls.latest.begin());
    calls.latest.push_back(now);
  }
  if (!is_backwards) return {};
  return {Code::kInvalidArgument, "several threads launch the program with " + request.description +
                                      " at once, so its rounds have no order that all workers share; launch it from "
                                      "one thread"};
}

}  // namespace jaxhetero
