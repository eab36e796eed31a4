#include "xla_ffi/worker/shard_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "xla_ffi/base/mix.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/job_shape.h"

namespace jaxhetero {
namespace {

// A bucket with less than this for every reducer goes to fewer of them: every message has a cost. Measured; see
// notebook/links.md.
constexpr uint64_t kLeastShardBytes = 4096;
constexpr uint64_t kWholeBytes = 16 << 10;  // shards of a bucket up to this are one chunk each
constexpr uint64_t kChunksPerShard = 128;
constexpr uint64_t kChunksPerShardOfRows = 64;
constexpr uint64_t kChunksPerCall = 512;      // the chunks of a call to each reducer
constexpr uint64_t kDearChunksPerCall = 256;  // the same, where messages are dear
// The largest chunk: on any path; if two windows carry it; and as a part of a large window.
constexpr uint64_t kSlowPathChunkBytes = 16 << 10;
constexpr uint64_t kUsualChunkBytes = 32 << 10;
constexpr uint64_t kChunksPerWindow = 4;
// The smallest chunk, as a part of the window: on fast links, a process takes longer to wake up than a smaller one to
// arrive.
constexpr uint64_t kMostChunksPerWindow = 32;
// Chunks of at least kFillingBytes in large calls fill their packets, which on an Ethernet carry kPacketBytes each.
constexpr uint64_t kFillingBytes = 16 << 10;
constexpr uint64_t kPacketBytes = 1448;
// The most that the shares of a plan may be together: products with them have to fit 64 bits.
constexpr uint64_t kMostWhole = uint64_t{1} << 26;
constexpr uint64_t kFsPerS = 1'000'000'000'000'000;

// A packet costs its headers, however full it is. Smaller chunks would have to grow by more than that is worth.
uint64_t fill_packets(uint64_t chunk_bytes) {
  if (chunk_bytes < kFillingBytes || chunk_bytes >= kMostAutoChunkBytes) return chunk_bytes;
  const uint64_t packets = (kHeaderBytes + chunk_bytes + kPacketBytes - 1) / kPacketBytes;
  return (packets * kPacketBytes - kHeaderBytes) / kAlignBytes * kAlignBytes;
}

}  // namespace

// In a time t the dedicated reducers can reduce t * sum(r) / n of the bucket and the co-located ones
// sum(tw - 1) / (n - 2): together all of it. For two workers the latter costs nothing, and is the whole condition.
double best_s_per_byte(std::span<const double> worker_rates, std::span<const double> reducer_rates,
                       uint32_t colocated_count) {
  if (worker_rates.size() < 2) return 0;
  if (reducer_rates.empty() && colocated_count == 0) return std::numeric_limits<double>::infinity();
  const auto worker_count = static_cast<double>(worker_rates.size());
  const double dedicated = std::reduce(reducer_rates.begin(), reducer_rates.end()) / worker_count;
  double reduced_s = 1 / dedicated;
  if (colocated_count > 0) {
    const std::span<const double> rates = worker_rates.first(std::min<size_t>(colocated_count, worker_rates.size()));
    const double others = worker_count - 2;
    reduced_s =
        (others + static_cast<double>(rates.size())) / (others * dedicated + std::reduce(rates.begin(), rates.end()));
  }
  return std::max(reduced_s, 1 / std::ranges::min(worker_rates));
}

namespace {

// In parts of 2^24. Sums, products and quotients of IEEE numbers are the same on every machine.
std::vector<uint32_t> shares_in_best_time(uint32_t worker_count, const std::vector<ReducerPlace>& reducers) {
  std::vector<double> inside;
  std::vector<double> dedicated;
  for (const ReducerPlace& reducer : reducers) (reducer.colocated ? inside : dedicated).push_back(reducer.rate);
  const auto inside_count = static_cast<uint32_t>(inside.size());
  const double fastest = std::ranges::max(inside);
  inside.resize(std::max(worker_count, inside_count), fastest);
  const double time = best_s_per_byte(inside, dedicated, inside_count);
  std::vector<double> parts;
  double whole = 0;
  for (const ReducerPlace& reducer : reducers) {
    parts.push_back(reducer.colocated ? std::max(0.0, (time * reducer.rate - 1) / (worker_count - 2.0))
                                      : time * reducer.rate / worker_count);
    whole += parts.back();
  }
  std::vector<uint32_t> shares;
  for (const double part : parts) shares.push_back(static_cast<uint32_t>(std::lround(part / whole * (1 << 24))));
  return shares;
}

}  // namespace

std::vector<uint32_t> balanced_shares(uint32_t worker_count, const std::vector<ReducerPlace>& reducers) {
  uint64_t inside_count = 0;
  uint64_t dedicated_rate = 0;
  uint64_t least_rate = std::numeric_limits<uint32_t>::max();  // of those inside workers
  uint64_t most_rate = 0;
  for (const ReducerPlace& reducer : reducers) {
    if (reducer.colocated) {
      ++inside_count;
      least_rate = std::min<uint64_t>(least_rate, reducer.rate);
      most_rate = std::max<uint64_t>(most_rate, reducer.rate);
    } else {
      dedicated_rate += reducer.rate;
    }
  }
  // Two workers reduce at no cost: they need not know which of them is faster.
  if (worker_count > 2 && least_rate < most_rate) return shares_in_best_time(worker_count, reducers);
  // A worker alone reduces everything itself. Where the dedicated reducers can take what all workers send, they do.
  const uint64_t all_workers_rate = worker_count * least_rate;
  const uint64_t share_inside = worker_count == 1 ? 1 : all_workers_rate - std::min(dedicated_rate, all_workers_rate);
  std::vector<uint64_t> shares;
  for (const ReducerPlace& reducer : reducers) {
    if (inside_count == 0) {
      shares.push_back(reducer.rate);
    } else if (dedicated_rate == 0) {
      shares.push_back(1);
    } else {
      shares.push_back(reducer.colocated ? share_inside : (worker_count + inside_count - 2) * reducer.rate);
    }
  }
  // Equal rates give one plan, whatever they are.
  const uint64_t common =
      std::max<uint64_t>(std::accumulate(shares.begin(), shares.end(), uint64_t{0}, std::gcd<uint64_t, uint64_t>), 1);
  for (uint64_t& share : shares) share /= common;
  if (std::accumulate(shares.begin(), shares.end(), uint64_t{0}) > kMostWhole)
    return shares_in_best_time(worker_count, reducers);
  return {shares.begin(), shares.end()};
}

ShardPlan::ShardPlan(std::vector<uint32_t> shares) : ShardPlan(std::move(shares), Pace()) {}

ShardPlan::ShardPlan(std::vector<uint32_t> shares, const Pace& pace)
    : shares_(std::move(shares)), whole_(std::accumulate(shares_.begin(), shares_.end(), uint64_t{0})), pace_(pace) {}

uint64_t ShardPlan::owner_count() const { return shares_.size() - std::ranges::count(shares_, 0u); }

uint64_t ShardPlan::core_bytes_per_s(const MessageCosts& costs) {
  if (costs.message_ps == 0) return 0;
  return kFsPerS / 2 / (costs.byte_fs + costs.message_ps * 1000 / kUsualChunkBytes);
}

uint64_t ShardPlan::chunk_bytes_by_shard(uint64_t count, uint64_t item_bytes, bool has_rows) const {
  const uint64_t chunk_count = has_rows ? kChunksPerShardOfRows : kChunksPerShard;
  return std::bit_floor(count / owner_count() / chunk_count * item_bytes);
}

// Every worker has at least two chunks under way at a reducer, on every network: what exceeds its queues is dropped.
// Within that limit, larger chunks cost fewer system calls and packets. Measured; see notebook/links.md.
uint64_t ShardPlan::largest_chunk_bytes() const {
  const uint64_t usual = std::clamp<uint64_t>(2 * pace_.window_bytes, kSlowPathChunkBytes, kUsualChunkBytes);
  return std::clamp<uint64_t>(pace_.window_bytes / kChunksPerWindow, usual, kMostAutoChunkBytes);
}

uint64_t ShardPlan::smallest_chunk_bytes() const {
  return std::clamp<uint64_t>(pace_.window_bytes / kMostChunksPerWindow, kLeastAutoChunkBytes, kMostAutoChunkBytes);
}

// A strand sends and receives at once. For a chunk of x bytes the network takes x / b, and the core 2 (m + g x): it
// keeps up from x = m / (1 / 2b - g) on. Of a shard of s bytes, the messages cost the core 2 m s / x, and the first
// total comes after x / b, so that no chunk should be larger than the root of 2 m s b. In a call of many buckets, the
// wait of one hides behind others: a chunk may then be a small part of the call's shard. All chunks of a shard are of
// one size.
uint64_t ShardPlan::chunk_bytes_by_costs(uint64_t shard_bytes, uint64_t call_shard_bytes) const {
  const auto [message_ps, byte_fs] = pace_.costs;
  if (message_ps == 0 || pace_.strand_bytes_per_s == 0 || shard_bytes == 0) return 0;
  const uint64_t most_byte_fs = kFsPerS / 2 / pace_.strand_bytes_per_s;
  const uint64_t left_fs = most_byte_fs - std::min(byte_fs, most_byte_fs);
  // Products and roots of IEEE numbers are the same on every machine.
  const double best = std::sqrt(2e-12 * static_cast<double>(message_ps) * static_cast<double>(shard_bytes) *
                                static_cast<double>(pace_.strand_bytes_per_s));
  uint64_t bytes = std::max(static_cast<uint64_t>(best), call_shard_bytes / kDearChunksPerCall);
  bytes = std::min(bytes, kUsualChunkBytes);
  if (left_fs > 0) bytes = std::min(bytes, message_ps * 1000 / left_fs);
  const uint64_t chunk_count = std::max<uint64_t>(1, (shard_bytes + bytes / 2) / std::max<uint64_t>(bytes, 1));
  const uint64_t even_bytes = (shard_bytes + chunk_count - 1) / chunk_count;
  return std::min<uint64_t>((even_bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes, kMostAutoChunkBytes);
}

// A chunk waits at its reducer for the same chunk of every worker, so a bucket takes longer than its bytes by about a
// chunk's part of a shard: a hundredth. Smaller chunks cost more in system calls. In a call of many buckets, the next
// bucket's chunks go out while the last totals of one come in. A chunk may then be that part of the call's shard, up to
// half of the largest chunk, and filling its packets is worth the longer wait. Chunks of rows are larger: of most of
// them a worker pushes, or is answered, nothing but a header. Measured; see notebook/links.md.
uint64_t ShardPlan::items_per_chunk(uint64_t count, uint64_t item_bytes, uint64_t call_bytes, bool has_rows,
                                    std::optional<uint32_t> reducer) const {
  if (pace_.chunk_bytes > 0) return pace_.chunk_bytes / item_bytes;
  if (count <= kWholeBytes / item_bytes) return kWholeBytes / item_bytes;
  const uint64_t by_shard = chunk_bytes_by_shard(count, item_bytes, has_rows);
  const uint64_t by_call = std::min(call_bytes / owner_count() / kChunksPerCall, largest_chunk_bytes() / 2);
  const uint64_t bytes =
      std::bit_floor(std::clamp(std::max(by_shard, by_call), smallest_chunk_bytes(), largest_chunk_bytes()));
  // The part of the bucket that is cut: that reducer's, or 1 of the number of owners.
  const auto part_of = [&](uint64_t bytes) {
    if (!reducer || shares_[*reducer] == 0) return bytes / owner_count();
    return bytes / whole_ * shares_[*reducer] + bytes % whole_ * shares_[*reducer] / whole_;
  };
  const uint64_t by_costs = has_rows ? 0 : chunk_bytes_by_costs(part_of(count * item_bytes), part_of(call_bytes));
  return std::max(by_call > by_shard ? fill_packets(bytes) : bytes, by_costs) / item_bytes;
}

uint64_t ShardPlan::most_items_per_chunk(uint64_t item_bytes) const {
  return (pace_.chunk_bytes > 0 ? pace_.chunk_bytes : kMostAutoChunkBytes) / item_bytes;
}

// Bytes under way bridge the moments in which a process of the job stands still, such as when the kernel clears a page
// of a large result. They also let workers get out of step, which costs time at the end of a round: so no more than two
// chunks' part of a shard. Measured; see notebook/links.md.
size_t ShardPlan::least_window_bytes(uint64_t count, uint64_t item_bytes) const {
  return std::min<size_t>(2 * chunk_bytes_by_shard(count, item_bytes), pace_.window_bytes);
}

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

std::vector<Shard> ShardPlan::cut(uint64_t op, uint64_t count, uint64_t item_bytes, bool has_rows) const {
  const uint64_t most_shards = std::max<uint64_t>(1, (count * item_bytes + kLeastShardBytes - 1) / kLeastShardBytes);
  const uint32_t first = has_rows && most_shards >= owner_count() ? 0 : reducer_at(mix(op) % whole_);
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
  uint64_t offset = 0;
  uint64_t cut_off = 0;  // the part of `whole` that is cut off
  for (const uint32_t reducer : owners) {
    cut_off += shares_[reducer];
    // Exact quotients without overflow: count may be near 2^60, `whole` is at most 2^26.
    uint64_t end = count / whole * cut_off + count % whole * cut_off / whole;
    if (cut_off < whole) end -= end % align;
    if (end > offset || owners.size() == 1) shards.push_back({reducer, offset, end - offset});
    offset = std::max(offset, end);
  }
  return shards;
}

}  // namespace jaxhetero
