// Follows what interfaces carry in a job with reducers inside workers, and says when the plan should follow.
//
// There, links share interfaces, so that what one carries tells nothing of its reducer alone. But all others wait for
// whom has a slow interface: reducers for what a worker pushes, and workers for the totals of a dedicated reducer. A
// look is a word of every worker on its rounds: how fast they were compared with the plan, and for which reducer they
// waited. Once rounds are slower by more than a third (slow_watch.h), the plan has less for that interface: how slow
// they are is how slow it is.
//
// The plan then may not wait for that interface, so that nothing tells when it is as fast as before. After a number of
// looks the plan has as much for it as at first, to try; earlier, if rounds become faster than by the plan. If they are
// slow then, that is taken back, and the next trial comes after twice as many looks.
//
// Where the pace stays as it was although the plan has less for an interface, that was not the reason: all have their
// first rates again, and the pace of now is the measure from then on.
//
// Of a worker that was slow from the start, no earlier pace tells: the start sees only that all workers are as slow as
// the slowest one. So where reducers wait for the same worker in several looks in a row, the plan has half as much for
// the reducer inside it for some looks, to try. Unless rounds are faster by a quarter, it has as much as before again.
// Trials of this sort become ever rarer: most are for nothing, since some worker always is the last one.
//
// The coordinator owns it. Pure: no clock, no I/O.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "xla_ffi/membership/slow_watch.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

class WaitWatch {
 public:
  // How many looks in a row without a slow reducer are between a change of the plan and a trial.
  static constexpr int kFirstTrial = 8;
  static constexpr int kLastTrial = 2048;

  explicit WaitWatch(uint32_t worker_count) : worker_count_(worker_count) {}

  // Takes a worker's word. True when the look is complete.
  bool add(uint32_t rank, const Goodput& goodput);
  // Of a complete look: how fast rounds were compared with the plan; and the reducer for which most workers waited.
  [[nodiscard]] double pace() const;
  [[nodiscard]] std::optional<uint32_t> awaited_reducer() const;
  // Ends it. `awaited`: the reducer for whose interface all waited; `is_inside`: the worker, rather, that it is inside.
  // Returns the rates of all reducers that the plan should follow, if they change.
  std::optional<std::vector<NewRates::Rate>> end_look(std::optional<uint32_t> awaited, bool is_inside);
  // A plan that is tried: with as much for a reducer as at first, or with half as much as now.
  struct Trial {
    uint32_t reducer = 0;
    bool has_less = false;
    uint32_t rate_before = 0;
    int look_count = 0;
    int fast_look_count = 0;  // of those, how many were faster than before by a quarter
  };
  [[nodiscard]] const std::optional<Trial>& trial() const { return trial_; }
  // Whether it is to be told for whom all wait even though rounds are as fast as ever.
  [[nodiscard]] bool may_try_less() const { return look_count_ + SlowWatch::kLooks >= next_try_of_less_; }
  // The reducers have changed: what comes from now on is another matter.
  void begin_anew();

  // What the plan has for it, in percent of what it had at first; 0 where that is the same.
  [[nodiscard]] uint32_t percent_of_reducer(uint32_t number) const;

 private:
  using Rates = std::map<uint32_t, uint32_t>;

  [[nodiscard]] double measured_pace() const { return bytes_by_plan_ / us_; }
  void note_awaited(std::optional<uint32_t> awaited, double speed);
  void slow_down(uint32_t reducer);
  void give_up();
  bool begin_trial(bool is_fast);
  bool begin_trial_of_less();
  bool end_trial(double speed);
  bool end_trial_of_less();
  void start_look();

  uint32_t worker_count_;
  // Of the look that is being taken.
  std::map<uint32_t, int32_t> awaited_;  // keyed by rank: for which reducer it waited
  double bytes_ = 0;
  double bytes_by_plan_ = 0;  // a byte is as much as the time that the plan has for it
  double us_ = 0;
  // Of those before. All rates are those of the plan, keyed by reducer.
  SlowWatch slow_watch_;
  Rates rates_;                   // of the reducers that the latest word named
  Rates first_rates_;             // of the reducers that are slow: those before
  double pace_before_ = 0;        // the plan has last slowed a reducer down
  bool has_helped_ = true;        // rounds are faster since then
  int quiet_look_count_ = 0;      // in a row, since the plan has changed
  int next_trial_ = kFirstTrial;  // after so many of them
  uint32_t last_tried_ = 0;
  std::optional<Trial> trial_;
  std::optional<uint32_t> awaited_inside_;  // by the latest looks without a trial
  int awaited_look_count_ = 0;              // how many of these there were in a row
  double awaited_speed_ = 0;                // the fastest of them, in bytes per us
  int look_count_ = 0;                      // since the last trial of less
  int next_try_of_less_ = kFirstTrial;      // after so many of them
};

}  // namespace jaxhetero
