// Follows what the reducers' interfaces carry while a job runs, and says when the plan should follow.
//
// Workers time some of their rounds and report what came over each link, in what time (Goodput). Once all have, that is
// a look: a rate for each reducer, relative to what half of them carry, by the plan. The plan follows when a reducer's
// rate has been off the plan's by more than a fifth in several looks in a row, to the same side. So a moment's trouble
// changes nothing, nor does what slows all links, such as a slow worker: that one no plan can help.
//
// The coordinator owns it. Pure: no clock, no I/O.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

class RateWatch {
 public:
  static constexpr int kLooks = 4;  // how many in a row have to agree

  explicit RateWatch(uint32_t worker_count) : worker_count_(worker_count) {}

  // Takes a worker's word. Returns the rates of all reducers that the plan should follow, once they are off for long
  // enough; and forgets all looks then.
  std::optional<std::vector<NewRates::Rate>> note(uint32_t rank, const Goodput& goodput);
  // What a worker's links carried together in the look that note() has completed since the last call.
  [[nodiscard]] std::optional<double> take_pace() { return std::exchange(pace_, std::nullopt); }
  // The plan or the reducers have changed: what comes from now on is another matter.
  void begin_anew();

  // As of the latest look, in percent of a full rate; 0 while nothing is known.
  [[nodiscard]] uint32_t percent_of_reducer(uint32_t number) const {
    const auto found = percents_.find(number);
    return found == percents_.end() ? 0 : found->second;
  }

 private:
  struct Sum {
    uint64_t bytes = 0;
    uint64_t us = 0;

    void add(uint64_t more_bytes, uint64_t more_us) {
      bytes += more_bytes;
      us += more_us;
    }
    [[nodiscard]] double rate() const { return us == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(us); }
  };
  using Sums = std::map<uint32_t, Sum>;
  using Rates = std::map<uint32_t, uint32_t>;

  [[nodiscard]] Rates measured(uint32_t full) const;
  [[nodiscard]] bool is_complete() const;
  [[nodiscard]] Rates planned() const;
  void note_streaks(const Rates& measured);
  [[nodiscard]] Rates rates_to_follow() const;
  [[nodiscard]] bool is_off_for_long() const;
  void start_look();

  uint32_t worker_count_;
  // Of the look that is being taken.
  std::map<uint32_t, uint32_t> round_counts_;  // keyed by rank
  Sums links_;                                 // keyed by reducer
  Rates planned_;                              // keyed by reducer, in any unit
  // Of those before.
  std::optional<double> pace_;
  Sums earlier_links_;               // of the latest one
  std::map<uint32_t, int> streaks_;  // keyed by reducer: the looks in a row that were above the plan; below: negative
  Rates percents_;                   // keyed by reducer
};

}  // namespace jaxhetero
