#include "shard_plan.h"

#include <algorithm>

#include "wire.h"

namespace jaxhetero {
namespace {

// Shards begin on whole cache lines of the first leaf.
constexpr uint64_t kAlignBytes = 64;

uint64_t mix(uint64_t value) {  // the finalizer of SplitMix64 (Steele, Lea, Flood 2014)
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace

std::vector<Shard> ShardPlan::cut(uint64_t op, uint64_t count, uint64_t item_bytes) const {
  const auto first = static_cast<uint32_t>(mix(op) % reducer_count_);
  if (count * item_bytes <= kSmallBucketBytes) return {{first, 0, count}};

  const uint64_t align = std::max<uint64_t>(1, kAlignBytes / item_bytes);
  std::vector<Shard> shards;
  uint64_t begin = 0;
  for (uint32_t i = 0; i < reducer_count_; ++i) {
    // Exact quotients without overflow: count may be near 2^60.
    uint64_t end = count / reducer_count_ * (i + 1) + count % reducer_count_ * (i + 1) / reducer_count_;
    if (i + 1 < reducer_count_) end -= end % align;
    if (end > begin) shards.push_back({(first + i) % reducer_count_, begin, end - begin});
    begin = std::max(begin, end);
  }
  return shards;
}

}  // namespace jaxhetero
