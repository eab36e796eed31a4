// Lent memory: memory of this process that other processes of its host can read in place. A payload in it is not copied
// through a connection; its frame carries only its place.
//
// The protocol says when such memory may be freed: a contribution once every total of its round is here, a total once
// every worker has it. For connections that end earlier, see TcpContext::unread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/shared_memory.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

// The allocator of lent memory. Only on the thread of one event loop; never blocks.
class LentMemory : public std::enable_shared_from_this<LentMemory> {
 public:
  // From now on, others can read what is allocated. Before that, and if this fails, allocate() returns private memory.
  Status share();
  // Likewise, and what is freed stays where it is: devices know it by its pages.
  Result<LongLived> keep_pages();
  // How others find the memory; none if it is not shared.
  [[nodiscard]] std::optional<SharedOffer> offer() const;

  // Aligned to a cache line; uninitialised. Drop the last copy of the pointer on the loop's thread.
  std::shared_ptr<std::byte> allocate(size_t bytes);
  // The place that a frame carries for `memory`; none if others cannot read it.
  [[nodiscard]] std::optional<uint32_t> place_of(std::span<const std::byte> memory) const;

  // From now on, freed memory keeps its content: the job ends early, and a peer may still read it.
  void end() { has_ended_ = true; }

 private:
  std::optional<size_t> find_room(size_t bytes);
  void free(size_t offset, size_t bytes);

  std::optional<SharedMemory> memory_;
  size_t used_bytes_ = 0;                               // the front of the memory; the rest was never allocated
  std::map<size_t, std::vector<size_t>> free_offsets_;  // the offsets of freed ranges, keyed by their size in bytes
  bool keeps_pages_ = false;
  bool has_ended_ = false;
};

// The lent memory of another process, mapped for reading.
class BorrowedMemory {
 public:
  static Result<std::shared_ptr<const BorrowedMemory>> open(const SharedOffer& offer);

  // The payload at `place`; none if it would reach outside the memory.
  [[nodiscard]] std::optional<std::span<const std::byte>> at(uint32_t place, size_t bytes) const;

 private:
  explicit BorrowedMemory(SharedMemory memory) : memory_(std::move(memory)) {}

  SharedMemory memory_;
};

}  // namespace jaxhetero
