#include "xla_ffi/worker/rate_probe.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {
namespace {

constexpr uint64_t kAgreeOp = ~uint64_t{0};
// An op for each size and sort: an op's rounds are all of one size, and a reducer counts the rounds that it sees.
uint64_t push_op(uint64_t probe_bytes, bool colocated) { return kAgreeOp - 2 * probe_bytes - (colocated ? 1 : 0); }

// Behind those of the first series: a size is a multiple of 64 KiB, and below 2^40.
constexpr uint64_t kLargeChunksOps = 2;
constexpr uint64_t kFewStrandsOps = 4;

// Of each rail. Sixteen chunks: the times of fewer would depend on the links' turns more than on their rates.
constexpr uint64_t kFirstShardBytes = 256 << 10;
constexpr uint64_t kMostProbeBytes = 64 << 20;
constexpr uint64_t kGrowth = 4;
constexpr uint64_t kLongEnoughUs = 60'000;
constexpr int kProbes = 4;
// Of the second series: the size of chunks, and how many go over each link and strand at least.
constexpr uint64_t kLargeChunkBytes = 64 << 10;
constexpr uint64_t kLargeChunks = 4;
constexpr int kCostProbes = 2;  // enough for the time on cores, which other work lengthens little
// In sixteenths of the time: cores that are less busy are no limit of any plan, and those that are busier were one of
// the probe.
constexpr uint64_t kBusyPart = 2;
constexpr uint64_t kBoundPart = 12;
// 10 Gbit/s: what one strand carries each way on a slow core; on a fast one it is a little more than half.
constexpr uint64_t kStrandBytesPerS = 1'250'000'000;
// On a slower network, one strand is enough on any core: the start need not take longer.
constexpr uint64_t kLeastBytesPerS = kStrandBytesPerS / 8;
// In sixteenths of the time of few strands. What more of them gain beyond that is worth what each costs in chunks and
// wake-ups.
constexpr uint64_t kWorthyPart = 2;
// Measured; see notebook/links.md.
constexpr uint64_t kWindowUs = 7'000;

// A probe of any size reads the same memory.
constexpr size_t kLeafBytes = 64 << 10;

// How far from the fastest dedicated reducer's a rate may be and still count as equal. A worker sends and receives at
// the same time, which takes more of a processor, so workers seem slower than they are.
constexpr uint64_t kDedicatedSlack = 2;
constexpr uint64_t kWorkerSlack = 5;

uint32_t snapped(uint64_t rate, uint64_t slack) {
  constexpr uint64_t kFull = RateProbe::kFullRate;
  constexpr uint64_t kMost = 64 * kFull;
  if (rate + slack >= kFull && rate <= kFull + slack) return kFull;
  return static_cast<uint32_t>(std::clamp<uint64_t>(rate, 1, kMost));
}

}  // namespace

RateProbe::RateProbe(uint32_t worker_count, const std::vector<ReducerPlace>& reducers, const ShardPlan::Pace& pace,
                     uint32_t rail_count, uint32_t strand_count, bool chooses_strands)
    : worker_count_(worker_count),
      reducers_(reducers),
      pace_(pace),
      rail_count_(rail_count),
      strand_count_(strand_count),
      chooses_strands_(chooses_strands),
      best_strand_count_(strand_count),
      own_(1 + reducers.size() + rail_count + 2),
      totals_(own_.size()) {
  own_[0] = 1;
  start_sort(std::ranges::all_of(reducers_, &ReducerPlace::colocated));
}

void RateProbe::start_sort(bool colocated) {
  colocated_ = colocated;
  has_large_chunks_ = false;
  make_plan(pace_);
  probed_count_ = plan_->owner_count();
  start_size(probed_count_ * rail_count_ * kFirstShardBytes);
}

void RateProbe::start_large_chunks() {
  has_large_chunks_ = true;
  ShardPlan::Pace pace = pace_;
  pace.chunk_bytes = kLargeChunkBytes;
  make_plan(pace);
  start_size(std::max(probe_bytes_, probed_count_ * strand_count_ * kLargeChunks * kLargeChunkBytes));
}

void RateProbe::make_plan(const ShardPlan::Pace& pace) {
  std::vector<uint32_t> shares;
  for (const ReducerPlace& reducer : reducers_) shares.push_back(reducer.colocated == colocated_ ? 1 : 0);
  plan_ = std::make_shared<ShardPlan>(std::move(shares), pace);
}

void RateProbe::start_size(uint64_t bytes) {
  probe_bytes_ = bytes;
  probe_count_ = 0;
  std::fill(own_.begin() + 1, own_.end(), 0);
}

std::optional<RoundRequest> RateProbe::next() {
  if (phase_ == Phase::kOver) return std::nullopt;
  RoundRequest request = phase_ == Phase::kPushing ? push_request() : agree_request();
  request.is_internal = true;
  return request;
}

