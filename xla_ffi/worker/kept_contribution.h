// A worker's contribution to an op's latest round, kept until no reducer can need it again. Op owns it. One thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/sum/convert.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/sum/stream_copy.h"
#include "xla_ffi/transport/lent_memory.h"

namespace jaxhetero {

// A copy of a bucket, made chunk by chunk. When a reducer is lost, the worker pushes the copy to the reducers that sum
// its shards again, also for a round that is complete here and not on every worker: XLA's own buffers are gone by then,
// or hold the result in the operands' place.
//
// A round's copy starts when its first total comes, which proves that every worker has completed the round before. So
// one bucket's memory is enough. Reducers on this host read it in place.
class KeptContribution {
 public:
  explicit KeptContribution(std::shared_ptr<LentMemory> lent_memory) : lent_memory_(std::move(lent_memory)) {}

  // Drops the round that it held. Allocates only where the bucket is larger than every one before.
  void start_copy(uint64_t round, size_t bytes) {
    if (bytes > capacity_bytes_) {
      memory_ = lent_memory_->allocate(bytes);
      capacity_bytes_ = bytes;
    }
    held_ = Leaves();
    held_.append(memory_.get(), bytes);
    owner_.reset();
    round_ = round;
  }

  // In place of a copy: `owner` keeps the memory of `leaves` unchanged.
  void hold(uint64_t round, const Leaves& leaves, std::shared_ptr<const void> owner) {
    held_ = leaves;
    owner_ = std::move(owner);
    round_ = round;
  }

  // `is_read_soon`: chunks are pushed from the copy.
  void copy(const Leaves& from, size_t offset, size_t bytes, bool is_read_soon) {
    pieces_.clear();
    from.slice(offset, bytes, pieces_);
    for (const iovec& piece : pieces_) {
      const auto* data = static_cast<const std::byte*>(piece.iov_base);
      if (is_read_soon) {
        std::memcpy(memory_.get() + offset, data, piece.iov_len);
      } else {
        stream_copy(data, memory_.get() + offset, piece.iov_len);
      }
      offset += piece.iov_len;
    }
  }

  // Likewise from leaves of float32, narrowed to `dtype`, which has 16 bits. Offset and bytes count the narrowed ones.
  void copy_narrowed(DType dtype, const Leaves& from, size_t offset, size_t bytes) {
    pieces_.clear();
    from.slice(2 * offset, 2 * bytes, pieces_);
    for (const iovec& piece : pieces_) {
      narrow(dtype, {static_cast<const float*>(piece.iov_base), piece.iov_len / sizeof(float)}, memory_.get() + offset);
      offset += piece.iov_len / 2;
    }
  }

  void clear() { *this = KeptContribution(lent_memory_); }

  [[nodiscard]] bool holds(uint64_t round) const { return round_ == round; }

  [[nodiscard]] const Leaves& leaves() const { return held_; }
  // The memory that it takes, or holds for its owner.
  [[nodiscard]] size_t bytes() const { return std::max(capacity_bytes_, held_.bytes()); }

 private:
  std::shared_ptr<LentMemory> lent_memory_;
  std::shared_ptr<std::byte> memory_;
  size_t capacity_bytes_ = 0;
  Leaves held_;
  std::shared_ptr<const void> owner_;
  std::optional<uint64_t> round_;
  std::vector<iovec> pieces_;
};

}  // namespace jaxhetero
