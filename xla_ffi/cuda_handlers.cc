#include "cuda_handlers.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "buffers.h"
#include "call_site.h"
#include "cuda_driver.h"
#include "cuda_lane.h"
#include "xla/ffi/api/ffi.h"

namespace jaxhetero {
namespace {

namespace ffi = xla::ffi;
using std::chrono::milliseconds;

struct CudaCallSite : CallSite {
  static ffi::TypeId id;
};
ffi::TypeId CudaCallSite::id = {};

using Driver = std::shared_ptr<const CudaDriver>;
using Lane = std::shared_ptr<CudaLane>;

// The lanes of this process, by device; see set_current_communicator() for why there is such a thing.
struct Lanes {
  std::mutex mutex;
  CudaOptions options;  // guarded by mutex, as is all below
  Driver driver;
  std::map<int32_t, Lane> by_device;
};

Lanes& lanes() {
  static Lanes instance;
  return instance;
}

Result<Driver> driver() {
  const std::lock_guard lock(lanes().mutex);
  if (lanes().driver != nullptr) return lanes().driver;
  Result<Driver> opened = CudaDriver::open(lanes().options.driver_path);
  if (opened.ok()) lanes().driver = *opened;
  return opened;
}

// The first round of a device makes its lane, while nothing of ours waits on its streams.
Result<Lane> lane_of(int32_t device, CudaStream stream, const std::shared_ptr<Communicator>& communicator) {
  Result<Driver> opened = driver();
  if (!opened.ok()) return opened.status();
  const std::lock_guard lock(lanes().mutex);
  Lane& lane = lanes().by_device[device];
  if (lane != nullptr) return lane;
  CudaLaneConfig config;
  config.rank = lanes().options.rank;
  config.pinned_bytes = lanes().options.pinned_bytes;
  config.timeout = lanes().options.timeout;
  Result<std::unique_ptr<CudaLane>> made = CudaLane::create(*opened, stream, communicator, config);
  if (!made.ok())
    return Status(made.status().code(), "device " + std::to_string(device) + ": " + made.status().message());
  lane = std::move(*made);
  return lane;
}

Lane existing_lane(int32_t device) {
  const std::lock_guard lock(lanes().mutex);
  const auto entry = lanes().by_device.find(device);
  return entry == lanes().by_device.end() ? nullptr : entry->second;
}

bool same_memory(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
  for (size_t i = 0; i < args.size(); ++i) {
    auto result = rets.get<ffi::AnyBuffer>(i);
    if (!result.has_value() || args.get<ffi::AnyBuffer>(i)->untyped_data() != (*result)->untyped_data()) return false;
  }
  return true;
}

Result<Leaves> bucket_of(std::string_view label, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
  if (!same_memory(args, rets)) {
    return Status(Code::kInternal, std::string(label) + ": XLA has not reduced in place, though it was told to");
  }
  Leaves bucket;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto leaf = args.get<ffi::AnyBuffer>(i);
    bucket.append(leaf->untyped_data(), leaf->size_bytes());
  }
  return bucket;
}

Status start(CudaCallSite& site, int64_t run, int32_t device, CudaStream stream, const ffi::RemainingArgs& args,
             const ffi::RemainingRets& rets) {
  const Result<std::shared_ptr<Communicator>> communicator = communicator_for(site, run);
  if (!communicator.ok()) return communicator.status();
  const Result<Leaves> bucket = bucket_of(site.label, args, rets);
  if (!bucket.ok()) return bucket.status();
  Result<RoundRequest> request = make_request(site, device, args, rets);
  if (!request.ok()) return request.status();
  request->inputs = request->outputs = Leaves();
  Result<Lane> lane = lane_of(device, stream, communicator.value());
  if (!lane.ok()) return lane.status();
  return (*lane)->start(stream, std::move(*request), bucket.value());
}

// --- On a GPU. XLA waits for a handler here, and the stream waits for the rest.

ffi::Error start_on_gpu(CudaCallSite* site, ffi::RunId run, int32_t device, CudaStream stream, ffi::Dictionary,
                        ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const Status status = start(*site, run.run_id, device, stream, args, rets);
  return status.ok() ? ffi::Error::Success() : to_error(status);
}

ffi::Error done_on_gpu(int32_t device, CudaStream stream, std::string_view label, ffi::RemainingArgs args,
                       ffi::RemainingRets rets) {
  const Result<Leaves> bucket = bucket_of(label, args, rets);
  if (!bucket.ok()) return to_error(bucket.status());
  const Lane lane = existing_lane(device);
  if (lane == nullptr) return to_error({Code::kNotInitialized, std::string(label) + " ended after shutdown()"});
  const Status status = lane->done(stream, bucket.value(), std::string(label));
  return status.ok() ? ffi::Error::Success() : to_error(status);
}

// --- On this host, through the stand-in. XLA's CPU client runs a program's calls in any order, which one stream would
// take away, so each round gets a stream of its own.

class StandInStreams {
 public:
  // A stream for the round on this memory.
  Result<CudaStream> take(const void* memory) {
    const std::lock_guard lock(mutex_);
    CudaStream stream = nullptr;
    if (!idle_.empty()) {
      stream = idle_.back();
      idle_.pop_back();
    } else {
      const Result<Driver> opened = driver();
      if (!opened.ok()) return opened.status();
      CudaContext context = nullptr;
      Status status = (*opened.value()).check(opened.value()->primary_context(&context, 0), "taking a context");
      if (!status.ok()) return status;
      const CudaContextScope scope(*opened.value(), context);
      status = (*opened.value()).check(opened.value()->stream_create(&stream, kCudaStreamNonBlocking, 0), "a stream");
      if (!status.ok()) return status;
    }
    if (memory != nullptr) in_use_[memory] = stream;
    return stream;
  }
  CudaStream of(const void* memory) {
    const std::lock_guard lock(mutex_);
    const auto entry = in_use_.find(memory);
    if (entry == in_use_.end()) return nullptr;
    const CudaStream stream = entry->second;
    in_use_.erase(entry);
    return stream;
  }
  void give_back(CudaStream stream) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(stream);
  }

