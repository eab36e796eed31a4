// Which reducer sums which part of a bucket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "xla_ffi/sum/reduce.h"

namespace jaxhetero {

// The part of a bucket that one reducer owns, in elements.
struct Shard {
  uint32_t reducer = 0;
  uint64_t offset = 0;
  uint64_t count = 0;

  bool operator==(const Shard&) const = default;
};

// A reducer, and what carries its traffic: its own network interface, or that of the worker it lives in.
struct ReducerPlace {
  bool colocated = false;
  uint32_t rate = 1;  // of the interface, in any unit
};

// The shares with which no network interface is busy for longer than it must be.
//
// A worker whose own reducer has share a sends 1 - a, and n - 1 totals of a: 1 + a(n - 2) in all. A dedicated reducer
// with share b sends and receives nb. With workers of rate w and dedicated reducers of rates r, c reducers inside
// workers, and all bytes reduced, equal times give a : b = (nw - sum of r) : (n + c - 2)r. For c = n and equal rates
// that is the optimum of Jiang et al. (OSDI 2020). Workers are as fast as the slowest of them.
std::vector<uint32_t> balanced_shares(uint32_t worker_count, const std::vector<ReducerPlace>& reducers);

// The same on every worker, computed from what all of them know. Cuts by bytes and not by leaves, so that every reducer
// has its exact share whatever the leaves' sizes are.
class ShardPlan {
 public:
  // How shards are pushed: chunk by chunk, and how far ahead of their totals.
  struct Pace {
    size_t chunk_bytes = 0;                 // not 0: of every chunk but a shard's last one
    size_t window_bytes = size_t{8} << 10;  // what a link should have under way, if its shard is large enough
  };

  // The relative size of every reducer's share; at least one is not 0.
  explicit ShardPlan(std::vector<uint32_t> shares);
  ShardPlan(std::vector<uint32_t> shares, const Pace& pace);

  // Equal for equal plans, so that workers with different ones can be told apart.
  [[nodiscard]] uint64_t digest() const;

  // The shards of a bucket of `count` elements: they cover it without overlap, in order, and none is empty but the only
  // one of an empty bucket. The op's number chooses which reducer has the first one; a small bucket goes to that one
  // only, or to a few.
  [[nodiscard]] std::vector<Shard> cut(uint64_t op, uint64_t count, uint64_t item_bytes) const;

  // The elements of every chunk of such a bucket but a shard's last one. `call_bytes`: of all buckets of its call.
  [[nodiscard]] uint64_t items_per_chunk(uint64_t count, uint64_t item_bytes, uint64_t call_bytes = 0) const;
  // A link's window for such a bucket is at least this, or two chunks.
  [[nodiscard]] size_t least_window_bytes(uint64_t count, uint64_t item_bytes) const;
  [[nodiscard]] uint64_t owner_count() const;  // how many reducers have a share

 private:
  [[nodiscard]] uint32_t reducer_at(uint64_t point) const;
  [[nodiscard]] uint64_t smallest_chunk_bytes() const;
  [[nodiscard]] uint64_t largest_chunk_bytes() const;
  [[nodiscard]] uint64_t chunk_bytes_by_shard(uint64_t count, uint64_t item_bytes) const;

  std::vector<uint32_t> shares_;
  uint64_t whole_;  // their sum
  Pace pace_;
};

}  // namespace jaxhetero
