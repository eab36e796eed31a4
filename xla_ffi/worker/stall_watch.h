// Finds the running rounds that make no progress, and names the workers or reducers that they wait for.
//
// The strand asks check_rounds() a few times a second. A round stalls in one of two ways. Where reducers wait for
// workers, they say so (kLate), and the round fails once those workers have moved no data for its patience. Where some
// reducers are silent while others have answered, the job goes on without the silent ones, if it has failover.
//
// The strand's thread only.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/worker/reducer_link.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/schedule.h"

namespace jaxhetero {

class StallWatch {
 public:
  using Clock = EventLoop::Clock;
  using Accuse = std::function<void(const ReducerLink& reducer, const std::string& why)>;
  using AccuseWorkers = std::function<void(const std::vector<uint32_t>& ranks, const std::string& why)>;

  struct Config {
    std::string own_name;                     // "rank 3 (host b)"
    std::chrono::milliseconds timeout;        // the longest time that a round may go without progress
    std::chrono::milliseconds start_timeout;  // the same of the first round of what was compiled, if that is longer
  };

  // `accuse` tells the coordinator that a reducer is lost; null where the job has no failover. `accuse_workers`
  // tells it that workers are stuck; null where the job is not elastic. `schedule`, `links` and `log` outlive the
  // watch.
  StallWatch(Config config, const Schedule& schedule, const std::vector<ReducerLink>& links, EventLog& log,
             Accuse accuse, AccuseWorkers accuse_workers = nullptr);

  // Ok, or why the job fails: which round has made no progress for its patience, and which processes it waits for.
  Status check_rounds(Clock::time_point now);
  // Ok, or why the job fails: the view ended at `halted_at`, and no other one has come.
  [[nodiscard]] Status check_halt(Clock::time_point now, Clock::time_point halted_at) const;

  // A reducer says that the round waits for `late_workers`, of which `moving_count` still move data: slow, not stuck.
  // `disagree`: one of them waits in the same call over another group.
  void note_late(Round& round, const std::string& late_workers, uint32_t moving_count, bool disagree = false);

  // No round may go longer without progress than this from now on.
  void limit_patience(std::chrono::milliseconds most) { most_patience_ = most; }
  [[nodiscard]] bool has_limit() const { return most_patience_ < std::chrono::milliseconds::max(); }
  // What rounds have waited so far counts no longer, and whom they wait for is told again.
  void begin_anew();

 private:
  [[nodiscard]] std::chrono::milliseconds patience_with(const Round& round) const;
  bool accuse_silent(Round& round);
  bool accuse_absent(Round& round, const std::string& why);
  [[nodiscard]] std::string silent_reducers(const Round& round) const;

  const Config config_;
  const Schedule& schedule_;
  const std::vector<ReducerLink>& links_;
  EventLog& log_;
  const Accuse accuse_;
  const AccuseWorkers accuse_workers_;
  std::chrono::milliseconds most_patience_ = std::chrono::milliseconds::max();
};

}  // namespace jaxhetero
