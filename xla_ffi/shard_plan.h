// Which reducer sums which part of a bucket.
#pragma once

#include <cstdint>
#include <vector>

namespace jaxhetero {

// The part of a bucket that one reducer owns, in elements.
struct Shard {
  uint32_t reducer = 0;
  uint64_t begin = 0;
  uint64_t count = 0;

  bool operator==(const Shard&) const = default;
};

// The shares with which the largest load of any network interface is as small as it can be, where all interfaces have
// one rate. `colocated` tells of every reducer whether it lives inside a worker.
//
// A worker whose own reducer has share a sends 1 - a, and n - 1 totals of a: 1 + a(n - 2) in all. A dedicated reducer
// with share b sends and receives nb. With k dedicated reducers and c inside workers, kb + ca = 1 and both loads equal
// give a : b = (n - k) : (n + c - 2); for c = n that is the optimum of Jiang et al. (OSDI 2020).
std::vector<uint32_t> balanced_shares(uint32_t worker_count, const std::vector<bool>& colocated);

// The same on every worker, computed from what all of them know. Cuts by bytes and not by leaves, so that every reducer
// has its exact share whatever the leaves' sizes are.
class ShardPlan {
 public:
  // The relative size of every reducer's share; at least one is not 0.
  explicit ShardPlan(std::vector<uint32_t> shares);

  // Equal for equal plans, so that workers with different ones can be told apart.
  [[nodiscard]] uint64_t digest() const;

  // The shards of a bucket of `count` elements: they cover it without overlap, in order, and none is empty but the only
  // one of an empty bucket. The op's number chooses which reducer has the first one; a small bucket goes to that one
  // only, or to a few.
  [[nodiscard]] std::vector<Shard> cut(uint64_t op, uint64_t count, uint64_t item_bytes) const;

 private:
  [[nodiscard]] uint32_t reducer_at(uint64_t point) const;

  std::vector<uint32_t> shares_;
  uint64_t whole_;  // their sum
};

}  // namespace jaxhetero
