#include "xla_ffi/worker/planner.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "xla_ffi/codec/float_code.h"

namespace jaxhetero {
namespace {

// 2.5 Gbit/s: the rate of a strand, each way, up to which it codes. With vectors it codes and decodes at least 4 GB/s,
// so that this takes at most a sixth of its time; see notebook/wire.md.
constexpr uint64_t kMostCodedBytesPerS = 312'500'000;

StatePlan::Member member_of(const View::Reducer& reducer) {
  return {reducer.number, reducer.since, reducer.address, reducer.port};
}

}  // namespace

void Planner::enter(const View& view) {
  view_number_ = view.number;
  if (job_.is_elastic()) worker_count_ = static_cast<uint32_t>(view.members.size());
  most_strands_ = view.strand_count;
  rail_count_ = view.rail_count;
  reducers_ = view.reducers;
  if (first_reducers_.empty()) {
    first_reducers_ = view.reducers;
  } else {
    later_views_.push_back({{}, view.is_settled});
    for (const View::Reducer& reducer : view.reducers) later_views_.back().members.push_back(member_of(reducer));
  }
  places_.clear();
  for (const View::Reducer& reducer : reducers_) places_.push_back({reducer.colocated_rank >= 0});
  if (job_.is_elastic()) state_plan_ = std::make_shared<StatePlan>(next_state_plan(view));
  make_plans();
}

// Of an elastic job. What comes before a view is in the view: not all members have gone through the same ones.
StatePlan Planner::next_state_plan(const View& view) const {
  std::vector<StatePlan::Member> members;
  for (const View::Reducer& reducer : reducers_) members.push_back(member_of(reducer));
  if (view.states.empty()) {
    const std::vector<uint32_t> shares = balanced_shares(worker_count_, places_);
    for (size_t i = 0; i < shares.size(); ++i) members[i].share = shares[i];
    return StatePlan(members);
  }
  StatePlan plan = decode_state_plan(view.states).value();
  plan.enter(members, view.is_settled);
  return plan;
}

// From the view and the rates only, which are the same on every worker.
void Planner::make_plans() {
  std::vector<ReducerPlace> rated;
  pace_ = {.chunk_bytes = job_.chunk_bytes};
  even_plan_ = std::make_shared<ShardPlan>(balanced_shares(worker_count_, places_), pace_);
  strand_count_ = strands_for_rates();
  even_parts_ = PartPlan(job_, std::vector<uint32_t>(most_strands_, 1));
  if (window_bytes_ > 0) {
    pace_.window_bytes = window_bytes_ / strand_count_;
    pace_.costs = probe_->costs();
    pace_.strand_bytes_per_s = probe_->most_bytes_per_s() / strand_count_;
  }
  rated_.clear();
  for (const View::Reducer& reducer : reducers_) {
    rated.push_back({reducer.colocated_rank >= 0, rate_now_of(reducer)});
    rated_.push_back({rated.back(), reducer.colocated_rank});
  }
  parts_ = PartPlan(job_, strand_shares(), pace_.costs);
  plan_ = std::make_shared<ShardPlan>(balanced_shares(worker_count_, rated), pace_);
  if (!job_.is_elastic()) state_plan_ = std::make_shared<StatePlan>(make_state_plan());
}

StatePlan Planner::make_state_plan() const {
  std::vector<ReducerPlace> places;
  for (const View::Reducer& reducer : first_reducers_)
    places.push_back({reducer.colocated_rank >= 0, rate_of(reducer)});
  const std::vector<uint32_t> shares = balanced_shares(job_.worker_count, places);
  std::vector<StatePlan::Member> members;
  for (size_t i = 0; i < shares.size(); ++i) {
    members.push_back(member_of(first_reducers_[i]));
    members.back().share = shares[i];
  }
  StatePlan plan(members);
  for (const ViewOfStates& later : later_views_) plan.enter(later.members, later.is_settled);
  return plan;
}

// The balance of a job of the members alone. To them, a reducer inside another worker is like a dedicated one.
ShardPlan Plans::plan_of_group(const OpSpec& spec) const {
  std::vector<ReducerPlace> places;
  for (const Reducer& reducer : reducers) {
    places.push_back(reducer.place);
    if (reducer.place.colocated)
      places.back().colocated = spec.has_member(static_cast<uint32_t>(reducer.colocated_rank));
  }
  return {balanced_shares(static_cast<uint32_t>(spec.group.size()), places), pace};
}

uint32_t Planner::rate_of(const View::Reducer& reducer) const {
  const auto rate = rates_.find(reducer.number);
  return rate != rates_.end() ? rate->second : RateProbe::kFullRate;
}

// What a dedicated reducer carries in chunks as the program's are, where that keeps its cores busier than the probe's
// did. In the best cut the strands of a reducer inside a worker have less to do than those of the worker itself.
uint32_t Planner::rate_with_cores(const View::Reducer& reducer) const {
  const uint32_t rate = rate_of(reducer);
  const uint64_t cores_bytes_per_s = strand_count_ * ShardPlan::core_bytes_per_s(pace_.costs);
  if (cores_bytes_per_s == 0 || reducer.colocated_rank >= 0) return rate;
  // Workers that are taken for equal may be a little faster.
  const auto is_full = [&](const View::Reducer& other) { return rate_of(other) <= RateProbe::kFullRate; };
  const uint64_t full_bytes_per_s =
      std::ranges::all_of(reducers_, is_full) ? probe_->most_bytes_per_s() : probe_->bytes_per_s();
  const uint64_t most = (RateProbe::kFullRate * cores_bytes_per_s + full_bytes_per_s / 2) / full_bytes_per_s;
  return static_cast<uint32_t>(std::clamp<uint64_t>(most, 1, rate));
}

// In finer units once rates have been followed.
uint32_t Planner::rate_now_of(const View::Reducer& reducer) const {
  if (followed_rates_.empty()) return rate_with_cores(reducer);
  return fine_rate_of(reducer);
}

uint32_t Planner::fine_rate_of(const View::Reducer& reducer) const {
  const auto rate = followed_rates_.find(reducer.number);
  if (rate != followed_rates_.end()) return rate->second;
  return rate_with_cores(reducer) * (NewRates::kFullRate / RateProbe::kFullRate);
}

// A worker with a reducer inside shares its interface with it, so what a link carries tells nothing of that alone. An
// elastic job has no round of which all workers know how often it has run.
Follows Planner::follows() const {
  if (!job_.measure_rates || job_.is_elastic() || reducers_.size() < 2 || worker_count_ < 2) return Follows::kNothing;
  return std::ranges::any_of(places_, &ReducerPlace::colocated) ? Follows::kWaits : Follows::kLinks;
}

void Planner::follow(const NewRates& rates) {
  for (const NewRates::Rate& rate : rates.rates) followed_rates_[rate.reducer] = rate.rate;
  make_plans();
}

Goodput Planner::planned() const {
  Goodput goodput{view_number_, 0, {}};
  for (const View::Reducer& reducer : reducers_) goodput.links.push_back({reducer.number, fine_rate_of(reducer), 0, 0});
  goodput.in_step.planned_time = planned_time();
  return goodput;
}

// In parts of 2^32, if a full rate carries one byte in a unit of time; 0 where no reducer is inside a worker.
uint64_t Planner::planned_time() const {
  constexpr double kFull = NewRates::kFullRate;
  std::vector<double> inside;
  std::vector<double> dedicated;
  for (const View::Reducer& reducer : reducers_) {
    (reducer.colocated_rank >= 0 ? inside : dedicated).push_back(fine_rate_of(reducer) / kFull);
  }
  if (inside.empty()) return 0;
  const auto inside_count = static_cast<uint32_t>(inside.size());
  inside.resize(worker_count_, std::ranges::max(inside));
  return static_cast<uint64_t>(std::ldexp(best_s_per_byte(inside, dedicated, inside_count), 32));
}

// All where the user has said how many there are, or nothing is known.
uint32_t Planner::strands_for_rates() const { return window_bytes_ == 0 ? most_strands_ : probe_->best_strand_count(); }

bool Planner::is_slower_than_codes() const {
  return has_fast_code() && window_bytes_ > 0 && probe_->bytes_per_s() / strand_count_ <= kMostCodedBytesPerS;
}

// The strands of a rail share what it carries. Where their number is no multiple of the rails', some rails have one
// strand more than others.
std::vector<uint32_t> Planner::strand_shares() const {
  const uint32_t fewest = strand_count_ / rail_count_;
  const uint32_t common = std::max(fewest * (fewest + 1), 1u);
  std::vector<uint32_t> shares;
  for (uint32_t strand = 0; strand < strand_count_; ++strand) {
    const uint32_t rail = strand % rail_count_;
    const uint32_t on_rail = fewest + (rail < strand_count_ % rail_count_ ? 1 : 0);
    const uint32_t rate = rail_rates_.empty() ? 1 : rail_rates_[rail];
    shares.push_back(rate * (common / on_rail));
  }
  return shares;
}

std::optional<RoundRequest> Planner::next_probe() {
  if (!job_.measure_rates) return std::nullopt;
  if (!probe_) start_probe();
  std::optional<RoundRequest> request = probe_->next();
  probe_parts_ = PartPlan::of_all_strands(job_, probe_->pushing_strand_count());
  if (!request) take_rates();
  return request;
}

void Planner::start_probe() {
  const ShardPlan::Pace pace{.chunk_bytes = job_.chunk_bytes};
  probe_.emplace(job_.worker_count, places_, pace, rail_count_, most_strands_, job_.strands == 0);
  probe_view_ = view_number_;
  for (const View::Reducer& reducer : reducers_) probed_.push_back(reducer.number);
}

void Planner::finish_probe(const RoundOutcome& round) {
  const auto us_until = [&](RoundRecord::Time end) {
    return std::chrono::duration_cast<std::chrono::microseconds>(end - round.entry.record.first_push).count();
  };
  RateProbe::Times times;
  times.rails_us.resize(rail_count_);
  for (const RoundRecord::Part& part : round.entry.parts) {
    const auto place = static_cast<size_t>(std::ranges::find(probed_, part.reducer) - probed_.begin());
    if (place < probed_.size()) times.shards.push_back({place, us_until(part.end)});
  }
  for (const StrandPart& part : round.strand_parts) {
    int64_t& longest = times.rails_us[part.strand % rail_count_];
    longest = std::max(longest, us_until(part.end));
    times.cpu_ns += part.cpu.count();
    times.message_count += static_cast<int64_t>(part.message_count);
  }
  probe_->finish(is_undisturbed(), times);
}

void Planner::take_rates() {
  for (size_t i = 0; i < probe_->rates().size(); ++i) rates_[probed_[i]] = probe_->rates()[i];
  rail_rates_ = probe_->rail_rates();
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
  text += "; windows of " + std::to_string(window_bytes_) + " bytes where shards are large";
  if (strand_count_ > 1) text += "; " + std::to_string(strand_count_) + " strands";
  if (const MessageCosts& costs = pace_.costs; costs.message_ps > 0) {
    text += "; a message takes " + std::to_string(costs.message_ps / 1000) + " ns of a core, and a MB beside it " +
            std::to_string(costs.byte_fs / 1000) + " us";
  }
  return text;
}

}  // namespace jaxhetero
