// Codes the chunks that a worker pushes, and decodes the totals that come back, from and into the leaves of a bucket.
// One thread.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {

// When a worker codes what it pushes to reducers on other hosts, and so is answered codes.
enum class Compress : uint8_t { kWhereFaster, kAlways, kNever };

class ChunkCoder {
 public:
  struct Code {
    std::span<const std::byte> bytes;
    std::shared_ptr<const void> owner;
  };

  // The code of `bytes` bytes of `leaves`; nothing where it would not be shorter, or the type has none.
  std::optional<Code> encode(DType dtype, const Leaves& leaves, size_t offset, size_t bytes);
  // Likewise of float32, if its elements are such numbers. `first`: the place in the bucket of the first element of
  // `leaves`, which need not be the bucket's own; those end before `leaf_ends`.
  std::optional<Code> encode_numbers(Numbers numbers, uint64_t first, std::span<const uint64_t> leaf_ends,
                                     const Leaves& leaves, size_t offset, size_t bytes);
  // Fills `pieces`. False if it is no code of so many elements.
  bool decode(DType dtype, std::span<const std::byte> code, std::span<const iovec> pieces);

 private:
  std::span<const std::byte> gather(const Leaves& leaves, size_t offset, size_t bytes);

  std::vector<iovec> pieces_;
  Bytes elements_;  // of a chunk that lies in several leaves, side by side
};

}  // namespace jaxhetero
