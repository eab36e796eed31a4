// Views over memory that somebody else owns: nothing here copies or allocates payload.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <map>
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

// Between buckets of the same shapes, so that their pieces pair up. What is in its place already stays.
inline void copy(const Leaves& from, const Leaves& to) {
  std::vector<iovec> sources;
  std::vector<iovec> targets;
  from.slice(0, from.bytes(), sources);
  to.slice(0, to.bytes(), targets);
  for (size_t i = 0; i < std::min(sources.size(), targets.size()); ++i) {
    if (sources[i].iov_base == targets[i].iov_base) continue;
    std::memcpy(targets[i].iov_base, sources[i].iov_base, std::min(sources[i].iov_len, targets[i].iov_len));
  }
}

// The bytes of a bucket that something has been done for, once for each.
class Ranges {
 public:
  // Calls `fresh(begin, bytes)` for every part of [begin, end) that was not added before.
  template <typename Fresh>
  void add(size_t begin, size_t end, const Fresh& fresh) {
    auto next = ends_.upper_bound(begin);
    if (next != ends_.begin() && std::prev(next)->second >= begin) --next;
    size_t from = begin;
    size_t whole_begin = begin;
    size_t whole_end = end;
    while (next != ends_.end() && next->first <= end) {
      if (next->first > from) fresh(from, next->first - from);
      from = std::max(from, next->second);
      whole_begin = std::min(whole_begin, next->first);
      whole_end = std::max(whole_end, next->second);
      next = ends_.erase(next);
    }
    if (from < end) fresh(from, end - from);
    ends_.emplace(whole_begin, whole_end);
  }

 private:
  std::map<size_t, size_t> ends_;  // of ranges that do not touch, by their begin
};

inline size_t total_bytes(std::span<const iovec> pieces) {
  size_t total = 0;
  for (const iovec& piece : pieces) total += piece.iov_len;
  return total;
}

inline std::span<const std::byte> bytes_of(const iovec& piece) {
  return {static_cast<const std::byte*>(piece.iov_base), piece.iov_len};
}

inline std::vector<iovec> as_pieces(std::span<std::byte> memory) {
  if (memory.empty()) return {};
  return {{memory.data(), memory.size()}};
}

}  // namespace jaxhetero
