// Finds the worker whose interface has become slow, for which all rounds wait. No plan helps there, so that it is only
// named.
//
// Every worker has to come to every chunk, so all run at the pace of the slowest, and what their links carry does not
// tell who that is. Reducers know: they have the chunk of all others already. So a look has two parts: the pace of the
// rounds that workers time (rate_watch.h), and the workers that reducers wait for at some moment. A worker is slow once
// the pace has been below the best one so far by more than a third in several looks in a row, and most reducers waited
// for it and nobody else. The pace counts from a round's first total on, to which all have come: a worker that is late
// to a round is not slow.
//
// The coordinator owns it. Pure: no clock, no I/O.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

namespace jaxhetero {

class WorkerWatch {
 public:
  static constexpr int kLooks = 4;  // how many in a row have to agree

  // Takes a look: its pace, in any unit; and of each reducer that waited for one worker alone, whom. True when slow()
  // has changed.
  bool note(double pace, const std::vector<uint32_t>& awaited);
  // Whether it is to be asked whom reducers wait for.
  [[nodiscard]] bool is_low() const { return 3 * pace_ < 2 * best_pace_; }
  // The plan has changed: what is the best pace now has to be seen. Not while a worker is slow: that it is as fast as
  // before would not be seen.
  void change_plan();

  // The worker that is slow now.
  [[nodiscard]] std::optional<uint32_t> slow() const { return slow_; }
  // The pace of the latest look, in percent of the best one.
  [[nodiscard]] uint32_t percent() const { return static_cast<uint32_t>(std::lround(100 * pace_ / best_pace_)); }

 private:
  double pace_ = 0;       // of the latest look
  double best_pace_ = 0;  // that two looks in a row have reached
  std::optional<uint32_t> slow_;
  std::optional<uint32_t> found_;  // by the latest looks; nothing: all are as fast as they were
  int look_count_ = 0;             // how many of these there were in a row
};

}  // namespace jaxhetero