RoundRequest RateProbe::push_request() {
  const auto leaf = std::make_shared<std::vector<std::byte>>(kLeafBytes);
  RoundRequest request;
  request.op = push_op(probe_bytes_, colocated_) - (has_large_chunks_  ? kLargeChunksOps
                                                    : has_few_strands_ ? kFewStrandsOps
                                                                       : 0);
  request.description = "the measurement of rates";
  request.spec = {Kind::kSum, DType::kF32, 0, 1, probe_bytes_ / sizeof(float), 0};
  for (uint64_t at = 0; at < probe_bytes_; at += kLeafBytes) {
    request.inputs.append(leaf->data(), std::min<uint64_t>(kLeafBytes, probe_bytes_ - at));
  }
  request.inputs_owner = leaf;
  request.plan = plan_;
  return request;
}

RoundRequest RateProbe::agree_request() {
  RoundRequest request;
  request.op = kAgreeOp;
  request.description = "the agreement on rates";
  request.spec = {Kind::kSum, DType::kI64, 0, 1, own_.size(), 0};
  const auto operands = std::make_shared<std::vector<int64_t>>(own_);
  request.inputs.append(operands->data(), own_.size() * sizeof(int64_t));
  request.outputs.append(totals_.data(), totals_.size() * sizeof(int64_t));
  request.inputs_owner = operands;
  return request;
}

void RateProbe::note_us(size_t place, int64_t us) {
  int64_t& shortest = own_[1 + place];
  shortest = std::clamp<int64_t>(us, 1, shortest > 0 ? shortest : std::numeric_limits<int64_t>::max());
}

void RateProbe::finish(bool undisturbed, const Times& times) {
  if (!undisturbed) own_[0] = 0;
  if (phase_ == Phase::kPushing) {
    for (const ShardTime& time : times.shards) note_us(time.reducer, time.us);
    for (size_t rail = 0; rail < times.rails_us.size(); ++rail) {
      if (times.rails_us[rail] > 0) note_us(reducers_.size() + rail, times.rails_us[rail]);
    }
    if (times.cpu_ns > 0) note_us(reducers_.size() + rail_count_, times.cpu_ns);
    own_.back() = times.message_count;
    phase_ = Phase::kAgreeing;
  } else if (totals_[0] != worker_count_) {
    rates_.clear();
    rail_rates_.clear();
    bytes_per_s_ = most_bytes_per_s_ = 0;
    window_bytes_ = 0;
    costs_ = {};
    phase_ = Phase::kOver;
  } else if (std::exchange(phase_, Phase::kPushing) == Phase::kAgreeing) {
    evaluate();
  }
}

uint64_t RateProbe::mean_us(size_t place) const {
  return std::max<uint64_t>(1, static_cast<uint64_t>(totals_[1 + place]) / worker_count_);
}

uint64_t RateProbe::message_ps() const {
  const auto count = static_cast<uint64_t>(totals_.back());
  return count == 0 ? 0 : static_cast<uint64_t>(totals_[totals_.size() - 2]) * 1000 / count;
}

// Each byte of a worker is pushed, and its total comes back.
uint64_t RateProbe::message_bytes() const {
  return 2 * probe_bytes_ * worker_count_ / std::max<uint64_t>(1, static_cast<uint64_t>(totals_.back()));
}

uint64_t RateProbe::slowest_us() const {
  uint64_t slowest_us = 1;
  for (size_t i = 0; i < reducers_.size(); ++i) {
    if (reducers_[i].colocated == colocated_) slowest_us = std::max(slowest_us, mean_us(i));
  }
  return slowest_us;
}

// A reducer of the sort handles as many messages for every worker as a worker does for every reducer.
uint64_t RateProbe::busy_part() const {
  const uint64_t busy_us = static_cast<uint64_t>(totals_[totals_.size() - 2]) / 1000 / worker_count_ / strand_count_;
  return 16 * busy_us * std::max<uint64_t>(worker_count_, probed_count_) / probed_count_ / slowest_us();
}

void RateProbe::evaluate() {
  if (has_few_strands_) {
    if (++probe_count_ < kProbes) return;
    if (16 * first_slowest_us_ >= (16 - kWorthyPart) * slowest_us()) best_strand_count_ = few_strands_;
    most_bytes_per_s_ = std::max(most_bytes_per_s_, rate_of_sort());
    has_few_strands_ = false;
    return end_sort();
  }
  if (!has_large_chunks_ && slowest_us() < kLongEnoughUs && probe_bytes_ * kGrowth <= kMostProbeBytes) {
    return start_size(probe_bytes_ * kGrowth);
  }
  if (++probe_count_ < (has_large_chunks_ && !is_bound_by_cores_ ? kCostProbes : kProbes)) return;
  if (has_large_chunks_) {
    if (costs_.message_ps == 0) conclude_costs();
    most_bytes_per_s_ = std::max(most_bytes_per_s_, rate_of_sort());
    if (is_bound_by_cores_) conclude();
    return end_sort();
  }
  conclude();
  const bool is_first_sort = small_message_bytes_ == 0;
  if (is_first_sort) {
    small_message_ps_ = message_ps();
    small_message_bytes_ = message_bytes();
    first_probe_bytes_ = probe_bytes_;
    first_slowest_us_ = slowest_us();
    wants_large_chunks_ = pace_.chunk_bytes == 0 && busy_part() >= kBusyPart;
    is_bound_by_cores_ = busy_part() >= kBoundPart;
  }
  wants_large_chunks_ ? start_large_chunks() : end_sort();
}

