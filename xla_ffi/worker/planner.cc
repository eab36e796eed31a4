#include "xla_ffi/worker/planner.h"

#include <algorithm>

namespace jaxhetero {

void Planner::enter(const View& view) {
  view_number_ = view.number;
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
  even_plan_ = std::make_unique<ShardPlan>(balanced_shares(job_.worker_count, places_), pace);
  if (window_bytes_ > 0) pace.window_bytes = window_bytes_;
  plan_ = std::make_unique<ShardPlan>(balanced_shares(job_.worker_count, rated), pace);
}

uint32_t Planner::rate_of(const View::Reducer& reducer) const {
  const auto rate = rates_.find(reducer.number);
  return rate != rates_.end() ? rate->second : RateProbe::kFullRate;
}

// The probe's own plan is for the reducers of the view in which it started. In a later view, workers that have the
// rates may replay a round of the measurement for others that do not, so internal rounds are cut evenly.
const ShardPlan& Planner::plan_of(const RoundRequest& request) const {
  if (request.plan && is_undisturbed()) return *request.plan;
  return request.is_internal ? *even_plan_ : *plan_;
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
