#include "xla_ffi/worker/planner.h"

#include <algorithm>
#include <chrono>

namespace jaxhetero {
namespace {

// What one strand carries each way on a slow core. Measured; see docs/performance.md.
constexpr uint64_t kStrandBytesPerS = 1'000'000'000;

}  // namespace

void Planner::enter(const View& view) {
  view_number_ = view.number;
  most_strands_ = view.strand_count;
  reducers_ = view.reducers;
  places_.clear();
  for (const View::Reducer& reducer : reducers_) places_.push_back({reducer.colocated_rank >= 0});
  make_plans();
}

// From the view and the rates only, which are the same on every worker.
void Planner::make_plans() {
  std::vector<ReducerPlace> rated = places_;
  for (size_t i = 0; i < rated.size(); ++i) rated[i].rate = rate_of(reducers_[i]);
  ShardPlan::Pace pace{.chunk_bytes = job_.chunk_bytes};
  even_plan_ = std::make_shared<ShardPlan>(balanced_shares(job_.worker_count, places_), pace);
  strand_count_ = strands_for_rates();
  if (window_bytes_ > 0) pace.window_bytes = window_bytes_ / strand_count_;
  plan_ = std::make_shared<ShardPlan>(balanced_shares(job_.worker_count, rated), pace);
}

uint32_t Planner::rate_of(const View::Reducer& reducer) const {
  const auto rate = rates_.find(reducer.number);
  return rate != rates_.end() ? rate->second : RateProbe::kFullRate;
}

// As many as it takes to keep the fastest interface busy: each costs a little in chunks and wake-ups. All where the
// user has said how many there are, or nothing is known.
uint32_t Planner::strands_for_rates() const {
  if (job_.strands > 0 || window_bytes_ == 0) return most_strands_;
  const uint64_t wanted = (probe_->bytes_per_s() + kStrandBytesPerS - 1) / kStrandBytesPerS;
  return static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, most_strands_));
}

std::optional<RoundRequest> Planner::next_probe() {
  if (!job_.measure_rates) return std::nullopt;
  if (!probe_) start_probe();
  std::optional<RoundRequest> request = probe_->next();
  if (!request) take_rates();
  return request;
}

void Planner::start_probe() {
  probe_.emplace(job_.worker_count, places_, ShardPlan::Pace{.chunk_bytes = job_.chunk_bytes});
  probe_view_ = view_number_;
  for (const View::Reducer& reducer : reducers_) probed_.push_back(reducer.number);
}

void Planner::finish_probe(const Timeline::Entry& round) {
  std::vector<RateProbe::ShardTime> times;
  for (const RoundRecord::Part& part : round.parts) {
    const auto place = static_cast<size_t>(std::ranges::find(probed_, part.reducer) - probed_.begin());
    const auto took = std::chrono::duration_cast<std::chrono::microseconds>(part.end - round.record.first_push);
    if (place < probed_.size()) times.push_back({place, took.count()});
  }
  probe_->finish(is_undisturbed(), times);
}

void Planner::take_rates() {
  for (size_t i = 0; i < probe_->rates().size(); ++i) rates_[probed_[i]] = probe_->rates()[i];
  window_bytes_ = probe_->window_bytes();
  make_plans();
}

std::string Planner::rates_text() const {
  if (rates_.empty()) return "the rates of the interfaces were not measured: the reducers changed meanwhile";
  std::string text = "measured " + std::to_string(probe_->bytes_per_s() / 1'000'000) + " MB/s";
  for (const View::Reducer& reducer : reducers_) {
    const uint32_t rate = rate_of(reducer);
    if (rate == RateProbe::kFullRate) continue;
    text += "; " + std::to_string(100 * rate / RateProbe::kFullRate) + " % of that at reducer " +
            std::to_string(reducer.number) + " (host " + reducer.host_name + ")";
    if (text.size() > 1000) break;
  }
  return text + "; windows of " + std::to_string(window_bytes_) + " bytes where shards are large";
}

}  // namespace jaxhetero
