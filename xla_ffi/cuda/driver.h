// The CUDA driver, opened at run time. Building needs nothing of CUDA, and nothing of it is loaded before a program
// reduces arrays of a GPU.
//
// The declarations follow the CUDA Driver API (docs.nvidia.com/cuda/cuda-driver-api: stream management, event
// management, memory management, stream memory operations), version 12; handles are opaque pointers there as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "xla_ffi/base/status.h"

namespace jaxhetero {

using CudaResult = int;  // CUresult; 0 is success
using CudaContext = struct CudaContextOpaque*;
using CudaStream = struct CudaStreamOpaque*;
using CudaEvent = struct CudaEventOpaque*;
using DevicePointer = uint64_t;  // CUdeviceptr
using CudaHostFunction = void (*)(void*);

inline constexpr CudaResult kCudaSuccess = 0;
inline constexpr CudaResult kCudaNotReady = 600;
inline constexpr unsigned kCudaStreamNonBlocking = 1;   // a stream that is not ordered with the legacy default stream
inline constexpr unsigned kCudaEventDisableTiming = 2;  // cheaper to record
inline constexpr unsigned kCudaHostAllocPortable = 1;   // pinned for every context
inline constexpr unsigned kCudaHostAllocDeviceMap = 2;  // GPUs can read and write it as memory
inline constexpr unsigned kCudaWaitValueGreaterEqual = 0;  // cyclic: int32(*address - value) >= 0
inline constexpr unsigned kCudaWriteValueDefault = 0;      // the write is visible after all that the stream did before

// The functions that this project calls. All but the last may be called from any thread that has made the stream's
// context current. None waits for the GPU, except those that take or free memory.
struct CudaDriver {
  // `path` as for dlopen. The library stays loaded for good: a driver does not survive being unloaded.
  static Result<std::shared_ptr<const CudaDriver>> open(const std::string& path);

  CudaResult (*init)(unsigned flags);
  CudaResult (*get_error_string)(CudaResult result, const char** text);
  CudaResult (*primary_context)(CudaContext* context, int device);
  CudaResult (*context_push)(CudaContext context);
  CudaResult (*context_pop)(CudaContext* context);
  CudaResult (*priority_range)(int* least, int* greatest);  // the priorities of streams in the current context
  CudaResult (*stream_context)(CudaStream stream, CudaContext* context);
  CudaResult (*stream_create)(CudaStream* stream, unsigned flags, int priority);
  CudaResult (*stream_destroy)(CudaStream stream);
  CudaResult (*stream_query)(CudaStream stream);
  CudaResult (*stream_wait_event)(CudaStream stream, CudaEvent event, unsigned flags);
  CudaResult (*stream_wait_value)(CudaStream stream, DevicePointer address, uint32_t value, unsigned flags);
  CudaResult (*stream_write_value)(CudaStream stream, DevicePointer address, uint32_t value, unsigned flags);
  CudaResult (*event_create)(CudaEvent* event, unsigned flags);
  CudaResult (*event_record)(CudaEvent event, CudaStream stream);
  CudaResult (*event_destroy)(CudaEvent event);
  CudaResult (*host_alloc)(void** memory, size_t bytes, unsigned flags);
  CudaResult (*host_free)(void* memory);
  CudaResult (*host_device_pointer)(DevicePointer* pointer, void* memory, unsigned flags);
  CudaResult (*copy_to_host)(void* to, DevicePointer from, size_t bytes, CudaStream stream);
  CudaResult (*copy_to_device)(DevicePointer to, const void* from, size_t bytes, CudaStream stream);
  CudaResult (*fill)(DevicePointer to, unsigned char value, size_t bytes, CudaStream stream);
  CudaResult (*launch_host_function)(CudaStream stream, CudaHostFunction function, void* data);

  // Ok, or an error that starts with `what`, the name of the action.
  [[nodiscard]] Status check(CudaResult result, std::string_view what) const;
};

// Makes a context current in its scope, and then the one that was before.
class CudaContextScope {
 public:
  CudaContextScope(const CudaDriver& driver, CudaContext context)
      : driver_(driver), pushed_(driver.context_push(context) == kCudaSuccess) {}
  ~CudaContextScope() {
    CudaContext context = nullptr;
    if (pushed_) driver_.context_pop(&context);
  }
  CudaContextScope(const CudaContextScope&) = delete;
  CudaContextScope& operator=(const CudaContextScope&) = delete;

 private:
  const CudaDriver& driver_;
  bool pushed_;
};

}  // namespace jaxhetero
