// The plan: which reducer sums which part of a bucket, in chunks of what size, and how fast that can be at best.
//
// Pure functions and values: nothing here blocks or keeps state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "xla_ffi/sum/reduce.h"

namespace jaxhetero {

// Parts and shards begin on whole cache lines of the first leaf.
inline constexpr uint64_t kAlignBytes = 64;

// The part of a bucket that one reducer owns, in elements.
struct Shard {
  uint32_t reducer = 0;
  uint64_t offset = 0;
  uint64_t count = 0;

  bool operator==(const Shard&) const = default;
};

// A reducer and the network interface that carries its traffic: its own, or that of the worker it lives in.
struct ReducerPlace {
  bool colocated = false;
  uint32_t rate = 1;  // the rate of the interface, in any unit
};

// The load of an interface, in units of the bucket. Of n workers, one whose own reducer has share a of the bucket sends
// 1 - a to the other reducers and a total of a to each of n - 1 workers: 1 + a(n - 2) in all. A dedicated reducer with
// share b receives nb and sends nb. A cut is best where the largest load / rate is smallest, and that is where all
// interfaces need the same time; but no worker needs less than 1 / rate.

// The best possible time of a round, in seconds per byte of the bucket, for interfaces of these rates in bytes per
// second. The first `colocated_count` workers may reduce as well. 0 for a worker alone; infinity where nobody reduces.
//
// For n workers and k dedicated reducers of one rate B, and c = n: 2n(n - 1) / (n^2 + kn - 2k) / B (Jiang et al., OSDI
// 2020).
double best_s_per_byte(std::span<const double> worker_rates, std::span<const double> reducer_rates,
                       uint32_t colocated_count);

// The relative shares of the reducers in a best cut: a round then takes the time of best_s_per_byte(), if a worker
// without a reducer inside is as fast as those with one. Whole numbers, so that all workers compute the same.
//
// With workers of one rate w, dedicated reducers of rates r and c reducers inside workers, equal times give
// a : b = (nw - sum of r) : (n + c - 2)r. With workers of several rates, a = (tw - 1) / (n - 2) and b = tr / n in the
// best time t.
std::vector<uint32_t> balanced_shares(uint32_t worker_count, const std::vector<ReducerPlace>& reducers);

// What a message costs the core that sends it, and again the one that receives it. Whole numbers, so that all workers
// compute the same.
struct MessageCosts {
  uint64_t message_ps = 0;  // picoseconds for each message; 0 while nothing is known
  uint64_t byte_fs = 0;     // femtoseconds for each byte beside that
};

// How every bucket is cut into shards and chunks. All workers compute the same plan, from the view and the rates. Cuts
// by bytes and not by leaves, so that every reducer has its exact share whatever the leaves' sizes are.
class ShardPlan {
 public:
  // How a link pushes a shard: chunk by chunk, and how far ahead of the totals.
  struct Pace {
    // The size of every chunk but a shard's last one; chosen by the bucket and the window where it is 0.
    size_t chunk_bytes = 0;
    size_t window_bytes = size_t{8} << 10;  // under way on a link, if its shard is large enough
    MessageCosts costs = {};
    uint64_t strand_bytes_per_s = 0;  // what the network has for a strand, each way
  };

  // The relative size of every reducer's share; at least one is not 0.
  explicit ShardPlan(std::vector<uint32_t> shares);
  ShardPlan(std::vector<uint32_t> shares, const Pace& pace);

  // Equal for equal shares, so that reducers can tell workers with another plan.
  [[nodiscard]] uint64_t digest() const;

  // The shards of a bucket of `count` elements: they cover it without overlap, in order. Only an empty bucket has an
  // empty shard. The op's number chooses the reducer of the first shard; a small bucket has one or a few shards. A
  // bucket of rows that is large enough for a shard for each reducer has them in the reducers' order: where every
  // worker has a reducer inside, and there are no others, a worker's row is then at its own.
  [[nodiscard]] std::vector<Shard> cut(uint64_t op, uint64_t count, uint64_t item_bytes, bool has_rows = false) const;

  // The elements of every chunk of such a bucket but a shard's last one. `call_bytes`: of all buckets of its call.
  // `reducer`: whose shard it is, which matters where messages are dear; without it, one of the mean size.
  [[nodiscard]] uint64_t items_per_chunk(uint64_t count, uint64_t item_bytes, uint64_t call_bytes = 0,
                                         bool has_rows = false, std::optional<uint32_t> reducer = {}) const;
  // Of a bucket of which no element goes over the network.
  [[nodiscard]] uint64_t most_items_per_chunk(uint64_t item_bytes) const;
  // A link's window for such a bucket is at least this, or two chunks.
  [[nodiscard]] size_t least_window_bytes(uint64_t count, uint64_t item_bytes) const;
  // What a core receives and sends each way, in the largest chunks that such costs make; 0 if they are not known.
  [[nodiscard]] static uint64_t core_bytes_per_s(const MessageCosts& costs);
  // How many reducers have a share.
  [[nodiscard]] uint64_t owner_count() const;

 private:
  [[nodiscard]] uint32_t reducer_at(uint64_t point) const;
  [[nodiscard]] uint64_t smallest_chunk_bytes() const;
  [[nodiscard]] uint64_t largest_chunk_bytes() const;
  [[nodiscard]] uint64_t chunk_bytes_by_shard(uint64_t count, uint64_t item_bytes, bool has_rows = false) const;
  [[nodiscard]] uint64_t chunk_bytes_by_costs(uint64_t shard_bytes, uint64_t call_shard_bytes) const;

  std::vector<uint32_t> shares_;
  uint64_t whole_;  // the sum of shares_
  Pace pace_;
};

}  // namespace jaxhetero
