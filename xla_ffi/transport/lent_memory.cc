#include "xla_ffi/transport/lent_memory.h"

#include <sys/mman.h>

#include <limits>
#include <new>
#include <utility>

namespace jaxhetero {
namespace {

// Address space: pages are allocated when they are touched. A payload that finds no room goes through the connection.
constexpr size_t kLentMemoryBytes = size_t{16} << 30;
constexpr size_t kPageBytes = 4096;
constexpr std::align_val_t kLine{64};
constexpr size_t kPlaceUnit = 8;  // the size of the largest element
static_assert(kLentMemoryBytes / kPlaceUnit <= std::numeric_limits<uint32_t>::max());

std::shared_ptr<std::byte> allocate_private(size_t bytes) {
  return {static_cast<std::byte*>(::operator new(bytes, kLine)),
          [](std::byte* memory) { ::operator delete(memory, kLine); }};
}

}  // namespace

Status LentMemory::share() {
  if (memory_.has_value()) return {};
  Result<SharedMemory> memory = SharedMemory::create(kLentMemoryBytes, SharedMemory::Use::kMakerWrites);
  if (!memory.ok()) return memory.status();
  memory_.emplace(std::move(*memory));
  return {};
}

Result<LongLived> LentMemory::keep_pages() {
  if (Status status = share(); !status.ok()) return status;
  keeps_pages_ = true;
  return LongLived{memory_->bytes(), shared_from_this()};
}

std::optional<SharedOffer> LentMemory::offer() const {
  if (!memory_.has_value()) return std::nullopt;
  return memory_->offer();
}

std::shared_ptr<std::byte> LentMemory::allocate(size_t bytes) {
  const size_t whole = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::optional<size_t> offset = find_room(whole);
  if (!offset.has_value()) return allocate_private(bytes);
  return {memory_->bytes().subspan(*offset).data(), [lent_memory = shared_from_this(), offset = *offset,
                                                     whole](std::byte*) { lent_memory->free(offset, whole); }};
}

std::optional<size_t> LentMemory::find_room(size_t bytes) {
  if (!memory_.has_value()) return std::nullopt;
  if (std::vector<size_t>& offsets = free_offsets_[bytes]; !offsets.empty()) {
    const size_t offset = offsets.back();
    offsets.pop_back();
    return offset;
  }
  if (bytes > kLentMemoryBytes - used_bytes_) return std::nullopt;
  return std::exchange(used_bytes_, used_bytes_ + bytes);
}

void LentMemory::free(size_t offset, size_t bytes) {
  free_offsets_[bytes].push_back(offset);
  if (!has_ended_ && !keeps_pages_) madvise(memory_->bytes().subspan(offset).data(), bytes, MADV_REMOVE);
}

std::optional<uint32_t> LentMemory::place_of(std::span<const std::byte> memory) const {
  if (!memory_.has_value()) return std::nullopt;
  const auto start = reinterpret_cast<uintptr_t>(memory_->bytes().data());
  const uintptr_t offset = reinterpret_cast<uintptr_t>(memory.data()) - start;  // wraps to a huge number before `start`
  if (offset >= used_bytes_ || memory.size() > used_bytes_ - offset || offset % kPlaceUnit != 0) return std::nullopt;
  return static_cast<uint32_t>(offset / kPlaceUnit);
}

Result<std::shared_ptr<const BorrowedMemory>> BorrowedMemory::open(const SharedOffer& offer) {
  Result<SharedMemory> memory = SharedMemory::open(offer, kLentMemoryBytes, SharedMemory::Use::kMakerWrites);
  if (!memory.ok()) return memory.status();
  return std::shared_ptr<const BorrowedMemory>(new BorrowedMemory(std::move(*memory)));
}

std::optional<std::span<const std::byte>> BorrowedMemory::at(uint32_t place, size_t bytes) const {
  const size_t offset = place * kPlaceUnit;
  if (offset > kLentMemoryBytes || bytes > kLentMemoryBytes - offset) return std::nullopt;
  return memory_.bytes().subspan(offset, bytes);
}

}  // namespace jaxhetero
