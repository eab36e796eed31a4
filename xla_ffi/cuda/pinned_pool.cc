#include "xla_ffi/cuda/pinned_pool.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace jaxhetero {
namespace {
constexpr size_t kAlignment = 4096;
}  // namespace

Result<std::shared_ptr<PinnedPool>> PinnedPool::create(std::shared_ptr<const CudaDriver> driver, CudaContext context,
                                                       size_t bytes) {
  const CudaContextScope scope(*driver, context);
  void* memory = nullptr;
  const CudaResult result = driver->host_alloc(&memory, bytes, kCudaHostAllocPortable | kCudaHostAllocDeviceMap);
  Status status = driver->check(result, "taking " + std::to_string(bytes) + " bytes of pinned host memory");
  if (!status.ok()) return status;
  return std::make_shared<PinnedPool>(Private(), std::move(driver), context, static_cast<std::byte*>(memory), bytes);
}

PinnedPool::PinnedPool(Private, std::shared_ptr<const CudaDriver> driver, CudaContext context, std::byte* memory,
                       size_t bytes)
    : driver_(std::move(driver)), context_(context), memory_(memory), bytes_(bytes) {
  free_.emplace(0, bytes);
}

PinnedPool::~PinnedPool() {
  const CudaContextScope scope(*driver_, context_);
  driver_->host_free(memory_);
}

size_t PinnedPool::rounded(size_t bytes) {
  return std::max<size_t>(1, (bytes + kAlignment - 1) / kAlignment) * kAlignment;
}

std::shared_ptr<std::byte> PinnedPool::allocate(size_t bytes) {
  const size_t taken = rounded(bytes);
  const std::lock_guard lock(mutex_);
  const auto gap = std::ranges::find_if(free_, [taken](const auto& entry) { return entry.second >= taken; });
  if (gap == free_.end()) return nullptr;
  const auto [offset, gap_bytes] = *gap;
  free_.erase(gap);
  if (gap_bytes > taken) free_.emplace(offset + taken, gap_bytes - taken);
  used_bytes_ += taken;
  return {memory_ + offset, [pool = shared_from_this(), offset, taken](std::byte*) { pool->release(offset, taken); }};
}

void PinnedPool::release(size_t offset, size_t bytes) {
  const std::lock_guard lock(mutex_);
  used_bytes_ -= bytes;
  auto next = free_.upper_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

size_t PinnedPool::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

}  // namespace jaxhetero
