// The custom calls: XLA's buffers in and out of the communicator. These headers know nothing of XLA; their sources, and
// what they share in call_site, are the only files that do.
#pragma once

#include <memory>

#include "xla_ffi/worker/communicator.h"

namespace jaxhetero {

// Addresses for jax.ffi: the handlers of the two stages of a custom call, and the type of its state; null what it
// lacks.
struct FfiTarget {
  void* instantiate;
  void* execute;
  void* state_type_id;
  void* state_type_info;
};
// "jaxhetero_all_reduce", for the memory of this host.
FfiTarget all_reduce_target();

// The communicator that the handlers of this process use; none before the start and after the shutdown. A compiled
// program may come from a cache on disk and cannot hold a pointer, so this is the one thing in the process that it can
// find.
void set_current_communicator(std::shared_ptr<Communicator> communicator);

}  // namespace jaxhetero
