#include "handlers.h"

#include <utility>

#include "call_site.h"
#include "xla/ffi/api/ffi.h"

namespace jaxhetero {
namespace {

namespace ffi = xla::ffi;

struct HostCallSite : CallSite {
  static ffi::TypeId id;
};
ffi::TypeId HostCallSite::id = {};

// Copies every pointer out of the call frame, hands the round to the communicator and returns at once.
ffi::Future execute(HostCallSite* site, ffi::RunId run, int32_t device, ffi::Dictionary, ffi::RemainingArgs args,
                    ffi::RemainingRets rets) {
  Result<std::shared_ptr<Communicator>> communicator = communicator_for(*site, run.run_id);
  if (!communicator.ok()) return failed(communicator.status());
  Result<RoundRequest> request = make_request(*site, device, args, rets);
  if (!request.ok()) return failed(request.status());

  ffi::Promise promise;
  ffi::Future future(promise);
  request->done = [promise = std::move(promise)](const Status& status) mutable {
    if (status.ok()) {
      promise.SetAvailable();
    } else {
      promise.SetError(to_error(status));
    }
  };
  (*communicator)->start_round(std::move(*request));
  return future;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kInstantiateForHost, instantiate<HostCallSite>, bind_instantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kExecuteOnHost, execute,
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