 private:
  std::mutex mutex_;
  std::vector<CudaStream> idle_;  // guarded by mutex_, as is all below
  std::unordered_map<const void*, CudaStream> in_use_;
};

StandInStreams& stand_in_streams() {
  static auto& instance = *new StandInStreams;  // the driver's threads may outlive the process's other statics
  return instance;
}

const void* first_memory(const ffi::RemainingArgs& args) {
  for (size_t i = 0; i < args.size(); ++i) {
    const auto leaf = args.get<ffi::AnyBuffer>(i);
    if (leaf.has_value() && leaf->size_bytes() > 0) return leaf->untyped_data();
  }
  return nullptr;
}

ffi::Error start_on_stand_in(CudaCallSite* site, ffi::RunId run, int32_t device, ffi::Dictionary,
                             ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const void* memory = first_memory(args);
  const Result<CudaStream> stream = stand_in_streams().take(memory);
  if (!stream.ok()) return to_error(stream.status());
  const Status status = start(*site, run.run_id, device, stream.value(), args, rets);
  if (memory == nullptr) stand_in_streams().give_back(stream.value());
  return status.ok() ? ffi::Error::Success() : to_error(status);
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

ffi::Future done_on_stand_in(int32_t device, std::string_view label, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const Result<Leaves> bucket = bucket_of(label, args, rets);
  if (!bucket.ok()) return failed(bucket.status());
  Lane lane = existing_lane(device);
  if (lane == nullptr) return failed({Code::kNotInitialized, std::string(label) + " ended after shutdown()"});
  ffi::Promise promise;
  ffi::Future future(promise);
  const CudaStream stream = stand_in_streams().of(first_memory(args));
  const Status status = lane->done(stream, bucket.value(), std::string(label));
  if (stream == nullptr || !status.ok()) {
    if (status.ok()) {
      promise.SetAvailable();
    } else {
      promise.SetError(to_error(status));
    }
    return future;
  }
  auto continuation = std::make_unique<Continuation>(Continuation{std::move(promise), std::move(lane), stream});
  const Driver opened = driver().value();
  CudaContext context = nullptr;
  opened->stream_context(stream, &context);
  const CudaContextScope scope(*opened, context);
  if (opened->launch_host_function(stream, &Continuation::run, continuation.get()) == kCudaSuccess) {
    static_cast<void>(continuation.release());
  } else {
    Continuation::run(continuation.release());
  }
  return future;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kInstantiateForCuda, instantiate<CudaCallSite>, bind_instantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kStartOnGpu, start_on_gpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CudaCallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<CudaStream>>()
                                  .Attrs()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kDoneOnGpu, done_on_gpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<CudaStream>>()
                                  .Attr<std::string_view>("label")
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kStartOnStandIn, start_on_stand_in,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CudaCallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attrs()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kDoneOnStandIn, done_on_stand_in,
    ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Attr<std::string_view>("label").RemainingArgs().RemainingRets());

FfiTarget start_target(XLA_FFI_Handler* execute) {
  static XLA_FFI_TypeInfo type_info = ffi::MakeTypeInfo<CudaCallSite>();
  return {reinterpret_cast<void*>(&kInstantiateForCuda), reinterpret_cast<void*>(execute), &CudaCallSite::id,
          &type_info};
}

FfiTarget done_target(XLA_FFI_Handler* execute) {
  return {nullptr, reinterpret_cast<void*>(execute), nullptr, nullptr};
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

FfiTarget cuda_start_target() { return start_target(&kStartOnGpu); }
FfiTarget cuda_done_target() { return done_target(&kDoneOnGpu); }
FfiTarget stand_in_start_target() { return start_target(&kStartOnStandIn); }
FfiTarget stand_in_done_target() { return done_target(&kDoneOnStandIn); }

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
