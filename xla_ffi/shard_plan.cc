#include "shard_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace jaxhetero {
namespace {

// Shards begin on whole cache lines of the first leaf.
constexpr uint64_t kAlignBytes = 64;
// A bucket of less than this for every reducer goes to fewer of them: a message has its price. Measured; see
// docs/performance.md.
constexpr uint64_t kLeastShardBytes = 4096;

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

uint64_t ShardPlan::digest() const {
  uint64_t digest = shares_.size();
  for (const uint32_t share : shares_) digest = mix(digest + share + 1);
  return digest;
}

std::vector<Shard> ShardPlan::cut(uint64_t op, uint64_t count, uint64_t item_bytes) const {
  const uint32_t first = reducer_at(mix(op) % whole_);
  const uint64_t most_shards = std::max<uint64_t>(1, (count * item_bytes + kLeastShardBytes - 1) / kLeastShardBytes);
  const auto reducer_count = static_cast<uint32_t>(shares_.size());
  std::vector<uint32_t> owners;
  uint64_t whole = 0;  // the owners' shares
  for (uint32_t i = 0; i < reducer_count && owners.size() < most_shards; ++i) {
    const uint32_t reducer = (first + i) % reducer_count;
    if (shares_[reducer] == 0) continue;
    owners.push_back(reducer);
    whole += shares_[reducer];
  }

  const uint64_t align = std::max<uint64_t>(1, kAlignBytes / item_bytes);
  std::vector<Shard> shards;
  uint64_t begin = 0;
  uint64_t cut_off = 0;  // of `whole`
  for (const uint32_t reducer : owners) {
    cut_off += shares_[reducer];
    // Exact quotients without overflow: count may be near 2^60, `whole` is less than 2^26.
    uint64_t end = count / whole * cut_off + count % whole * cut_off / whole;
    if (cut_off < whole) end -= end % align;
    if (end > begin || owners.size() == 1) shards.push_back({reducer, begin, end - begin});
    begin = std::max(begin, end);
  }
  return shards;
}

}  // namespace jaxhetero
