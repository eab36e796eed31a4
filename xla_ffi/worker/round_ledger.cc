#include "xla_ffi/worker/round_ledger.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "xla_ffi/sum/reduce.h"

namespace jaxhetero {

using std::chrono::duration_cast;
using std::chrono::microseconds;

std::shared_ptr<WholeRound> RoundLedger::open(RoundRequest& request, size_t part_count) {
  auto round = std::make_shared<WholeRound>();
  RoundRecord& record = round->outcome_.entry.record;
  record.description = request.description;
  record.bytes = request.spec.total_count * item_bytes(request.spec.dtype);
  record.requested = request.requested_at;
  round->part_count_ = round->open_part_count_ = part_count;
  round->done_ = std::exchange(request.done, nullptr);
  round->recorded_ = std::exchange(request.recorded, nullptr);
  const std::lock_guard lock(mutex_);
  ++open_count_;
  return round;
}

std::shared_ptr<WholeRound> RoundLedger::open_replay() {
  auto round = std::make_shared<WholeRound>();
  round->open_part_count_ = 1;
  round->is_replay_ = true;
  const std::lock_guard lock(mutex_);
  ++open_count_;
  return round;
}

void RoundLedger::start_part(WholeRound& round, uint64_t number, Time now) {
  const std::lock_guard lock(mutex_);
  RoundRecord& record = round.outcome_.entry.record;
  if (round.is_replay_ || !running_.insert(&round).second) return;
  record.number = number;
  record.first_push = now;
  if (running_.size() == 1) busy_since_ = now;
}

void RoundLedger::finish_part(WholeRound& round, const StrandPart& strand_part, Time first_result,
                              std::span<const RoundRecord::Part> parts) {
  std::unique_lock lock(mutex_);
  if (round.recorded_) round.outcome_.strand_parts.push_back(strand_part);
  RoundRecord& record = round.outcome_.entry.record;
  record.first_result = record.first_result == Time() ? first_result : std::min(record.first_result, first_result);
  record.end = std::max(record.end, strand_part.end);
  for (const RoundRecord::Part& part : parts) {
    const auto same = std::ranges::find(round.outcome_.entry.parts, part.reducer, &RoundRecord::Part::reducer);
    if (same == round.outcome_.entry.parts.end()) {
      round.outcome_.entry.parts.push_back(part);
    } else {
      same->bytes += part.bytes;
      same->end = std::max(same->end, part.end);
    }
  }
  end_part(round, std::move(lock));
}

void RoundLedger::give_up_part(WholeRound& round, const Status& why) {
  std::unique_lock lock(mutex_);
  if (round.failure_.ok()) round.failure_ = why;
  end_part(round, std::move(lock));
}

void RoundLedger::end_part(WholeRound& round, std::unique_lock<std::mutex> lock) {
  if (--round.open_part_count_ > 0) return;
  const bool is_last = --open_count_ == 0;
  if (running_.erase(&round) > 0 && running_.empty()) {
    const Time end = round.failure_.ok() ? round.outcome_.entry.record.end : EventLoop::Clock::now();
    counters_.busy_us += static_cast<uint64_t>(duration_cast<microseconds>(end - busy_since_).count());
  }
  if (!round.is_replay_ && round.failure_.ok()) record(round);
  lock.unlock();
  if (round.done_) {
    callback_threads_.run([done = std::move(round.done_), status = round.failure_] { done(status); });
  }
  if (is_last) on_empty_();
}

void RoundLedger::record(WholeRound& round) {
  if (round.recorded_) return round.recorded_(round.outcome_);
  last_completed_ = round.name();
  ++counters_.round_count;
  counters_.bucket_bytes += round.outcome_.entry.record.bytes;
  timeline_.add(std::move(round.outcome_.entry.record), round.outcome_.entry.parts);
}

void RoundLedger::hold_part(WholeRound& round) {
  const std::lock_guard lock(mutex_);
  ++round.held_part_count_;
}

bool RoundLedger::secure_part(WholeRound& round) {
  const std::lock_guard lock(mutex_);
  return ++round.safe_part_count_ == round.part_count_;
}

void RoundLedger::lose_hold(WholeRound& round, bool was_held, bool was_safe) {
  const std::lock_guard lock(mutex_);
  round.held_part_count_ -= was_held ? 1 : 0;
  round.safe_part_count_ -= was_safe ? 1 : 0;
}

bool RoundLedger::is_held(const WholeRound& round) const {
  const std::lock_guard lock(mutex_);
  return round.held_part_count_ == round.part_count_;
}

bool RoundLedger::has_one_part(const WholeRound& round) const {
  const std::lock_guard lock(mutex_);
  return round.part_count_ == 1;
}

bool RoundLedger::is_empty() const {
  const std::lock_guard lock(mutex_);
  return open_count_ == 0;
}

std::string RoundLedger::last_completed() const {
  const std::lock_guard lock(mutex_);
  return last_completed_;
}

std::string RoundLedger::circumstances() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const WholeRound* round : running_) {
    text += "; running: " + round->name();
    if (text.size() > 1000) break;
  }
  return text + "; last completed: " + last_completed_;
}

}  // namespace jaxhetero
