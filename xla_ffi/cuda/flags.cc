#include "xla_ffi/cuda/flags.h"

#include <cstring>
#include <string>

namespace jaxhetero {
namespace {

constexpr size_t kSlots = 16384;
constexpr size_t kMostOps = kSlots - 1;  // one slot counts copies

}  // namespace

Result<std::unique_ptr<CudaFlags>> CudaFlags::create(const std::shared_ptr<const CudaDriver>& driver,
                                                     CudaContext context) {
  Result<std::shared_ptr<PinnedPool>> memory = PinnedPool::create(driver, context, kSlots * sizeof(uint32_t));
  if (!memory.ok()) return memory.status();
  std::memset((*memory)->memory(), 0, kSlots * sizeof(uint32_t));
  const CudaContextScope scope(*driver, context);
  DevicePointer on_device = 0;
  const CudaResult result = driver->host_device_pointer(&on_device, (*memory)->memory(), 0);
  if (Status status = driver->check(result, "mapping pinned memory"); !status.ok()) return status;
  return std::unique_ptr<CudaFlags>(new CudaFlags(driver, std::move(*memory), on_device));
}

std::atomic_ref<uint32_t> CudaFlags::number(size_t slot) const {
  return std::atomic_ref(reinterpret_cast<uint32_t*>(memory_->memory())[slot]);
}

Result<Flag> CudaFlags::next(uint64_t op) {
  const auto [entry, is_new] = by_op_.try_emplace(op);
  if (is_new) {
    if (by_op_.size() > kMostOps) {
      by_op_.erase(entry);
      return Status(Code::kInternal, "more than " + std::to_string(kMostOps) + " ops on one GPU");
    }
    entry->second.slot = kCopyCounter + by_op_.size();
  }
  ++entry->second.round_count;
  return entry->second;
}

void CudaFlags::set_all() {
  for (const auto& [op, flag] : by_op_) number(flag.slot).store(flag.round_count, std::memory_order_release);
}

CudaResult CudaFlags::wait(CudaStream stream, const Flag& flag) const {
  return driver_->stream_wait_value(stream, address(flag.slot), flag.round_count, kCudaWaitValueGreaterEqual);
}

CudaResult CudaFlags::write(CudaStream stream, size_t slot, uint32_t value) const {
  return driver_->stream_write_value(stream, address(slot), value, kCudaWriteValueDefault);
}

}  // namespace jaxhetero
