// Memory of this process that others on its host may read in place, so that what goes to them need not be copied into
// a connection and out of it again: a frame then only says where its payload lies.
//
// Memory is freed when nobody needs it any more by the protocol: a contribution when every total of its round is here,
// a total when every worker has it. Where connections end earlier, see TcpContext::unread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/shared_memory.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

// One thread only.
class LentMemory : public std::enable_shared_from_this<LentMemory> {
 public:
  // From here on others may read what is allocated. Until then, and where that fails, it is memory like any other.
  Status share();
  // Where they find it, if it is shared.
  [[nodiscard]] std::optional<SharedOffer> offer() const;

  // Aligned to a line of a processor's cache; not set to anything.
  std::shared_ptr<std::byte> allocate(size_t bytes);
  // What a frame says of `memory`, if others may read it.
  [[nodiscard]] std::optional<uint32_t> place_of(std::span<const std::byte> memory) const;

  // What is freed from here on stays as it is: the job ends early, and a peer may be about to read it.
  void end() { has_ended_ = true; }

 private:
  std::optional<size_t> find_room(size_t bytes);
  void free(size_t begin, size_t bytes);

  std::optional<SharedMemory> memory_;
  size_t used_bytes_ = 0;                              // from the front; the rest was never allocated
  std::map<size_t, std::vector<size_t>> free_begins_;  // in what was, by the bytes that are free there
  bool has_ended_ = false;
};

// Another process's lent_memory, to be read.
class BorrowedMemory {
 public:
  static Result<std::shared_ptr<const BorrowedMemory>> open(const SharedOffer& offer);

  // Nothing where no payload can be.
  [[nodiscard]] std::optional<std::span<const std::byte>> at(uint32_t place, size_t bytes) const;

 private:
  explicit BorrowedMemory(SharedMemory memory) : memory_(std::move(memory)) {}

  SharedMemory memory_;
};

}  // namespace jaxhetero
