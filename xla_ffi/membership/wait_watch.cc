#include "xla_ffi/membership/wait_watch.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace jaxhetero {

bool WaitWatch::add(uint32_t rank, const Goodput& goodput) {
  awaited_[rank] = goodput.in_step.awaited;
  const auto bytes = static_cast<double>(goodput.in_step.bytes);
  bytes_ += bytes;
  bytes_by_plan_ += bytes * static_cast<double>(goodput.in_step.planned_time);
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

std::optional<std::vector<NewRates::Rate>> WaitWatch::end_look(std::optional<uint32_t> awaited, bool is_inside) {
  const double shown = pace();
  const double speed = bytes_ / us_;
  const bool is_fast = 5 * measured_pace() > 6 * shown;
  const bool is_new = slow_watch_.note(shown, awaited);
  start_look();
  note_awaited(is_inside ? awaited : std::nullopt, speed);
  has_helped_ |= !slow_watch_.is_low() || 5 * shown > 6 * pace_before_;
  if (is_new && slow_watch_.slow() && !trial_) {
    has_helped_ ? slow_down(*slow_watch_.slow()) : give_up();
  } else if (trial_ ? !end_trial(speed) : !begin_trial(is_fast) && !begin_trial_of_less()) {
    return std::nullopt;
  }
  slow_watch_.forget_slow();
  quiet_look_count_ = 0;
  std::vector<NewRates::Rate> rates;
  for (const auto& [number, rate] : rates_) rates.push_back({number, rate});
  return rates;
}

void WaitWatch::note_awaited(std::optional<uint32_t> awaited, double speed) {
  if (trial_) return;
  ++look_count_;
  if (awaited != std::exchange(awaited_inside_, awaited)) awaited_look_count_ = 0;
  awaited_speed_ = awaited_look_count_++ == 0 ? speed : std::max(awaited_speed_, speed);
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
  trial_ = Trial{reducer, false, std::exchange(rates_[reducer], first_rate)};
  return true;
}

bool WaitWatch::begin_trial_of_less() {
  const bool is_awaited =
      awaited_inside_ && rates_.contains(*awaited_inside_) && awaited_look_count_ >= SlowWatch::kLooks;
  if (!is_awaited || slow_watch_.is_low() || look_count_ < next_try_of_less_) return false;
  uint32_t& rate = rates_[*awaited_inside_];
  trial_ = Trial{*awaited_inside_, true, rate};
  first_rates_.try_emplace(*awaited_inside_, rate);
  rate = std::max(1u, rate / 2);
  look_count_ = awaited_look_count_ = 0;
  next_try_of_less_ = std::min(2 * next_try_of_less_, kLastTrial);
  return true;
}

// True if the plan that was tried is taken back.
bool WaitWatch::end_trial(double speed) {
  if (trial_->has_less) {
    trial_->fast_look_count += 4 * speed > 5 * awaited_speed_ ? 1 : 0;
    return ++trial_->look_count >= SlowWatch::kLooks && end_trial_of_less();
  }
  const bool is_slow = slow_watch_.is_low();
  if (!is_slow && ++trial_->look_count < SlowWatch::kLooks) return false;
  const Trial trial = *std::exchange(trial_, std::nullopt);
  if (is_slow) rates_[trial.reducer] = trial.rate_before;
  if (!is_slow) first_rates_.erase(trial.reducer);
  next_trial_ = is_slow ? std::min(2 * next_trial_, kLastTrial) : kFirstTrial;
  return is_slow;
}

bool WaitWatch::end_trial_of_less() {
  const Trial trial = *std::exchange(trial_, std::nullopt);
  if (2 * trial.fast_look_count > trial.look_count) {
    slow_watch_ = {};  // such rounds are the measure from then on
    next_trial_ = kFirstTrial;
    quiet_look_count_ = 0;
    return false;
  }
  rates_[trial.reducer] = trial.rate_before;
  if (first_rates_[trial.reducer] == trial.rate_before) first_rates_.erase(trial.reducer);
  return true;
}

// That a reducer has less for a trial does not make it slow.
uint32_t WaitWatch::percent_of_reducer(uint32_t number) const {
  const auto first = first_rates_.find(number);
  const auto rate = rates_.find(number);
  if (first == first_rates_.end() || rate == rates_.end()) return 0;
  const bool is_tried = trial_ && trial_->has_less && trial_->reducer == number;
  const uint32_t percent = 100 * (is_tried ? trial_->rate_before : rate->second) / first->second;
  return percent == 100 ? 0 : percent;
}

void WaitWatch::start_look() {
  awaited_.clear();
  bytes_ = bytes_by_plan_ = us_ = 0;
}

void WaitWatch::begin_anew() {
  start_look();
  slow_watch_ = {};
  awaited_inside_.reset();
  awaited_look_count_ = look_count_ = 0;
  // Who had less for a trial gets its share back by one of the other sort, at once.
  quiet_look_count_ = trial_ && trial_->has_less ? kLastTrial : 0;
  trial_.reset();
}

}  // namespace jaxhetero
