// What a worker contributed to an op's latest round, kept until nobody can need it again.
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
#include "xla_ffi/transport/lent_memory.h"

namespace jaxhetero {

// A copy of a bucket, made piece by piece. A worker that loses a reducer pushes from it what the others have to sum
// again, also in a round that is over here and not yet elsewhere: XLA's own buffers are gone by then, or hold the
// result where it takes the operands' place.
//
// A round's copy begins when its first total comes, which proves that every worker has finished the round before. So
// the size of the bucket is all the memory it takes. Reducers on this host read it in place.
class KeptContribution {
 public:
  explicit KeptContribution(std::shared_ptr<LentMemory> lent_memory) : lent_memory_(std::move(lent_memory)) {}

  // Forgets what it held. Takes memory when the bucket is larger than ever, so not in a steady round.
  void begin(uint64_t round, size_t bytes) {
    if (bytes > capacity_) {
      memory_ = lent_memory_->allocate(bytes);
      capacity_ = bytes;
    }
    held_ = Leaves();
    held_.append(memory_.get(), bytes);
    owner_.reset();
    round_ = round;
  }

  // Memory that stays as it is for as long as `owner` is held needs no copy.
  void hold(uint64_t round, const Leaves& leaves, std::shared_ptr<const void> owner) {
    held_ = leaves;
    owner_ = std::move(owner);
    round_ = round;
  }

  void copy(const Leaves& from, size_t offset, size_t bytes) {
    pieces_.clear();
    from.slice(offset, bytes, pieces_);
    for (const iovec& piece : pieces_) {
      std::memcpy(memory_.get() + offset, piece.iov_base, piece.iov_len);
      offset += piece.iov_len;
    }
  }

  // The same of leaves that are float32 where this is of `dtype`, which has 16 bits.
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
  // The memory that it takes.
  [[nodiscard]] size_t bytes() const { return std::max(capacity_, held_.bytes()); }

 private:
  std::shared_ptr<LentMemory> lent_memory_;
  std::shared_ptr<std::byte> memory_;
  size_t capacity_ = 0;
  Leaves held_;
  std::shared_ptr<const void> owner_;
  std::optional<uint64_t> round_;
  std::vector<iovec> pieces_;
};

}  // namespace jaxhetero
