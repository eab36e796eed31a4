#include "xla_ffi/membership/wait_watch.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace jaxhetero {

bool WaitWatch::add(uint32_t rank, const Goodput& goodput) {
  awaited_[rank] = goodput.in_step.awaited;
  bytes_by_plan_ += static_cast<double>(goodput.in_step.bytes) * static_cast<double>(goodput.in_step.planned_time);
  us_ += static_cast<double>(goodput.in_step.us);
  rates_.clear();
  for (const Goodput::Link& link : goodput.links) rates_[link.reducer] = link.planned_rate;
  return awaited_.size() >= worker_count_;
}

// While an interface counts as slow, rounds that are faster than by the plan are no measure of other plans.
double WaitWatch::pace() const {
  const bool is_known = !first_rates_.empty() && slow_watch_.best_pace() > 0;
  return is_known ? std::min(measured_pace(), slow_watch_.best_pace()) : measured_pace();
}

std::optional<uint32_t> WaitWatch::awaited_reducer() const {
  std::vector<uint32_t> reducers;
  for (const auto& [rank, reducer] : awaited_) {
    const auto number = static_cast<uint32_t>(reducer);
    if (rates_.contains(number)) reducers.push_back(number);
  }
  return most_awaited(reducers, worker_count_);
}

std::optional<std::vector<NewRates::Rate>> WaitWatch::end_look(std::optional<uint32_t> awaited) {
  const double shown = pace();
  const bool is_fast = 5 * measured_pace() > 6 * shown;
  const bool is_new = slow_watch_.note(shown, awaited);
  start_look();
  has_helped_ |= !slow_watch_.is_low() || 5 * shown > 6 * pace_before_;
  if (is_new && slow_watch_.slow() && !trial_) {
    has_helped_ ? slow_down(*slow_watch_.slow()) : give_up();
  } else if (trial_ ? !end_trial() : !begin_trial(is_fast)) {
    return std::nullopt;
  }
  slow_watch_.forget_slow();
  quiet_look_count_ = 0;
  std::vector<NewRates::Rate> rates;
  for (const auto& [number, rate] : rates_) rates.push_back({number, rate});
  return rates;
}

void WaitWatch::slow_down(uint32_t reducer) {
  uint32_t& rate = rates_[reducer];
  first_rates_.try_emplace(reducer, rate);
  rate = std::max(1u, rate * slow_watch_.percent() / 100);
  next_trial_ = kFirstTrial;
  pace_before_ = slow_watch_.pace();
  has_helped_ = false;
}

// Rounds are as slow as before the plan has changed, for another reason: as where the program does something else.
void WaitWatch::give_up() {
  for (const auto& [number, rate] : std::exchange(first_rates_, {})) {
    if (rates_.contains(number)) rates_[number] = rate;
  }
  slow_watch_ = {};
  has_helped_ = true;
}

// True if it begins: of one reducer after the other. Rounds that are faster than by the plan are a sign that it is
// time.
bool WaitWatch::begin_trial(bool is_fast) {
  quiet_look_count_ = slow_watch_.is_low() ? 0 : quiet_look_count_ + (is_fast ? kFirstTrial : 1);
  std::erase_if(first_rates_, [this](const auto& entry) { return !rates_.contains(entry.first); });
  if (first_rates_.empty() || quiet_look_count_ < next_trial_) return false;
  auto next = first_rates_.upper_bound(last_tried_);
  if (next == first_rates_.end()) next = first_rates_.begin();
  const auto [reducer, first_rate] = *next;
  last_tried_ = reducer;
  trial_ = Trial{reducer, std::exchange(rates_[reducer], first_rate)};
  return true;
}

// True if the plan that was tried is taken back.
bool WaitWatch::end_trial() {
  const bool is_slow = slow_watch_.is_low();
  if (!is_slow && ++trial_->look_count < SlowWatch::kLooks) return false;
  const Trial trial = *std::exchange(trial_, std::nullopt);
  if (is_slow) rates_[trial.reducer] = trial.rate_before;
  if (!is_slow) first_rates_.erase(trial.reducer);
  next_trial_ = is_slow ? std::min(2 * next_trial_, kLastTrial) : kFirstTrial;
  return is_slow;
}

uint32_t WaitWatch::percent_of_reducer(uint32_t number) const {
  const auto first = first_rates_.find(number);
  const auto rate = rates_.find(number);
  return first == first_rates_.end() || rate == rates_.end() ? 0 : 100 * rate->second / first->second;
}

void WaitWatch::start_look() {
  awaited_.clear();
  bytes_by_plan_ = us_ = 0;
}

void WaitWatch::begin_anew() {
  start_look();
  slow_watch_ = {};
  trial_.reset();
  quiet_look_count_ = 0;
}

}  // namespace jaxhetero
