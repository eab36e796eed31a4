#include "xla_ffi/ffi/cuda_handler.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/of_process.h"
#include "xla_ffi/cuda/driver.h"
#include "xla_ffi/cuda/lane.h"
#include "xla_ffi/ffi/call_site.h"
#include "xla_ffi/ffi/pending_handler.h"
#include "xla_ffi/ffi/state_call.h"
#include "xla_ffi/sum/reduce.h"

namespace jaxhetero {
namespace {

namespace ffi = xla::ffi;
using std::chrono::milliseconds;

struct CudaCallSite : CallSite {
  static ffi::TypeId id;
};
ffi::TypeId CudaCallSite::id = {};

struct CudaStartSite : StartSite {
  static ffi::TypeId id;
};
ffi::TypeId CudaStartSite::id = {};

struct CudaDoneSite : DoneSite {
  static ffi::TypeId id;
};
ffi::TypeId CudaDoneSite::id = {};

using Driver = std::shared_ptr<const CudaDriver>;
using Lane = std::shared_ptr<CudaLane>;

// The lanes of this process, by device; see set_current_communicator() for why there is such a thing.
struct Lanes {
  std::mutex mutex;
  CudaOptions options;  // guarded by mutex, as is all below
  Driver driver;
  std::map<int32_t, Lane> by_device;
};

Lanes& lanes() { return of_process<Lanes>(); }

// The caller holds the mutex.
Result<Driver> open_driver() {
  if (lanes().driver != nullptr) return lanes().driver;
  Result<Driver> opened = CudaDriver::open(lanes().options.driver_path);
  if (opened.ok()) lanes().driver = *opened;
  return opened;
}

Result<Driver> driver() {
  const std::lock_guard lock(lanes().mutex);
  return open_driver();
}

// As XLA does, on the device's primary context. The caller holds the mutex.
Result<Lane> make_lane(int32_t device, const std::shared_ptr<Communicator>& communicator) {
  const Result<Driver> opened = open_driver();
  if (!opened.ok()) return opened.status();
  const Driver& driver = opened.value();
  CudaContext context = nullptr;
  const Status status = driver->check(driver->primary_context(&context, device), "taking a context");
  if (!status.ok()) return status;
  CudaLaneConfig config;
  config.rank = lanes().options.rank;
  config.pinned_bytes = lanes().options.pinned_bytes;
  config.timeout = lanes().options.timeout;
  Result<std::unique_ptr<CudaLane>> made = CudaLane::create(driver, context, communicator, config);
  if (!made.ok()) return made.status();
  return Lane(std::move(*made));
}

// The first round makes the lanes of all devices: taking pinned memory may wait for every GPU of the process. Were one
// of them waiting for a flag by then, and another worker's GPUs the other way round, both would wait for ever.
Result<Lane> lane_of(int32_t device, const std::shared_ptr<Communicator>& communicator) {
  const std::lock_guard lock(lanes().mutex);
  if (const auto found = lanes().by_device.find(device); found != lanes().by_device.end()) return found->second;
  std::map<int32_t, Lane> made = lanes().by_device;
  std::vector<int32_t> missing{device};
  if (made.empty()) missing.insert(missing.end(), lanes().options.devices.begin(), lanes().options.devices.end());
  for (const int32_t number : missing) {
    if (made.contains(number)) continue;
    Result<Lane> lane = make_lane(number, communicator);
    if (!lane.ok())
      return Status(lane.status().code(), "device " + std::to_string(number) + ": " + lane.status().message());
    made.emplace(number, std::move(*lane));
  }
  lanes().by_device.swap(made);
  return lanes().by_device.at(device);
}

struct Call {
  RoundRequest request;
  CudaAside aside;
};

Result<Call> make_call(CudaCallSite& site, int64_t run, int32_t device, const ffi::RemainingArgs& args,
                       const ffi::RemainingRets& rets, Communicator& communicator) {
  if (!uses_state(site.kind)) {
    Result<RoundRequest> request = make_request(site, run, device, args, rets);
    if (!request.ok()) return request.status();
    return Call{std::move(*request), {}};
  }
  Result<StateCall> call = make_state_call(site, run, device, args, rets, communicator.state_models());
  if (!call.ok()) return call.status();
  return Call{
      std::move(call->request),
      {std::move(call->step_operands), std::move(call->step_results), std::move(call->begin), std::move(call->finish)}};
}

Result<Lane> reduce(CudaCallSite& site, int64_t run, int32_t device, CudaStream stream, const ffi::RemainingArgs& args,
                    const ffi::RemainingRets& rets) {
  const Result<std::shared_ptr<Communicator>> communicator = communicator_for(site);
  if (!communicator.ok()) return communicator.status();
  Result<Call> call = make_call(site, run, device, args, rets, *communicator.value());
  if (!call.ok()) return call.status();
  RoundRequest& request = call->request;
  if (request.narrows) return Status(Code::kInternal, "what a GPU sends is converted there");
  const Leaves operands = std::exchange(request.inputs, Leaves());
  const Leaves results = std::exchange(request.outputs, Leaves());
  Result<Lane> lane = lane_of(device, communicator.value());
  if (!lane.ok()) return lane.status();
  Status status = (*lane)->reduce(stream, std::move(request), operands, results, std::move(call->aside));
  if (!status.ok()) return status;
  return lane;
}

Result<Lane> start(CudaStartSite& site, int64_t run, int32_t device, CudaStream stream, const ffi::RemainingArgs& args,
                   const ffi::RemainingRets& rets) {
  const Result<std::shared_ptr<Communicator>> communicator = communicator_for(site);
  if (!communicator.ok()) return communicator.status();
  Result<StartCall> call = read_start(site, run, device, args, rets);
  if (!call.ok()) return call.status();
  const Leaves operands = std::exchange(call->request.inputs, Leaves());
  Result<Lane> lane = lane_of(device, communicator.value());
  if (!lane.ok()) return lane.status();
  if (Status status = (*lane)->start(stream, std::move(call->request), operands, call->ticket); !status.ok()) {
    return status;
  }
  return lane;
}

Result<Lane> finish(CudaDoneSite& site, int32_t device, CudaStream stream, const ffi::RemainingArgs& args,
                    const ffi::RemainingRets& rets) {
  const Result<std::shared_ptr<Communicator>> communicator = communicator_for(site);
  if (!communicator.ok()) return communicator.status();
  Result<DoneCall> call = read_done(site, args, rets);
  if (!call.ok()) return call.status();
  Result<Lane> lane = lane_of(device, communicator.value());
  if (!lane.ok()) return lane.status();
  Hash hash;
  hash.add("done");
  hash.add(site.label);
  if (Status status = (*lane)->finish(stream, hash.value(), site.label, call->ticket, call->results); !status.ok()) {
    return status;
  }
  return lane;
}

ffi::Error error_of(const Result<Lane>& lane) { return lane.ok() ? ffi::Error::Success() : to_error(lane.status()); }

ffi::Error start_on_gpu(CudaStartSite* site, ffi::RunId run, int32_t device, CudaStream stream, ffi::Dictionary,
                        ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return error_of(start(*site, run.run_id, device, stream, args, rets));
}

ffi::Error finish_on_gpu(CudaDoneSite* site, int32_t device, CudaStream stream, ffi::Dictionary,
                         ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return error_of(finish(*site, device, stream, args, rets));
}

// XLA waits for this call to return, and XLA's stream for the results. Of what another device of this worker calls for,
// nothing is to be done here: XLA adds up what the devices have, and waits for that one there.
ffi::Error execute_on_gpu(CudaCallSite* site, ffi::RunId run, int32_t device, CudaStream stream, ffi::Dictionary,
                          ffi::RemainingArgs args, ffi::RemainingRets rets) {
  if (is_made_elsewhere(*site, device)) {
    const Status status = cuda_failure();
    return status.ok() ? ffi::Error::Success() : to_error(status);
  }
  return error_of(reduce(*site, run.run_id, device, stream, args, rets));
}

// --- On this host, through the stand-in. XLA's CPU client runs a program's calls in any order, which one stream would
// take away, so each round gets a stream of its own.

class StandInStreams {
 public:
  Result<CudaStream> take() {
    const std::lock_guard lock(mutex_);
    CudaStream stream = nullptr;
    if (!idle_.empty()) {
      stream = idle_.back();
      idle_.pop_back();
      return stream;
    }
    const Result<Driver> opened = driver();
    if (!opened.ok()) return opened.status();
    const CudaDriver& driver = *opened.value();
    CudaContext context = nullptr;
    Status status = driver.check(driver.primary_context(&context, 0), "taking a context");
    if (!status.ok()) return status;
    const CudaContextScope scope(driver, context);
    status = driver.check(driver.stream_create(&stream, kCudaStreamNonBlocking, 0), "creating a stream");
    if (!status.ok()) return status;
    return stream;
  }
  void give_back(CudaStream stream) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(stream);
  }

