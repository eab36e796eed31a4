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

// The same on every worker, computed from what all of them know. Cuts by bytes and not by leaves, so that every reducer
// has its exact share whatever the leaves' sizes are.
class ShardPlan {
 public:
  explicit ShardPlan(uint32_t reducer_count) : reducer_count_(reducer_count) {}

  // The shards of a bucket of `count` elements: they cover it without overlap, in order, and none is empty but the only
  // one of an empty bucket. A small bucket goes whole to one reducer, which the op's number chooses.
  [[nodiscard]] std::vector<Shard> cut(uint64_t op, uint64_t count, uint64_t item_bytes) const;

 private:
  uint32_t reducer_count_;
};

}  // namespace jaxhetero
