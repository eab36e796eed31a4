// The two custom calls of a round that outlives its program. One starts it, and gives a ticket; the other one takes the
// ticket, and gives the total.
//
// The first is done once the operands are copied: XLA may use their memory again, and the copy is what is pushed, and
// kept in case a reducer is lost. The second is done when the total is there.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/base/buffers.h"
#include "xla_ffi/ffi/call_site.h"
#include "xla_ffi/ffi/host_handler.h"
#include "xla_ffi/worker/pending_rounds.h"

namespace jaxhetero {

// The attributes of a start beside those of every call, as jaxhetero/_collectives/pending_primitives.py writes them.
struct StartAttributes {
  int64_t priority = 0;
};

template <typename Visit>
void for_each_start_attribute(Visit&& visit) {
  visit("priority", &StartAttributes::priority);
}

// All attributes of the other call.
struct DoneAttributes {
  std::string_view label;
  int64_t worker_count = 0;
  int64_t carries = 0;  // not 0: only the ticket is copied, to the beginning of the results
};

template <typename Visit>
void for_each_done_attribute(Visit&& visit) {
  visit("label", &DoneAttributes::label);
  visit("worker_count", &DoneAttributes::worker_count);
  visit("carries", &DoneAttributes::carries);
}

struct StartSite : CallSite {
  int64_t priority = 0;
};

struct DoneSite : CallSite {
  bool carries = false;
};

// The handlers that make call sites of a platform's types.
template <typename Site>
xla::ffi::ErrorOr<std::unique_ptr<Site>> instantiate_start(xla::ffi::Dictionary dictionary) {
  xla::ffi::ErrorOr<std::unique_ptr<Site>> site = instantiate<Site>(dictionary);
  if (!site.has_value()) return site;
  const auto attributes =
      read_declared<StartAttributes>(dictionary, [](auto&& visit) { for_each_start_attribute(visit); });
  if (!attributes.has_value()) return xla::ffi::Unexpected(attributes.error());
  (*site)->priority = attributes->priority;
  return site;
}
template <typename Site>
xla::ffi::ErrorOr<std::unique_ptr<Site>> instantiate_done(xla::ffi::Dictionary dictionary) {
  const auto attributes =
      read_declared<DoneAttributes>(dictionary, [](auto&& visit) { for_each_done_attribute(visit); });
  if (!attributes.has_value()) return xla::ffi::Unexpected(attributes.error());
  auto site = std::make_unique<Site>();
  site->label = attributes->label;
  site->worker_count = attributes->worker_count;
  site->carries = attributes->carries != 0;
  return site;
}

// What one run of a start asks for, with the memory of its operands and of its ticket as XLA has it.
struct StartCall {
  RoundRequest request;
  Leaves ticket;
};
Result<StartCall> read_start(StartSite& site, int64_t run, int32_t device, const xla::ffi::RemainingArgs& args,
                             const xla::ffi::RemainingRets& rets);
// Likewise of the other call.
struct DoneCall {
  Leaves ticket;  // the beginning of the operands
  Leaves results;
};
Result<DoneCall> read_done(const CallSite& site, const xla::ffi::RemainingArgs& args,
                           const xla::ffi::RemainingRets& rets);

// "jaxhetero_start" and "jaxhetero_done", for the memory of this host.
FfiTarget start_target();
FfiTarget done_target();

}  // namespace jaxhetero
