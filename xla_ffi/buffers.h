// Views over memory that somebody else owns: nothing here copies or allocates payload.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace jaxhetero {

// The memory of a bucket: the leaves one after the other, seen as one range of bytes that is cut anywhere.
class Leaves {
 public:
  void append(void* data, size_t bytes) {
    leaves_.push_back({static_cast<std::byte*>(data), total_bytes_});
    total_bytes_ += bytes;
  }

  [[nodiscard]] size_t bytes() const { return total_bytes_; }
  [[nodiscard]] size_t leaf_count() const { return leaves_.size(); }

  // Appends the pieces of memory that make up [offset, offset + bytes) to `pieces`.
  void slice(size_t offset, size_t bytes, std::vector<iovec>& pieces) const {
    // The last leaf that begins at or before `offset`; empty leaves before it contribute nothing.
    auto leaf = std::ranges::upper_bound(leaves_, offset, {}, &Leaf::begin);
    for (size_t index = static_cast<size_t>(leaf - leaves_.begin()); bytes > 0 && index > 0; ++index) {
      const Leaf& current = leaves_[index - 1];
      const size_t end = index < leaves_.size() ? leaves_[index].begin : total_bytes_;
      const size_t part = std::min(bytes, end - offset);
      if (part == 0) continue;
      pieces.push_back({current.data + (offset - current.begin), part});
      offset += part;
      bytes -= part;
    }
  }

 private:
  struct Leaf {
    std::byte* data;
    size_t begin;
  };
  std::vector<Leaf> leaves_;
  size_t total_bytes_ = 0;
};

inline std::vector<iovec> as_pieces(std::span<std::byte> memory) {
  if (memory.empty()) return {};
  return {{memory.data(), memory.size()}};
}

}  // namespace jaxhetero
