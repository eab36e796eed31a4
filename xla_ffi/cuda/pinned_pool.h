// Pinned host memory, the only kind that a GPU's copy engines reach on their own. It is taken once, at the start:
// taking and freeing it waits for the whole GPU, which may itself be waiting for a flag that we set. Any thread.
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

  // A block, which its last owner gives back on any thread; null while there is no room. Never waits.
  std::shared_ptr<std::byte> allocate(size_t bytes);
  [[nodiscard]] std::byte* memory() { return memory_; }
  [[nodiscard]] size_t capacity_bytes() const { return bytes_; }
  [[nodiscard]] size_t used_bytes() const;
  // The bytes that a block of so many takes from the pool.
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
