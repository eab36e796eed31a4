// Finds the process whose interface has become slow, for which all rounds wait.
//
// Where everything waits for one, all links run at its pace, and what they carry does not tell who that is. Those that
// wait know for whom. So a look has two parts: the pace of the rounds that workers time, and whom others waited for. A
// process is slow once the pace has been below the best one so far by more than a third in several looks in a row, and
// most waited for it and nobody else. The pace counts from a round's first total on, to which all have come: a worker
// that is late to a round is not slow.
//
// Of workers, reducers know: they have the chunk of all others already. Without a reducer inside, such a worker is
// only named, because no plan helps there. Of reducers, workers know: see wait_watch.h.
//
// Pure: no clock, no I/O.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace jaxhetero {

// The process for which more than half of so many wait; `awaited` has that of each that waits for one alone.
std::optional<uint32_t> most_awaited(const std::vector<uint32_t>& awaited, size_t count);

class SlowWatch {
 public:
  static constexpr int kLooks = 4;  // how many in a row have to agree

  // Takes a look: its pace, in any unit; and for whom the others waited, if for one alone. True when slow() has
  // changed.
  bool note(double pace, std::optional<uint32_t> awaited);
  // Whether it is to be asked who is waited for.
  [[nodiscard]] bool is_low() const { return 3 * pace_ < 2 * best_pace_; }
  // The plan has changed, and the pace is in a unit that does not follow it: what is the best pace now has to be seen.
  // Not while a worker is slow: that it is as fast as before would not be seen.
  void change_plan();
  // The plan has followed the one that was slow.
  void forget_slow();

  // The process that is slow now.
  [[nodiscard]] std::optional<uint32_t> slow() const { return slow_; }
  [[nodiscard]] double best_pace() const { return best_pace_; }
  [[nodiscard]] double pace() const { return pace_; }  // of the latest look
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