 private:
  std::mutex mutex_;
  std::vector<CudaStream> idle_;  // guarded by mutex_
};

StandInStreams& stand_in_streams() {
  static auto& instance = *new StandInStreams;  // the driver's threads may outlive the process's other statics
  return instance;
}

// What the stand-in's stream does once it is past the flag.
struct Continuation {
  ffi::Promise promise;
  Lane lane;
  CudaStream stream;

  static void run(void* data) {
    const std::unique_ptr<Continuation> self(static_cast<Continuation*>(data));
    // XLA may go on with the program on this very thread, so the stream is free only after that.
    if (const Status why = self->lane->failure(); why.ok()) {
      self->promise.SetAvailable();
    } else {
      self->promise.SetError(to_error(why));
    }
    stand_in_streams().give_back(self->stream);
  }
};

// Has `enqueue` give a stream of its own what the call asks for.
template <typename Enqueue>
ffi::Future on_stand_in_stream(const Enqueue& enqueue) {
  const Result<CudaStream> stream = stand_in_streams().take();
  if (!stream.ok()) return failed(stream.status());
  Result<Lane> lane = enqueue(stream.value());
  if (!lane.ok()) {
    stand_in_streams().give_back(stream.value());
    return failed(lane.status());
  }
  ffi::Promise promise;
  ffi::Future future(promise);
  // It frees itself.
  auto* continuation = new Continuation{std::move(promise), *lane, stream.value()};
  const Driver opened = driver().value();
  CudaContext context = nullptr;
  opened->stream_context(stream.value(), &context);
  const CudaContextScope scope(*opened, context);
  if (opened->launch_host_function(stream.value(), &Continuation::run, continuation) != kCudaSuccess) {
    Continuation::run(continuation);
  }
  return future;
}

ffi::Future execute_on_stand_in(CudaCallSite* site, ffi::RunId run, int32_t device, ffi::Dictionary,
                                ffi::RemainingArgs args, ffi::RemainingRets rets) {
  if (is_made_elsewhere(*site, device)) {
    if (const Status status = cuda_failure(); !status.ok()) return failed(status);
    ffi::Promise promise;
    ffi::Future future(promise);
    promise.SetAvailable();
    return future;
  }
  return on_stand_in_stream([&](CudaStream stream) { return reduce(*site, run.run_id, device, stream, args, rets); });
}

ffi::Future start_on_stand_in(CudaStartSite* site, ffi::RunId run, int32_t device, ffi::Dictionary,
                              ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return on_stand_in_stream([&](CudaStream stream) { return start(*site, run.run_id, device, stream, args, rets); });
}

ffi::Future finish_on_stand_in(CudaDoneSite* site, int32_t device, ffi::Dictionary, ffi::RemainingArgs args,
                               ffi::RemainingRets rets) {
  return on_stand_in_stream([&](CudaStream stream) { return finish(*site, device, stream, args, rets); });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kInstantiateForCuda, instantiate<CudaCallSite>, bind_instantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kExecuteOnGpu, execute_on_gpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CudaCallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<CudaStream>>()
                                  .Attrs()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kExecuteOnStandIn, execute_on_stand_in,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CudaCallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attrs()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kInstantiateStartForCuda, instantiate_start<CudaStartSite>, bind_instantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kInstantiateDoneForCuda, instantiate_done<CudaDoneSite>, bind_instantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kStartOnGpu, start_on_gpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CudaStartSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<CudaStream>>()
                                  .Attrs()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kFinishOnGpu, finish_on_gpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CudaDoneSite>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<CudaStream>>()
                                  .Attrs()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kStartOnStandIn, start_on_stand_in,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CudaStartSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attrs()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kFinishOnStandIn, finish_on_stand_in,
    ffi::Ffi::Bind().Ctx<ffi::State<CudaDoneSite>>().Ctx<ffi::DeviceOrdinal>().Attrs().RemainingArgs().RemainingRets());

template <typename Site>
FfiTarget target(XLA_FFI_Handler* instantiate, XLA_FFI_Handler* execute) {
  static XLA_FFI_TypeInfo type_info = ffi::MakeTypeInfo<Site>();
  return {reinterpret_cast<void*>(instantiate), reinterpret_cast<void*>(execute), &Site::id, &type_info};
}

std::vector<Lane> all_lanes() {
  const std::lock_guard lock(lanes().mutex);
  std::vector<Lane> found;
  for (const auto& [device, lane] : lanes().by_device) {
    if (lane != nullptr) found.push_back(lane);
  }
  return found;
}

}  // namespace

