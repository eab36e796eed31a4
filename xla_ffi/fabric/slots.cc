#include "xla_ffi/fabric/slots.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace jaxhetero {

Result<std::shared_ptr<SlotBlock>> SlotBlock::create() {
  constexpr size_t kBytes = kSlotsPerSession * kSlotBytes;
  void* address = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return Status(Code::kInternal, std::string("mmap: ") + std::strerror(errno));
  madvise(address, kBytes, MADV_DONTFORK);  // a fork would move registered pages away from the device
  return std::shared_ptr<SlotBlock>(new SlotBlock({static_cast<std::byte*>(address), kBytes}));
}

SlotBlock::SlotBlock(std::span<std::byte> bytes) : bytes_(bytes), slots_(kSlotsPerSession) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].bytes = bytes_.subspan(i * kSlotBytes, kSlotBytes);
    slots_[i].block = this;
  }
}

SlotBlock::~SlotBlock() { munmap(bytes_.data(), bytes_.size()); }

void SlotBlock::set_descriptor(void* descriptor) {
  for (FabricSlot& slot : slots_) slot.descriptor = descriptor;
}

}  // namespace jaxhetero
