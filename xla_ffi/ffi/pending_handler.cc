#include "xla_ffi/ffi/pending_handler.h"

#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/ffi/call_site.h"
#include "xla_ffi/sum/convert.h"
#include "xla_ffi/sum/reduce.h"
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

struct HostDoneSite : CallSite {
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

struct Start {
  RoundRequest request;
  std::byte* contribution;  // the memory of its inputs
  Ticket ticket;
};

// The round, with memory of ours for its contribution and its total.
Start make_start(RoundRequest request, std::optional<DType> narrow, Communicator& communicator) {
  const size_t bytes = narrow.has_value() ? request.inputs.bytes() / 2 : request.inputs.bytes();
  const std::shared_ptr<std::byte> contribution = communicator.block_pool().allocate(bytes);
  const std::shared_ptr<std::byte> total = communicator.block_pool().allocate(bytes);
  const Ticket ticket = communicator.pending_rounds().add(request.description, {total, bytes, narrow});
  request.spec.dtype = narrow.value_or(request.spec.dtype);
  request.inputs = one_leaf(contribution.get(), bytes);
  request.inputs_owner = contribution;
  request.outputs = one_leaf(total.get(), bytes);
  request.done = [total, ticket, &pending = communicator.pending_rounds()](const Status& status) {
    pending.end(ticket, status);
  };
  return {std::move(request), contribution.get(), ticket};
}

ffi::Future start_on_host(HostStartSite* site, ffi::RunId run, int32_t device, ffi::Dictionary, ffi::RemainingArgs args,
                          ffi::RemainingRets rets) {
  Result<std::shared_ptr<Communicator>> communicator = communicator_for(*site);
  if (!communicator.ok()) return failed(communicator.status());
  if (const Status failure = (*communicator)->failure(); !failure.ok()) return failed(failure);
  Result<StartCall> call = read_start(*site, run.run_id, device, args, rets);
  if (!call.ok()) return failed(call.status());
  const Leaves operands = call->request.inputs;
  if (site->wire_dtype.has_value() && call->request.spec.dtype != DType::kF32) {
    return failed({Code::kInternal, site->label + ": another dtype on the wire is for float32"});
  }
  Start start = make_start(std::move(call->request), site->wire_dtype, **communicator);
  copy(one_leaf(start.ticket), 0, call->ticket, 0, sizeof(Ticket));
  ffi::Promise promise;
  ffi::Future future(promise);
  // Not here: meanwhile XLA's thread computes.
  (*communicator)
      ->call_back([promise = std::move(promise), operands, narrow = site->wire_dtype, to = start.contribution,
                   request = std::move(start.request), communicator = *communicator]() mutable {
        contribute(operands, to, narrow);
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
  const Leaves ticket = leaves_of(rets);
  if (ticket.bytes() != sizeof(Ticket)) return Status(Code::kInternal, site.label + ": no room for a ticket");
  return StartCall{std::move(*request), ticket};
}

Result<DoneCall> read_done(const CallSite& site, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
  const auto operand = args.get<ffi::AnyBuffer>(0);
  if (!operand.has_value() || operand->size_bytes() != sizeof(Ticket)) {
    return Status(Code::kInternal, site.label + ": no ticket");
  }
  return DoneCall{one_leaf(operand->untyped_data(), sizeof(Ticket)), leaves_of(rets)};
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
