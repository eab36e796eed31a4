#include "xla_ffi/worker/chunk_coder.h"

#include <cstring>

#include "xla_ffi/codec/float_code.h"
#include "xla_ffi/codec/number_code.h"

namespace jaxhetero {
namespace {

// Of smaller chunks, a code would save less than it takes.
constexpr size_t kLeastBytes = 1024;

// What `encode` writes to memory of so many bytes; nothing if it writes nothing.
template <typename Encode>
std::optional<ChunkCoder::Code> coded(size_t most_bytes, const Encode& encode) {
  const std::shared_ptr<std::byte[]> memory = std::make_unique_for_overwrite<std::byte[]>(most_bytes);
  const size_t length = encode(std::span(memory.get(), most_bytes));
  if (length == 0) return std::nullopt;
  return ChunkCoder::Code{{memory.get(), length}, memory};
}

}  // namespace

std::optional<ChunkCoder::Code> ChunkCoder::encode(DType dtype, const Leaves& leaves, size_t offset, size_t bytes) {
  if (bytes < kLeastBytes || !has_code(dtype)) return std::nullopt;
  return coded(most_coded_bytes(dtype, bytes),
               [&](std::span<std::byte> out) { return jaxhetero::encode(dtype, gather(leaves, offset, bytes), out); });
}

std::optional<ChunkCoder::Code> ChunkCoder::encode_numbers(Numbers numbers, uint64_t first,
                                                           std::span<const uint64_t> leaf_ends, const Leaves& leaves,
                                                           size_t offset, size_t bytes) {
  if (bytes == 0) return std::nullopt;
  return coded(bytes, [&](std::span<std::byte> out) {
    const auto* const floats = reinterpret_cast<const float*>(gather(leaves, offset, bytes).data());
    return jaxhetero::encode_numbers(numbers, {floats, bytes / sizeof(float)}, first + offset / sizeof(float),
                                     leaf_ends, out);
  });
}

// Side by side.
std::span<const std::byte> ChunkCoder::gather(const Leaves& leaves, size_t offset, size_t bytes) {
  pieces_.clear();
  leaves.slice(offset, bytes, pieces_);
  if (pieces_.size() == 1) return bytes_of(pieces_.front());
  elements_.clear();
  for (const iovec& piece : pieces_) {
    elements_.insert(elements_.end(), bytes_of(piece).begin(), bytes_of(piece).end());
  }
  return elements_;
}

bool ChunkCoder::decode(DType dtype, std::span<const std::byte> code, std::span<const iovec> pieces) {
  if (pieces.size() == 1) {
    return jaxhetero::decode(dtype, code, {static_cast<std::byte*>(pieces[0].iov_base), pieces[0].iov_len});
  }
  elements_.resize(total_bytes(pieces));
  if (!jaxhetero::decode(dtype, code, elements_)) return false;
  const std::byte* from = elements_.data();
  for (const iovec& piece : pieces) {
    std::memcpy(piece.iov_base, from, piece.iov_len);
    from += piece.iov_len;
  }
  return true;
}

}  // namespace jaxhetero
