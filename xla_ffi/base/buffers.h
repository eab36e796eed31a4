// Views of payload memory, which others own. Not thread-safe.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace jaxhetero {

// A bucket: its leaves one after the other, seen as one range of bytes that can be cut anywhere.
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
    // Start at the last leaf whose offset is at most `offset`; empty leaves add nothing.
    auto leaf = std::ranges::upper_bound(leaves_, offset, {}, &Leaf::offset);
    for (size_t index = static_cast<size_t>(leaf - leaves_.begin()); bytes > 0 && index > 0; ++index) {
      const Leaf& current = leaves_[index - 1];
      const size_t end = index < leaves_.size() ? leaves_[index].offset : total_bytes_;
      const size_t part = std::min(bytes, end - offset);
      if (part == 0) continue;
      pieces.push_back({current.data + (offset - current.offset), part});
      offset += part;
      bytes -= part;
    }
  }

 private:
  struct Leaf {
    std::byte* data;
    size_t offset;  // the place of its first byte in the bucket
  };
  std::vector<Leaf> leaves_;
  size_t total_bytes_ = 0;
};

// Copies `bytes` bytes from one bucket to another, whatever their leaves are. Skips what is the same memory in both.
inline void copy(const Leaves& from, size_t from_offset, const Leaves& to, size_t to_offset, size_t bytes) {
  std::vector<iovec> sources;
  from.slice(from_offset, bytes, sources);
  std::vector<iovec> targets;
  for (const iovec& source : sources) {
    const auto* data = static_cast<const std::byte*>(source.iov_base);
    targets.clear();
    to.slice(to_offset, source.iov_len, targets);
    to_offset += source.iov_len;
    for (const iovec& target : targets) {
      if (target.iov_base != data) std::memcpy(target.iov_base, data, target.iov_len);
      data += target.iov_len;
    }
  }
}

// A set of byte ranges, for work that must be done exactly once per byte of a bucket.
class Ranges {
 public:
  // Adds [first, end). Calls `fresh(offset, bytes)` for each part of it that was not added before.
  template <typename Fresh>
  void add(size_t first, size_t end, const Fresh& fresh) {
    auto next = ends_.upper_bound(first);
    if (next != ends_.begin() && std::prev(next)->second >= first) --next;
    size_t from = first;
    size_t merged_first = first;
    size_t merged_end = end;
    while (next != ends_.end() && next->first <= end) {
      if (next->first > from) fresh(from, next->first - from);
      from = std::max(from, next->second);
      merged_first = std::min(merged_first, next->first);
      merged_end = std::max(merged_end, next->second);
      next = ends_.erase(next);
    }
    if (from < end) fresh(from, end - from);
    ends_.emplace(merged_first, merged_end);
  }

  // Removes all. Calls `removed(offset, bytes)` for each range.
  template <typename Removed>
  void take_all(const Removed& removed) {
    for (const auto& [first, end] : std::exchange(ends_, {})) removed(first, end - first);
  }

 private:
  std::map<size_t, size_t> ends_;  // the ends of ranges that do not touch, keyed by first byte
};

inline size_t total_bytes(std::span<const iovec> pieces) {
  size_t total = 0;
  for (const iovec& piece : pieces) total += piece.iov_len;
  return total;
}

inline std::span<const std::byte> bytes_of(const iovec& piece) {
  return {static_cast<const std::byte*>(piece.iov_base), piece.iov_len};
}

// Cuts `bytes` off the front of `pieces`, from index `first` on, and returns the index of the first piece that has any
// left. Calls `cut(part)` for each part cut off.
template <typename Cut>
size_t cut_front(std::span<iovec> pieces, size_t first, size_t bytes, const Cut& cut) {
  while (bytes > 0) {
    iovec& piece = pieces[first];
    const size_t part = std::min(bytes, piece.iov_len);
    cut(bytes_of(piece).first(part));
    piece.iov_base = static_cast<std::byte*>(piece.iov_base) + part;
    piece.iov_len -= part;
    bytes -= part;
    if (piece.iov_len == 0) ++first;
  }
  return first;
}

inline std::vector<iovec> as_pieces(std::span<std::byte> memory) {
  if (memory.empty()) return {};
  return {{memory.data(), memory.size()}};
}

// Memory that stays where it is as long as anybody has its keeper.
struct LongLived {
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> keeper;
};
using LongLivedByStart = std::map<const std::byte*, LongLived>;

}  // namespace jaxhetero