void RateProbe::conclude() {
  if (rail_rates_.empty()) conclude_rails();
  colocated_ ? conclude_colocated() : conclude_dedicated();
}

// As many as it takes to keep the fastest interface busy, and the same number for each.
void RateProbe::consider_few_strands() {
  const uint64_t wanted = (bytes_per_s_ + kStrandBytesPerS - 1) / kStrandBytesPerS;
  const uint64_t even = (wanted + rail_count_ - 1) / rail_count_ * rail_count_;
  few_strands_ = static_cast<uint32_t>(std::clamp<uint64_t>(even, 1, strand_count_));
  has_few_strands_ = few_strands_ < strand_count_ && bytes_per_s_ >= kLeastBytesPerS;
  if (!has_few_strands_) {
    best_strand_count_ = few_strands_;
    return;
  }
  has_large_chunks_ = false;
  make_plan(pace_);
  start_size(first_probe_bytes_);
}

void RateProbe::end_sort() {
  if (chooses_strands_ && few_strands_ == 0) consider_few_strands();
  if (has_few_strands_) return;
  if (colocated_ || probed_count_ == reducers_.size()) {
    phase_ = Phase::kOver;
  } else {
    start_sort(true);
  }
}

// Two sizes of messages, and what each of them costs, tell what all of them do.
void RateProbe::conclude_costs() {
  const uint64_t bytes = message_bytes();
  if (bytes <= small_message_bytes_ || message_ps() <= small_message_ps_) return;
  costs_.byte_fs = (message_ps() - small_message_ps_) * 1000 / (bytes - small_message_bytes_);
  const uint64_t bytes_ps = costs_.byte_fs * small_message_bytes_ / 1000;
  costs_.message_ps = std::max(small_message_ps_, bytes_ps + 1) - bytes_ps;
}

// Of the fastest interface of the sort.
uint64_t RateProbe::rate_of_sort() const {
  uint64_t fastest_us = ~uint64_t{0};
  for (size_t i = 0; i < reducers_.size(); ++i) {
    if (reducers_[i].colocated == colocated_) fastest_us = std::min(fastest_us, mean_us(i));
  }
  const uint64_t shard_bytes = probe_bytes_ / probed_count_;
  // A worker sends its contribution to the other workers, and the totals of its own shard to them.
  const uint64_t shards = colocated_ ? probed_count_ - 1 + worker_count_ - 1 : worker_count_;
  return shards * shard_bytes * 1'000'000 / (colocated_ ? slowest_us() : fastest_us);
}

void RateProbe::conclude_dedicated() {
  uint64_t fastest_us = ~uint64_t{0};
  for (size_t i = 0; i < reducers_.size(); ++i) {
    if (!reducers_[i].colocated) fastest_us = std::min(fastest_us, mean_us(i));
  }
  rates_.assign(reducers_.size(), kFullRate);
  for (size_t i = 0; i < reducers_.size(); ++i) {
    if (!reducers_[i].colocated)
      rates_[i] = snapped((kFullRate * fastest_us + mean_us(i) / 2) / mean_us(i), kDedicatedSlack);
  }
  bytes_per_s_ = rate_of_sort();
  const uint64_t shard_bytes = probe_bytes_ / probed_count_;
  window_bytes_ = shard_bytes * kWindowUs / fastest_us;
}

// Every rail has carried equal bytes; or only one rail has carried any, on a network so slow that even the first probe
// was long enough.
void RateProbe::conclude_rails() {
  const auto rails = std::span(totals_).subspan(1 + reducers_.size(), rail_count_);
  if (std::ranges::find(rails, 0) != rails.end()) {
    rail_rates_.assign(rail_count_, kFullRate);
    return;
  }
  uint64_t fastest_us = ~uint64_t{0};
  for (size_t rail = 0; rail < rail_count_; ++rail) fastest_us = std::min(fastest_us, mean_us(reducers_.size() + rail));
  for (size_t rail = 0; rail < rail_count_; ++rail) {
    const uint64_t us = mean_us(reducers_.size() + rail);
    rail_rates_.push_back(snapped((kFullRate * fastest_us + us / 2) / us, kDedicatedSlack));
  }
}

// All workers run at the pace of the slowest of them, so their shards take the same time.
void RateProbe::conclude_colocated() {
  const uint64_t bytes_per_s = std::max<uint64_t>(1, rate_of_sort());
  if (probed_count_ == reducers_.size()) {
    rates_.assign(reducers_.size(), kFullRate);
    bytes_per_s_ = bytes_per_s;
    window_bytes_ = probe_bytes_ / probed_count_ * kWindowUs / slowest_us();
  }
  for (size_t i = 0; i < reducers_.size(); ++i) {
    if (reducers_[i].colocated)
      rates_[i] = snapped((kFullRate * bytes_per_s + bytes_per_s_ / 2) / bytes_per_s_, kWorkerSlack);
  }
}

}  // namespace jaxhetero
