#include "xla_ffi/transport/lent_memory.h"

#include <sys/mman.h>

#include <limits>
#include <new>

namespace jaxhetero {
namespace {

// Of addresses: memory it takes where it is touched. What finds no room goes through the connection.
constexpr size_t kLentMemoryBytes = size_t{16} << 30;
constexpr size_t kPageBytes = 4096;
constexpr std::align_val_t kLine{64};
constexpr size_t kPlaceUnit = 8;  // the largest element has as many bytes
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

std::optional<SharedOffer> LentMemory::offer() const {
  if (!memory_.has_value()) return std::nullopt;
  return memory_->offer();
}

std::shared_ptr<std::byte> LentMemory::allocate(size_t bytes) {
  const size_t whole = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::optional<size_t> begin = find_room(whole);
  if (!begin.has_value()) return allocate_private(bytes);
  return {memory_->bytes().subspan(*begin).data(),
          [lent_memory = shared_from_this(), begin = *begin, whole](std::byte*) { lent_memory->free(begin, whole); }};
}

std::optional<size_t> LentMemory::find_room(size_t bytes) {
  if (!memory_.has_value()) return std::nullopt;
  if (std::vector<size_t>& begins = free_begins_[bytes]; !begins.empty()) {
    const size_t begin = begins.back();
    begins.pop_back();
    return begin;
  }
  if (bytes > kLentMemoryBytes - used_bytes_) return std::nullopt;
  return std::exchange(used_bytes_, used_bytes_ + bytes);
}

void LentMemory::free(size_t begin, size_t bytes) {
  free_begins_[bytes].push_back(begin);
  if (!has_ended_) madvise(memory_->bytes().subspan(begin).data(), bytes, MADV_REMOVE);
}

std::optional<uint32_t> LentMemory::place_of(std::span<const std::byte> memory) const {
  if (!memory_.has_value()) return std::nullopt;
  const auto lent_memory = reinterpret_cast<uintptr_t>(memory_->bytes().data());
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory.data()) - lent_memory;  // huge for what lies before it
  if (begin >= used_bytes_ || memory.size() > used_bytes_ - begin || begin % kPlaceUnit != 0) return std::nullopt;
  return static_cast<uint32_t>(begin / kPlaceUnit);
}

Result<std::shared_ptr<const BorrowedMemory>> BorrowedMemory::open(const SharedOffer& offer) {
  Result<SharedMemory> memory = SharedMemory::open(offer, kLentMemoryBytes, SharedMemory::Use::kMakerWrites);
  if (!memory.ok()) return memory.status();
  return std::shared_ptr<const BorrowedMemory>(new BorrowedMemory(std::move(*memory)));
}

std::optional<std::span<const std::byte>> BorrowedMemory::at(uint32_t place, size_t bytes) const {
  const size_t begin = place * kPlaceUnit;
  if (begin > kLentMemoryBytes || bytes > kLentMemoryBytes - begin) return std::nullopt;
  return memory_.bytes().subspan(begin, bytes);
}

}  // namespace jaxhetero
