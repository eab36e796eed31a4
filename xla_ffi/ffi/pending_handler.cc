#include "xla_ffi/ffi/pending_handler.h"

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/ffi/call_site.h"
#include "xla_ffi/ffi/state_call.h"
#include "xla_ffi/sum/convert.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/worker/communicator.h"
#include "xla_ffi/worker/pending_rounds.h"
#include "xla_ffi/worker/round.h"

namespace jaxhetero {
namespace {

namespace ffi = xla::ffi;

struct HostStartSite : StartSite {
  static ffi::TypeId id;
};
ffi::TypeId HostStartSite::id = {};

struct HostDoneSite : DoneSite {
  static ffi::TypeId id;
};
ffi::TypeId HostDoneSite::id = {};

Leaves one_leaf(const void* data, size_t bytes) {
  Leaves leaves;
  leaves.append(const_cast<void*>(data), bytes);
  return leaves;
}

Leaves one_leaf(const Ticket& ticket) { return one_leaf(&ticket, sizeof(Ticket)); }

Leaves leaves_of(const ffi::RemainingRets& results) {
  Leaves leaves;
  for (size_t i = 0; i < results.size(); ++i) {
    if (auto result = results.get<ffi::AnyBuffer>(i); result.has_value()) {
      leaves.append((*result)->untyped_data(), (*result)->size_bytes());
    }
  }
  return leaves;
}

Result<Leaves> ticket_of(const CallSite& site, const ffi::RemainingRets& rets) {
  Leaves ticket = leaves_of(rets);
  if (ticket.bytes() != sizeof(Ticket)) return Status(Code::kInternal, site.label + ": no room for a ticket");
  return ticket;
}

// From the program's operands to the contribution, which may have 16 bits in place of float32.
void contribute(const Leaves& operands, std::byte* to, std::optional<DType> narrows_to) {
  std::vector<iovec> pieces;
  operands.slice(0, operands.bytes(), pieces);
  for (const iovec& piece : pieces) {
    if (narrows_to.has_value()) {
      narrow(*narrows_to, {static_cast<const float*>(piece.iov_base), piece.iov_len / sizeof(float)}, to);
    } else {
      std::memcpy(to, piece.iov_base, piece.iov_len);
    }
    to += narrows_to.has_value() ? piece.iov_len / 2 : piece.iov_len;
  }
}

// From the total to the program's results, which have float32 in place of 16 bits.
void give(const PendingTotal& total, const Leaves& results) {
  if (!total.narrow.has_value()) {
    return copy(one_leaf(total.memory.get(), total.bytes), 0, results, 0, total.bytes);
  }
  std::vector<iovec> pieces;
  results.slice(0, results.bytes(), pieces);
  const std::byte* from = total.memory.get();
  for (const iovec& piece : pieces) {
    auto* const data = static_cast<std::byte*>(piece.iov_base);
    std::memcpy(data + piece.iov_len / 2, from, piece.iov_len / 2);
    widen_in_place(*total.narrow, {data, piece.iov_len});
    from += piece.iov_len / 2;
  }
}

// A round with a contribution in memory of ours, and a total there.
struct Start {
  RoundRequest request;
  std::optional<DType> narrows_to;  // the 16-bit floats that the contribution has in place of float32
  PendingTotal total;
  size_t output_bytes = 0;                                  // of the total: what is received into it
  std::function<Status(std::span<std::byte> rest)> finish;  // what is written behind it, after the round
  Leaves ticket;                                            // the program's
};

Result<Start> make_sum(HostStartSite& site, int64_t run, int32_t device, const ffi::RemainingArgs& args,
                       const ffi::RemainingRets& rets, Communicator& communicator) {
  Result<StartCall> call = read_start(site, run, device, args, rets);
  if (!call.ok()) return call.status();
  RoundRequest& request = call->request;
  if (site.wire_dtype.has_value() && request.spec.dtype != DType::kF32) {
    return Status(Code::kInternal, site.label + ": another dtype on the wire is for float32");
  }
  const size_t bytes = request.inputs.bytes() / (site.wire_dtype.has_value() ? 2 : 1);
  request.spec.dtype = site.wire_dtype.value_or(request.spec.dtype);
  const PendingTotal total{communicator.block_pool().allocate(bytes), bytes, site.wire_dtype};
  return Start{std::move(request), site.wire_dtype, total, bytes, nullptr, call->ticket};
}

Bytes bytes_of(const Leaves& leaves) {
  Bytes bytes(leaves.bytes());
  copy(leaves, 0, one_leaf(bytes.data(), bytes.size()), 0, bytes.size());
  return bytes;
}

Result<Start> make_state(HostStartSite& site, int64_t run, int32_t device, const ffi::RemainingArgs& args,
                         const ffi::RemainingRets& rets, Communicator& communicator) {
  Result<StateStart> start = make_state_start(site, run, device, args, communicator.state_models());
  if (!start.ok()) return start.status();
  Result<Leaves> ticket = ticket_of(site, rets);
  if (!ticket.ok()) return ticket.status();
  RoundRequest& request = start->call.request;
  request.priority = site.priority;
  start->call.begin(bytes_of(start->call.step_operands), request);
  const bool narrows = std::exchange(request.narrows, false);
  const size_t bytes = start->output_bytes + start->step_result_bytes;
  const PendingTotal total{communicator.block_pool().allocate(bytes), bytes, std::nullopt};
  return Start{std::move(request),
               narrows ? site.wire_dtype : std::nullopt,
               total,
               start->output_bytes,
               std::move(start->call.finish),
               *ticket};
}

// The contribution: the program's operands are still to be copied there.
std::shared_ptr<std::byte> prepare(Start& start, Communicator& communicator) {
  RoundRequest& request = start.request;
  const size_t bytes = request.inputs.bytes() / (start.narrows_to.has_value() ? 2 : 1);
  std::shared_ptr<std::byte> contribution = communicator.block_pool().allocate(bytes);
  const Ticket ticket = communicator.pending_rounds().add(request.description, start.total);
  copy(one_leaf(ticket), 0, start.ticket, 0, sizeof(Ticket));
  request.inputs = one_leaf(contribution.get(), bytes);
  request.inputs_owner = contribution;
  const std::span total(start.total.memory.get(), start.total.bytes);
  request.outputs = start.output_bytes > 0 ? one_leaf(total.data(), start.output_bytes) : Leaves();
  request.done = [memory = start.total.memory, rest = total.subspan(start.output_bytes),
                  finish = std::move(start.finish), ticket,
                  &pending = communicator.pending_rounds()](const Status& status) {
    pending.end(ticket, status.ok() && finish != nullptr ? finish(rest) : status);
  };
  return contribution;
}

ffi::Future start_on_host(HostStartSite* site, ffi::RunId run, int32_t device, ffi::Dictionary, ffi::RemainingArgs args,
                          ffi::RemainingRets rets) {
  Result<std::shared_ptr<Communicator>> communicator = communicator_for(*site);
  if (!communicator.ok()) return failed(communicator.status());
  if (const Status failure = (*communicator)->failure(); !failure.ok()) return failed(failure);
  const auto make = uses_state(site->kind) ? make_state : make_sum;
  Result<Start> start = make(*site, run.run_id, device, args, rets, **communicator);
  if (!start.ok()) return failed(start.status());
  const Leaves operands = start->request.inputs;
  std::byte* const contribution = prepare(*start, **communicator).get();
  ffi::Promise promise;
  ffi::Future future(promise);
  // Not here: meanwhile XLA's thread computes.
  (*communicator)
      ->call_back([promise = std::move(promise), operands, narrows_to = start->narrows_to, contribution,
                   request = std::move(start->request), communicator = *communicator]() mutable {
        contribute(operands, contribution, narrows_to);
        communicator->start_round(std::move(request));
        promise.SetAvailable();
      });
  return future;
}

ffi::Future finish_on_host(HostDoneSite* site, ffi::Dictionary, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Result<std::shared_ptr<Communicator>> communicator = communicator_for(*site);
  if (!communicator.ok()) return failed(communicator.status());
  Result<DoneCall> call = read_done(*site, args, rets);
  if (!call.ok()) return failed(call.status());
  Ticket ticket;
  copy(call->ticket, 0, one_leaf(ticket), 0, sizeof(Ticket));
  if (site->carries) {
    if (call->results.bytes() < sizeof(Ticket))
      return failed({Code::kInternal, site->label + ": no room for a ticket"});
    copy(one_leaf(ticket), 0, call->results, 0, sizeof(Ticket));
    ffi::Promise carried;
    ffi::Future future(carried);
    carried.SetAvailable();
    return future;
  }
  const auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  const auto taken = [promise, results = call->results](const Status& end, const PendingTotal& total) {
    if (!end.ok()) return promise->SetError(to_error(end));
    give(total, results);
    promise->SetAvailable();
  };
  const Status status = (*communicator)->pending_rounds().take(ticket, call->results.bytes(), taken);
  if (!status.ok()) return failed({status.code(), site->label + ": " + status.message()});
  return future;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kInstantiateStart, instantiate_start<HostStartSite>, bind_instantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kInstantiateDone, instantiate_done<HostDoneSite>, bind_instantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kStartOnHost, start_on_host,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<HostStartSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attrs()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kFinishOnHost, finish_on_host,
                              ffi::Ffi::Bind().Ctx<ffi::State<HostDoneSite>>().Attrs().RemainingArgs().RemainingRets());

}  // namespace

Result<StartCall> read_start(StartSite& site, int64_t run, int32_t device, const ffi::RemainingArgs& args,
                             const ffi::RemainingRets& rets) {
  Result<RoundRequest> request = make_request(site, run, device, args);
  if (!request.ok()) return request.status();
  request->priority = site.priority;
  Result<Leaves> ticket = ticket_of(site, rets);
  if (!ticket.ok()) return ticket.status();
  return StartCall{std::move(*request), *std::move(ticket)};
}

Result<DoneCall> read_done(const CallSite& site, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
  Leaves operands;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto operand = args.get<ffi::AnyBuffer>(i);
    if (operand.has_value()) operands.append(operand->untyped_data(), operand->size_bytes());
  }
  if (operands.bytes() < sizeof(Ticket)) return Status(Code::kInternal, site.label + ": no ticket");
  return DoneCall{operands, leaves_of(rets)};
}

FfiTarget start_target() {
  static XLA_FFI_TypeInfo type_info = ffi::MakeTypeInfo<HostStartSite>();
  return {reinterpret_cast<void*>(&kInstantiateStart), reinterpret_cast<void*>(&kStartOnHost), &HostStartSite::id,
          &type_info};
}

FfiTarget done_target() {
  static XLA_FFI_TypeInfo type_info = ffi::MakeTypeInfo<HostDoneSite>();
  return {reinterpret_cast<void*>(&kInstantiateDone), reinterpret_cast<void*>(&kFinishOnHost), &HostDoneSite::id,
          &type_info};
}

}  // namespace jaxhetero
