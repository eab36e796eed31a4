#include "shard_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

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

std::vector<uint32_t> balanced_shares(uint32_t worker_count, const std::vector<bool>& colocated) {
  const auto inside = static_cast<uint32_t>(std::ranges::count(colocated, true));
  const auto dedicated = static_cast<uint32_t>(colocated.size()) - inside;
  std::vector<uint32_t> shares(colocated.size(), 1);
  if (inside == 0 || dedicated == 0) return shares;
  // As many dedicated reducers as workers: they carry everything.
  const uint32_t share_inside = worker_count - std::min(dedicated, worker_count);
  for (size_t i = 0; i < shares.size(); ++i) shares[i] = colocated[i] ? share_inside : worker_count + inside - 2;
  return shares;
}

ShardPlan::ShardPlan(std::vector<uint32_t> shares)
    : shares_(std::move(shares)), whole_(std::accumulate(shares_.begin(), shares_.end(), uint64_t{0})) {}

uint32_t ShardPlan::reducer_at(uint64_t point) const {
  uint32_t reducer = 0;
  while (point >= shares_[reducer]) point -= shares_[reducer++];
  return reducer;
}

std::vector<Shard> ShardPlan::cut(uint64_t op, uint64_t count, uint64_t item_bytes) const {
  const uint32_t first = reducer_at(mix(op) % whole_);
  if (count * item_bytes <= kSmallBucketBytes) return {{first, 0, count}};

  const uint64_t align = std::max<uint64_t>(1, kAlignBytes / item_bytes);
  const auto reducer_count = static_cast<uint32_t>(shares_.size());
  std::vector<Shard> shards;
  uint64_t begin = 0;
  uint64_t cut_off = 0;  // of whole_
  for (uint32_t i = 0; i < reducer_count; ++i) {
    const uint32_t reducer = (first + i) % reducer_count;
    cut_off += shares_[reducer];
    // Exact quotients without overflow: count may be near 2^60, whole_ is less than 2^26.
    uint64_t end = count / whole_ * cut_off + count % whole_ * cut_off / whole_;
    if (cut_off < whole_) end -= end % align;
    if (end > begin) shards.push_back({reducer, begin, end - begin});
    begin = std::max(begin, end);
  }
  return shards;
}

}  // namespace jaxhetero
