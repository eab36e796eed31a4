#include "xla_ffi/worker/stall_watch.h"

#include <algorithm>
#include <utility>

namespace jaxhetero {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

constexpr milliseconds kReportInterval{5000};

}  // namespace

StallWatch::StallWatch(Config config, const Schedule& schedule, const std::vector<ReducerLink>& links, EventLog& log,
                       Accuse accuse, AccuseWorkers accuse_workers)
    : config_(std::move(config)),
      schedule_(schedule),
      links_(links),
      log_(log),
      accuse_(std::move(accuse)),
      accuse_workers_(std::move(accuse_workers)) {}

Status StallWatch::check_rounds(Clock::time_point now) {
  for (const auto& [op_id, op] : schedule_.ops()) {
    if (op.running() == nullptr) continue;
    Round& round = *op.running();
    const milliseconds patience = patience_with(round);
    if (now - std::max(round.times.progress_at, round.delay.moved_at) < patience || accuse_silent(round)) continue;
    const std::string& late_workers = round.delay.late_workers;
    std::string text = config_.own_name + ": ";
    text += late_workers.empty() ? "no word from " + silent_reducers(round)
                                 : "still waiting for " + late_workers + ": no progress";
    text += " for " + std::to_string(patience.count()) + " ms in " + round.name();
    if (accuse_absent(round, text)) continue;
    return {round.delay.disagree ? Code::kMismatch : Code::kRoundTimeout, text};
  }
  return {};
}

// The first round of a call that was compiled waits for the slowest compiler of the job as well.
milliseconds StallWatch::patience_with(const Round& round) const {
  const bool is_first = round.number == 0 || round.request.is_compiled_anew;
  return std::min(is_first ? std::max(config_.timeout, config_.start_timeout) : config_.timeout, most_patience_);
}

Status StallWatch::check_halt(Clock::time_point now, Clock::time_point halted_at) const {
  const milliseconds patience = 2 * config_.timeout;
  if (now - halted_at < patience) return {};
  return {Code::kRoundTimeout,
          config_.own_name + ": the coordinator has sent no new view for " + std::to_string(patience.count()) + " ms"};
}

// The silent reducers wait for no worker, or they would have said so. Once a round.
bool StallWatch::accuse_silent(Round& round) {
  const auto is_silent = [](const Segment& segment) { return !segment.done; };
  const auto silent_count = static_cast<size_t>(std::ranges::count_if(round.segments, is_silent));
  if (!accuse_ || round.delay.has_accused || !round.delay.late_workers.empty() || silent_count == links_.size())
    return false;
  for (const Segment& segment : round.segments) {
    if (is_silent(segment)) accuse_(links_[segment.shard.reducer], "it has said nothing in " + round.name());
  }
  round.delay.has_accused = true;
  round.times.progress_at = Clock::now();
  return true;
}

// The coordinator may let the job go on without them. Once a round.
bool StallWatch::accuse_absent(Round& round, const std::string& why) {
  if (!accuse_workers_ || round.delay.has_accused_absent || round.delay.absent.empty()) return false;
  accuse_workers_(round.delay.absent, why);
  round.delay.has_accused_absent = true;
  round.times.progress_at = Clock::now();
  return true;
}

void StallWatch::begin_anew() {
  for (const auto& [op_id, op] : schedule_.ops()) {
    if (op.running() == nullptr) continue;
    op.running()->times.progress_at = Clock::now();
    op.running()->delay.has_accused_absent = false;
  }
}

std::string StallWatch::silent_reducers(const Round& round) const {
  std::string names;
  for (const Segment& segment : round.segments) {
    if (segment.done) continue;
    names += (names.empty() ? "" : ", ") + links_[segment.shard.reducer].name();
  }
  return names;
}

void StallWatch::note_late(Round& round, const std::string& late_workers, uint32_t moving_count, bool disagree) {
  const Clock::time_point now = Clock::now();
  round.delay.late_workers = late_workers;
  round.delay.disagree = disagree;
  if (moving_count > 0) round.delay.moved_at = now;
  if (now < round.delay.next_report_at) return;
  round.delay.next_report_at = now + kReportInterval;
  const auto waited = duration_cast<milliseconds>(now - round.times.progress_at);
  log_.add(Severity::kWarning, "waiting for " + round.delay.late_workers + " since " + std::to_string(waited.count()) +
                                   " ms in " + round.name() +
                                   (moving_count > 0 ? "; data still moves there, slowly" : ""));
}

}  // namespace jaxhetero
