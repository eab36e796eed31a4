// Pinned host memory, the only kind that a GPU's copy engines reach on their own. Taken once, because taking and
// freeing it waits for the whole GPU, which may itself be waiting for us.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "xla_ffi/base/status.h"
#include "xla_ffi/cuda/driver.h"

namespace jaxhetero {

class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
  struct Private {};

 public:
  static Result<std::shared_ptr<PinnedPool>> create(std::shared_ptr<const CudaDriver> driver, CudaContext context,
                                                    size_t bytes);
  PinnedPool(Private, std::shared_ptr<const CudaDriver> driver, CudaContext context, std::byte* memory, size_t bytes);
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // A block that comes back when its last owner, on whatever thread, lets go of it; null while there is no room.
  std::shared_ptr<std::byte> allocate(size_t bytes);
  [[nodiscard]] std::byte* memory() { return memory_; }
  [[nodiscard]] size_t capacity_bytes() const { return bytes_; }
  [[nodiscard]] size_t used_bytes() const;
  // What a block of that many bytes takes from the pool.
  static size_t rounded(size_t bytes);

 private:
  void release(size_t offset, size_t bytes);

  const std::shared_ptr<const CudaDriver> driver_;
  const CudaContext context_;
  std::byte* const memory_;
  const size_t bytes_;

  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes, no two adjacent; guarded by mutex_, as is all below
  size_t used_bytes_ = 0;
};

}  // namespace jaxhetero
