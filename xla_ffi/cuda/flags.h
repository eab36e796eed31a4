// Numbers in pinned memory that both the CPU and the streams of a GPU read and write.
//
// Each op has a flag: the number of its rounds that are over. The program's stream waits until the flag reaches a
// round's number, and the lane's back stream sets it. One more number counts the copies to the host that are done.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

#include "xla_ffi/base/status.h"
#include "xla_ffi/cuda/driver.h"
#include "xla_ffi/cuda/pinned_pool.h"

namespace jaxhetero {

// The number that an op's flag reaches with one of its rounds.
struct Flag {
  size_t slot = 0;
  uint32_t round_count = 0;
};

class CudaFlags {
 public:
  static constexpr size_t kCopyCounter = 0;  // the slot of the copy counter; the others are the flags of ops

  // Takes pinned memory, which waits for the GPU: not while a stream waits for a flag.
  static Result<std::unique_ptr<CudaFlags>> create(const std::shared_ptr<const CudaDriver>& driver,
                                                   CudaContext context);

  // For the op's next round. An error where a GPU has more ops than flags. The caller holds a lock.
  Result<Flag> next(uint64_t op);
  // Sets every flag to its op's latest round, so that no stream waits any more. The caller holds the same lock.
  void set_all();

  // On any thread. Numbers run over, so one has reached another if it is less than half of all numbers ahead; the GPU
  // compares them likewise.
  [[nodiscard]] uint32_t load(size_t slot) const { return number(slot).load(std::memory_order_acquire); }
  [[nodiscard]] static bool has_reached(uint32_t number, uint32_t wanted) {
    return static_cast<int32_t>(number - wanted) >= 0;
  }
  [[nodiscard]] bool is_set(const Flag& flag) const { return has_reached(load(flag.slot), flag.round_count); }

  // Commands for a stream; the context is current. The write comes after all that the stream was given before.
  [[nodiscard]] CudaResult wait(CudaStream stream, const Flag& flag) const;
  [[nodiscard]] CudaResult write(CudaStream stream, size_t slot, uint32_t value) const;

 private:
  CudaFlags(std::shared_ptr<const CudaDriver> driver, std::shared_ptr<PinnedPool> memory, DevicePointer on_device)
      : driver_(std::move(driver)), memory_(std::move(memory)), on_device_(on_device) {}

  [[nodiscard]] std::atomic_ref<uint32_t> number(size_t slot) const;
  [[nodiscard]] DevicePointer address(size_t slot) const { return on_device_ + slot * sizeof(uint32_t); }

  const std::shared_ptr<const CudaDriver> driver_;
  const std::shared_ptr<PinnedPool> memory_;
  const DevicePointer on_device_;             // the device's address of memory_
  std::unordered_map<uint64_t, Flag> by_op_;  // the flag of the op's latest round
};

}  // namespace jaxhetero