FfiTarget cuda_all_reduce_target() { return target<CudaCallSite>(&kInstantiateForCuda, &kExecuteOnGpu); }
FfiTarget cuda_start_target() { return target<CudaStartSite>(&kInstantiateStartForCuda, &kStartOnGpu); }
FfiTarget cuda_done_target() { return target<CudaDoneSite>(&kInstantiateDoneForCuda, &kFinishOnGpu); }
FfiTarget stand_in_all_reduce_target() { return target<CudaCallSite>(&kInstantiateForCuda, &kExecuteOnStandIn); }
FfiTarget stand_in_start_target() { return target<CudaStartSite>(&kInstantiateStartForCuda, &kStartOnStandIn); }
FfiTarget stand_in_done_target() { return target<CudaDoneSite>(&kInstantiateDoneForCuda, &kFinishOnStandIn); }

void set_cuda_options(const CudaOptions& options) {
  const std::lock_guard lock(lanes().mutex);
  if (options.driver_path != lanes().options.driver_path) lanes().driver = nullptr;
  lanes().options = options;
}

Status cuda_failure() {
  for (const Lane& lane : all_lanes()) {
    if (Status status = lane->failure(); !status.ok()) return status;
  }
  return {};
}

bool drain_cuda_lanes(milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  return std::ranges::all_of(all_lanes(), [deadline](const Lane& lane) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - std::chrono::steady_clock::now());
    return lane->drain(std::max(left, milliseconds(0)));
  });
}

void clear_cuda_lanes() {
  std::map<int32_t, Lane> ended;
  const std::lock_guard lock(lanes().mutex);
  ended.swap(lanes().by_device);
}

}  // namespace jaxhetero
