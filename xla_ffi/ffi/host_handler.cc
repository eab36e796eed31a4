#include "xla_ffi/ffi/host_handler.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/ffi/call_site.h"
#include "xla_ffi/ffi/state_call.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {
namespace {

namespace ffi = xla::ffi;

struct HostCallSite : CallSite {
  static ffi::TypeId id;
};
ffi::TypeId HostCallSite::id = {};

// XLA's results of this size are mostly in memory that nobody has touched yet: glibc's malloc returns it to the system
// when they are freed.
constexpr size_t kLargeBytes = size_t{4} << 20;

// With pages of 4 KiB, page faults were a third of all that a job took of the processors at 1 Gbit/s
// (notebook/processor.md). NumPy does this as well.
void prefer_huge_pages(const ffi::RemainingRets& results) {
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value() || (*result)->size_bytes() < kLargeBytes) continue;
    auto* const data = static_cast<std::byte*>((*result)->untyped_data());
    const size_t to_page = -reinterpret_cast<uintptr_t>(data) % page_bytes;
    madvise(data + to_page, (*result)->size_bytes() - to_page, MADV_HUGEPAGE);  // a hint
  }
}

Bytes read_all(const Leaves& from) {
  std::vector<iovec> pieces;
  from.slice(0, from.bytes(), pieces);
  Bytes all;
  for (const iovec& piece : pieces) {
    const auto* const data = static_cast<const std::byte*>(piece.iov_base);
    all.insert(all.end(), data, data + piece.iov_len);
  }
  return all;
}

void write_all(const Bytes& all, const Leaves& to) {
  std::vector<iovec> pieces;
  to.slice(0, to.bytes(), pieces);
  const std::byte* from = all.data();
  for (const iovec& piece : pieces) {
    std::memcpy(piece.iov_base, from, piece.iov_len);
    from += piece.iov_len;
  }
}

void set(ffi::Promise& promise, const Status& status) {
  if (status.ok()) {
    promise.SetAvailable();
  } else {
    promise.SetError(to_error(status));
  }
}

// XLA goes on with the program of this device where the promise is set, and may wait there for the other devices.
ffi::Future wait_for_caller(HostCallSite& site, int64_t run, std::shared_ptr<Communicator> communicator) {
  const auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  site.outcomes->wait(run, [promise, communicator = std::move(communicator)](const Status& end) {
    communicator->call_back([promise, end] { set(*promise, end); });
  });
  return future;
}

ffi::Future run_state_call(HostCallSite& site, int64_t run, int32_t device, const ffi::RemainingArgs& args,
                           const ffi::RemainingRets& rets, Communicator& communicator) {
  Result<StateCall> call = make_state_call(site, run, device, args, rets, communicator.state_models());
  if (!call.ok()) {
    if (site.outcomes != nullptr) site.outcomes->end(run, call.status());
    return failed(call.status());
  }
  call->begin(read_all(call->step_operands), call->request);
  ffi::Promise promise;
  ffi::Future future(promise);
  // XLA keeps the program, and the call site with it, until the future is set.
  call->request.done = [promise = std::move(promise), finish = std::move(call->finish), &site, run,
                        to = std::move(call->step_results)](const Status& status) mutable {
    Bytes results(to.bytes());
    const Status end = status.ok() ? finish(results) : status;
    if (end.ok()) write_all(results, to);
    if (site.outcomes != nullptr) site.outcomes->end(run, end);
    set(promise, end);
  };
  communicator.start_round(std::move(call->request));
  return future;
}

// Copies every pointer out of the call frame, hands the round to the communicator and returns at once.
ffi::Future execute_on_host(HostCallSite* site, ffi::RunId run, int32_t device, ffi::Dictionary,
                            ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Result<std::shared_ptr<Communicator>> communicator = communicator_for(*site);
  if (!communicator.ok()) return failed(communicator.status());
  if (is_made_elsewhere(*site, device)) return wait_for_caller(*site, run.run_id, *std::move(communicator));
  if (uses_state(site->kind)) return run_state_call(*site, run.run_id, device, args, rets, **communicator);
  Result<RoundRequest> request = make_request(*site, run.run_id, device, args, rets);
  if (!request.ok()) return failed(request.status());
  prefer_huge_pages(rets);

  ffi::Promise promise;
  ffi::Future future(promise);
  request->done = [promise = std::move(promise)](const Status& status) mutable { set(promise, status); };
  (*communicator)->start_round(std::move(*request));
  return future;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kInstantiateForHost, instantiate<HostCallSite>, bind_instantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kExecuteOnHost, execute_on_host,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<HostCallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attrs()
                                  .RemainingArgs()
                                  .RemainingRets());

}  // namespace

FfiTarget all_reduce_target() {
  static XLA_FFI_TypeInfo type_info = ffi::MakeTypeInfo<HostCallSite>();
  return {reinterpret_cast<void*>(&kInstantiateForHost), reinterpret_cast<void*>(&kExecuteOnHost), &HostCallSite::id,
          &type_info};
}

void set_current_communicator(std::shared_ptr<Communicator> communicator) {
  register_communicator(std::move(communicator));
}

}  // namespace jaxhetero
