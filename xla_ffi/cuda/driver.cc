#include "xla_ffi/cuda/driver.h"

#include <dlfcn.h>

namespace jaxhetero {
namespace {

// Looks a function up by the name that the library exports, which names its version as well.
class Symbols {
 public:
  explicit Symbols(void* library) : library_(library) {}

  template <typename Function>
  void find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    if (function == nullptr && missing_.empty()) missing_ = name;
  }
  [[nodiscard]] const std::string& missing() const { return missing_; }

 private:
  void* library_;
  std::string missing_;
};

}  // namespace

Result<std::shared_ptr<const CudaDriver>> CudaDriver::open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    const char* reason = dlerror();
    return Status(Code::kInvalidArgument, "cannot open the CUDA driver " + path + ": " +
                                              (reason == nullptr ? "no reason given" : reason) +
                                              "; arrays of a GPU need NVIDIA's driver on this host");
  }
  auto driver = std::make_shared<CudaDriver>();
  Symbols symbols(library);
  symbols.find("cuInit", driver->init);
  symbols.find("cuGetErrorString", driver->get_error_string);
  symbols.find("cuDevicePrimaryCtxRetain", driver->primary_context);
  symbols.find("cuCtxPushCurrent_v2", driver->context_push);
  symbols.find("cuCtxPopCurrent_v2", driver->context_pop);
  symbols.find("cuCtxGetStreamPriorityRange", driver->priority_range);
  symbols.find("cuStreamGetCtx", driver->stream_context);
  symbols.find("cuStreamCreateWithPriority", driver->stream_create);
  symbols.find("cuStreamDestroy_v2", driver->stream_destroy);
  symbols.find("cuStreamQuery", driver->stream_query);
  symbols.find("cuStreamWaitEvent", driver->stream_wait_event);
  symbols.find("cuStreamWaitValue32_v2", driver->stream_wait_value);
  symbols.find("cuStreamWriteValue32_v2", driver->stream_write_value);
  symbols.find("cuEventCreate", driver->event_create);
  symbols.find("cuEventRecord", driver->event_record);
  symbols.find("cuEventDestroy_v2", driver->event_destroy);
  symbols.find("cuMemHostAlloc", driver->host_alloc);
  symbols.find("cuMemFreeHost", driver->host_free);
  symbols.find("cuMemHostGetDevicePointer_v2", driver->host_device_pointer);
  symbols.find("cuMemcpyDtoHAsync_v2", driver->copy_to_host);
  symbols.find("cuMemcpyHtoDAsync_v2", driver->copy_to_device);
  symbols.find("cuMemsetD8Async", driver->fill);
  symbols.find("cuLaunchHostFunc", driver->launch_host_function);
  if (!symbols.missing().empty()) {
    return Status(Code::kInvalidArgument, "the CUDA driver " + path + " has no " + symbols.missing() +
                                              "; jaxhetero needs a driver of CUDA 12 or later");
  }
  if (Status status = driver->check(driver->init(0), "cuInit"); !status.ok()) return status;
  return std::shared_ptr<const CudaDriver>(std::move(driver));
}

Status CudaDriver::check(CudaResult result, std::string_view what) const {
  if (result == kCudaSuccess) return {};
  const char* text = nullptr;
  if (get_error_string(result, &text) != kCudaSuccess || text == nullptr) text = "unknown error";
  return {Code::kInternal, std::string(what) + ": CUDA error " + std::to_string(result) + ", " + text};
}

}  // namespace jaxhetero
