#include "xla_ffi/membership/rate_watch.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

namespace jaxhetero {
namespace {

// Off by more than a fifth, to either side.
bool is_above(uint64_t rate, uint64_t other) { return 5 * rate > 6 * other; }

// Within an eighth of the full rate counts as that, as at the start.
uint32_t snapped(uint32_t rate) {
  constexpr uint32_t kFull = NewRates::kFullRate;
  return 8 * rate >= 7 * kFull ? kFull : rate;
}

}  // namespace

// A reducer's rate, in parts of `full`, follows from how it keeps pace with the plan, compared with what is usual: half
// of the others keep no more. Where a worker is slow, its links do not share what it carries evenly, and a few are
// ahead of all others: those are no faster than the plan has them.
RateWatch::Rates RateWatch::measured(uint32_t full) const {
  const Rates planned_rates = planned();
  std::map<uint32_t, double> paces;
  std::vector<double> sorted;
  for (const auto& [number, sum] : links_) {
    if (sum.rate() == 0) continue;
    paces[number] = sum.rate() / planned_rates.at(number);
    sorted.push_back(paces[number]);
  }
  if (sorted.empty()) return {};
  std::ranges::sort(sorted, std::greater());
  const double usual = sorted[(sorted.size() - 1) / 2];
  double most = 0;  // 1, unless those of which the plan has most are slow
  for (auto& [number, part] : paces) {
    part = std::min(1.0, part / usual * planned_rates.at(number) / NewRates::kFullRate);
    most = std::max(most, part);
  }
  Rates rates;
  for (const auto& [number, part] : paces)
    rates[number] = std::max(1u, static_cast<uint32_t>(std::lround(part / most * full)));
  return rates;
}

std::optional<std::vector<NewRates::Rate>> RateWatch::note(uint32_t rank, const Goodput& goodput) {
  round_counts_[rank] += goodput.round_count;
  for (const Goodput::Link& link : goodput.links) {
    links_[link.reducer].add(link.bytes, link.us);
    planned_[link.reducer] = link.planned_rate;
  }
  if (!is_complete()) return std::nullopt;
  percents_ = measured(100);
  pace_ = 0;
  for (const auto& [number, sum] : links_) *pace_ += sum.rate();
  note_streaks(measured(NewRates::kFullRate));
  const Sums earlier = std::exchange(earlier_links_, links_);
  if (!is_off_for_long()) {
    start_look();
    return std::nullopt;
  }
  // The first look of the row may have begun before the rate changed.
  for (const auto& [number, sum] : earlier) links_[number].add(sum.bytes, sum.us);
  std::vector<NewRates::Rate> rates;
  for (const auto& [number, rate] : rates_to_follow()) rates.push_back({number, rate});
  begin_anew();
  return rates;
}

bool RateWatch::is_complete() const {
  const auto has_some = [](const auto& entry) { return entry.second > 0; };
  return static_cast<uint32_t>(std::ranges::count_if(round_counts_, has_some)) >= worker_count_;
}

// In parts of NewRates::kFullRate, as the measured ones are.
RateWatch::Rates RateWatch::planned() const {
  uint64_t most = 1;
  for (const auto& [number, rate] : planned_) most = std::max<uint64_t>(most, rate);
  Rates rates;
  for (const auto& [number, rate] : planned_) {
    rates[number] = std::max(1u, static_cast<uint32_t>(rate * uint64_t{NewRates::kFullRate} / most));
  }
  return rates;
}

void RateWatch::note_streaks(const Rates& measured) {
  const Rates planned_rates = planned();
  for (const auto& [number, rate] : measured) {
    const uint32_t planned_rate = planned_rates.at(number);
    int& streak = streaks_[number];
    if (is_above(snapped(rate), planned_rate)) {
      streak = std::max(streak, 0) + 1;
    } else if (is_above(planned_rate, snapped(rate))) {
      streak = std::min(streak, 0) - 1;
    } else {
      streak = 0;
    }
  }
}

bool RateWatch::is_off_for_long() const {
  return std::ranges::any_of(streaks_, [](const auto& entry) { return std::abs(entry.second) >= kLooks; });
}

// Of the reducers that were off in the last looks. The others keep what the plan has for them: what they seem to carry
// comes and goes a little.
RateWatch::Rates RateWatch::rates_to_follow() const {
  Rates rates = measured(NewRates::kFullRate);
  const Rates planned_rates = planned();
  for (auto& [number, rate] : rates) {
    const auto streak = streaks_.find(number);
    const bool is_off = streak != streaks_.end() && std::abs(streak->second) >= kLooks - 1;
    rate = is_off ? snapped(rate) : planned_rates.at(number);
  }
  return rates;
}

void RateWatch::start_look() {
  round_counts_.clear();
  links_.clear();
  planned_.clear();
}

void RateWatch::begin_anew() {
  start_look();
  earlier_links_.clear();
  streaks_.clear();
}

}  // namespace jaxhetero
