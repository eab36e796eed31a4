// The custom call for arrays of a GPU. XLA is told to run it on a stream of its own (`lower_on_stream` in
// jaxhetero/_collectives/primitive.py), so that the stream which computes goes on while this one waits.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/ffi/host_handler.h"

namespace jaxhetero {

struct CudaOptions {
  std::string driver_path = "libcuda.so.1";
  std::vector<int32_t> devices;  // the devices of this process
  uint32_t rank = 0;
  size_t pinned_bytes = 0;  // the pinned memory of each GPU
  std::chrono::milliseconds timeout{0};
};

// "jaxhetero_all_reduce", "jaxhetero_start" and "jaxhetero_done", for the memory of GPUs.
FfiTarget cuda_all_reduce_target();
FfiTarget cuda_start_target();
FfiTarget cuda_done_target();
// For the memory of this host, which then goes through the lanes as if it were a GPU's: for tests, with a stand-in for
// the driver.
FfiTarget stand_in_all_reduce_target();
FfiTarget stand_in_start_target();
FfiTarget stand_in_done_target();

// For the lanes to come; the process opens its driver, and every GPU gets its lane, in the first round of any.
void set_cuda_options(const CudaOptions& options);
// Why rounds on GPUs cannot run any more, once something has failed.
Status cuda_failure();
// Whether all rounds that were started on GPUs ended within `patience`.
bool drain_cuda_lanes(std::chrono::milliseconds patience);
void clear_cuda_lanes();

}  // namespace jaxhetero
