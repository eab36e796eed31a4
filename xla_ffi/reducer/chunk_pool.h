#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "xla_ffi/transport/lent_memory.h"

namespace jaxhetero {

// Memory for chunks, kept for the next round. Blocks hold the pool, not the other way round: they may outlive the
// state machine in a connection's queue. One thread only.
class ChunkPool : public std::enable_shared_from_this<ChunkPool> {
 public:
  explicit ChunkPool(std::shared_ptr<LentMemory> lent_memory) : lent_memory_(std::move(lent_memory)) {}

  std::shared_ptr<std::byte> take(size_t least_bytes) {
    const size_t bytes = std::bit_ceil(std::max(least_bytes, kLeastBytes));
    std::vector<std::shared_ptr<std::byte>>& idle = idle_[bytes];
    std::shared_ptr<std::byte> memory;
    if (idle.empty()) {
      memory = lent_memory_->allocate(bytes);
    } else {
      memory = std::move(idle.back());
      idle.pop_back();
      idle_bytes_ -= bytes;
    }
    std::byte* const begin = memory.get();
    return {begin, [pool = shared_from_this(), bytes, memory = std::move(memory)](std::byte*) mutable {
              pool->put_back(std::move(memory), bytes);
            }};
  }

 private:
  static constexpr size_t kLeastBytes = 1024;
  static constexpr size_t kMaxIdleBytes = size_t{32} << 20;

  void put_back(std::shared_ptr<std::byte> memory, size_t bytes) {
    if (idle_bytes_ + bytes > kMaxIdleBytes) return;
    idle_[bytes].push_back(std::move(memory));
    idle_bytes_ += bytes;
  }

  std::shared_ptr<LentMemory> lent_memory_;
  std::map<size_t, std::vector<std::shared_ptr<std::byte>>> idle_;  // keyed by their bytes, a power of two
  size_t idle_bytes_ = 0;
};

}  // namespace jaxhetero
