#include "xla_ffi/worker/chunk_coder.h"

#include <cstring>

#include "xla_ffi/codec/float_code.h"

namespace jaxhetero {
namespace {

// Of smaller chunks, a code would save less than it takes.
constexpr size_t kLeastBytes = 1024;

}  // namespace

std::optional<ChunkCoder::Code> ChunkCoder::encode(DType dtype, const Leaves& leaves, size_t offset, size_t bytes) {
  if (bytes < kLeastBytes || !has_code(dtype)) return std::nullopt;
  pieces_.clear();
  leaves.slice(offset, bytes, pieces_);
  std::span<const std::byte> elements = bytes_of(pieces_.front());
  if (pieces_.size() > 1) {
    elements_.clear();
    for (const iovec& piece : pieces_) {
      elements_.insert(elements_.end(), bytes_of(piece).begin(), bytes_of(piece).end());
    }
    elements = elements_;
  }
  const size_t most = most_coded_bytes(dtype, bytes);
  const std::shared_ptr<std::byte[]> memory = std::make_unique_for_overwrite<std::byte[]>(most);
  const size_t length = jaxhetero::encode(dtype, elements, {memory.get(), most});
  if (length == 0) return std::nullopt;
  return Code{{memory.get(), length}, memory};
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
