// The rounds of a worker's program, each as a whole: which run, what they counted, and when the program hears of their
// end. A round has a part for each strand that carries some of its bucket, and is over when all its parts are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "xla_ffi/base/counters.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/worker/callback_threads.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/timeline.h"

namespace jaxhetero {

// Any thread; nothing blocks. The communicator opens rounds, the strands report their parts.
class RoundLedger {
 public:
  using Time = RoundRecord::Time;

  // All outlive the ledger. `on_empty` is called when the last open round is over, on the thread that ended it.
  RoundLedger(Counters& counters, Timeline& timeline, CallbackThreads& callback_threads, std::function<void()> on_empty)
      : counters_(counters), timeline_(timeline), callback_threads_(callback_threads), on_empty_(std::move(on_empty)) {}

  // A round begins. Takes the request's `done` and `recorded`; the parts report to what is returned.
  std::shared_ptr<WholeRound> open(RoundRequest& request, size_t part_count);
  // A round that is complete here and runs again for others, in one part.
  std::shared_ptr<WholeRound> open_replay();

  // A part starts to push, perhaps not for the first time.
  void start_part(WholeRound& round, uint64_t number, Time now);
  // A part is over: complete, or given up.
  void finish_part(WholeRound& round, const StrandPart& strand_part, Time first_result,
                   std::span<const RoundRecord::Part> parts);
  void give_up_part(WholeRound& round, const Status& why);

  // Elastic jobs: all of a part's total is here; every member has it; or the part begins anew, and had got so far.
  void hold_part(WholeRound& round);
  // Returns whether all parts are safe: then the round may be given to the program.
  bool secure_part(WholeRound& round);
  void lose_hold(WholeRound& round, bool was_held, bool was_safe);
  // Whether every part is held, and whether there is no other part than one.
  [[nodiscard]] bool is_held(const WholeRound& round) const;
  [[nodiscard]] bool has_one_part(const WholeRound& round) const;

  // Whether no round is open.
  [[nodiscard]] bool is_empty() const;
  // "psum 3 (float32[10]) round 17", or "none".
  [[nodiscard]] std::string last_completed() const;
  // What a loss interrupts: "; running: ...; last completed: ...".
  [[nodiscard]] std::string circumstances() const;

 private:
  void end_part(WholeRound& round, std::unique_lock<std::mutex> lock);
  void record(WholeRound& round);

  Counters& counters_;
  Timeline& timeline_;
  CallbackThreads& callback_threads_;
  const std::function<void()> on_empty_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  size_t open_count_ = 0;
  std::set<const WholeRound*> running_;
  Time busy_since_;  // the time since when some round runs
  std::string last_completed_ = "none";
};

// Guarded by the mutex of its ledger.
class WholeRound {
  friend class RoundLedger;

  [[nodiscard]] std::string name() const {
    const RoundRecord& record = outcome_.entry.record;
    return record.description + " round " + std::to_string(record.number);
  }

  RoundOutcome outcome_;
  size_t part_count_ = 0;
  size_t open_part_count_ = 0;
  size_t held_part_count_ = 0;
  size_t safe_part_count_ = 0;
  bool is_replay_ = false;
  Status failure_;
  std::function<void(const Status&)> done_;
  std::function<void(const RoundOutcome&)> recorded_;
};

}  // namespace jaxhetero
