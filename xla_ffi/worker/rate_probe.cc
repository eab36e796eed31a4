#include "xla_ffi/worker/rate_probe.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {
namespace {

constexpr uint64_t kAgreeOp = ~uint64_t{0};
// An op for each size and sort: an op's rounds are all of one size, and a reducer counts the rounds that it sees.
uint64_t push_op(uint64_t probe_bytes, bool colocated) { return kAgreeOp - 2 * probe_bytes - (colocated ? 1 : 0); }

// Of each rail. Sixteen chunks: the times of fewer would depend on the links' turns more than on their rates.
constexpr uint64_t kFirstShardBytes = 256 << 10;
constexpr uint64_t kMostProbeBytes = 64 << 20;
constexpr uint64_t kGrowth = 4;
constexpr uint64_t kLongEnoughUs = 60'000;
constexpr int kProbes = 4;
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
                     uint32_t rail_count)
    : worker_count_(worker_count),
      reducers_(reducers),
      pace_(pace),
      rail_count_(rail_count),
      own_(1 + reducers.size() + rail_count),
      totals_(own_.size()) {
  own_[0] = 1;
  start_sort(std::ranges::all_of(reducers_, &ReducerPlace::colocated));
}

void RateProbe::start_sort(bool colocated) {
  colocated_ = colocated;
  std::vector<uint32_t> shares;
  for (const ReducerPlace& reducer : reducers_) shares.push_back(reducer.colocated == colocated ? 1 : 0);
  plan_ = std::make_shared<ShardPlan>(std::move(shares), pace_);
  probed_count_ = plan_->owner_count();
  start_size(probed_count_ * rail_count_ * kFirstShardBytes);
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
  request.op = push_op(probe_bytes_, colocated_);
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
    phase_ = Phase::kAgreeing;
  } else if (totals_[0] != worker_count_) {
    rates_.clear();
    rail_rates_.clear();
    bytes_per_s_ = 0;
    window_bytes_ = 0;
    phase_ = Phase::kOver;
  } else if (std::exchange(phase_, Phase::kPushing) == Phase::kAgreeing) {
    evaluate();
  }
}

uint64_t RateProbe::mean_us(size_t place) const {
  return std::max<uint64_t>(1, static_cast<uint64_t>(totals_[1 + place]) / worker_count_);
}

void RateProbe::evaluate() {
  uint64_t slowest_us = 0;
  for (size_t i = 0; i < reducers_.size(); ++i) {
    if (reducers_[i].colocated == colocated_) slowest_us = std::max(slowest_us, mean_us(i));
  }
  if (slowest_us < kLongEnoughUs && probe_bytes_ * kGrowth <= kMostProbeBytes) {
    return start_size(probe_bytes_ * kGrowth);
  }
  if (++probe_count_ < kProbes) return;
  if (rail_rates_.empty()) conclude_rails();
  colocated_ ? conclude_colocated() : conclude_dedicated();
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
  const uint64_t shard_bytes = probe_bytes_ / probed_count_;
  bytes_per_s_ = worker_count_ * shard_bytes * 1'000'000 / fastest_us;
  window_bytes_ = shard_bytes * kWindowUs / fastest_us;
  if (probed_count_ == reducers_.size()) {
    phase_ = Phase::kOver;
  } else {
    start_sort(true);
  }
}

// Every rail has carried equal bytes; or only one rail has carried any, on a network so slow that even the first probe
// was long enough.
void RateProbe::conclude_rails() {
  if (std::find(totals_.end() - rail_count_, totals_.end(), 0) != totals_.end()) {
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
  uint64_t slowest_us = 1;
  for (size_t i = 0; i < reducers_.size(); ++i) {
    if (reducers_[i].colocated) slowest_us = std::max(slowest_us, mean_us(i));
  }
  // A worker sends its contribution to the other workers, and the totals of its own shard to them.
  const uint64_t shard_bytes = probe_bytes_ / probed_count_;
  const uint64_t load_bytes = shard_bytes * (probed_count_ - 1 + worker_count_ - 1);
  const uint64_t bytes_per_s = load_bytes * 1'000'000 / slowest_us;
  if (rates_.empty()) {
    rates_.assign(reducers_.size(), kFullRate);
    bytes_per_s_ = bytes_per_s;
    window_bytes_ = shard_bytes * kWindowUs / slowest_us;
  }
  for (size_t i = 0; i < reducers_.size(); ++i) {
    if (reducers_[i].colocated)
      rates_[i] = snapped((kFullRate * bytes_per_s + bytes_per_s_ / 2) / bytes_per_s_, kWorkerSlack);
  }
  phase_ = Phase::kOver;
}

}  // namespace jaxhetero
