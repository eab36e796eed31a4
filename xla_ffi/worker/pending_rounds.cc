#include "xla_ffi/worker/pending_rounds.h"

#include <chrono>
#include <random>
#include <utility>

namespace jaxhetero {
namespace {

constexpr size_t kMostNamed = 5;      // so many rounds are named in a message
constexpr size_t kManyUntaken = 256;  // so many rounds of an op are worth a warning

uint64_t unlike_any_other() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace

PendingRounds::PendingRounds(Counters& counters, EventLog& log, CallbackThreads& callback_threads)
    : counters_(counters), log_(log), callback_threads_(callback_threads), owner_(unlike_any_other()) {}

Ticket PendingRounds::add(std::string description, PendingTotal total) {
  ++counters_.pending_count;
  counters_.pending_bytes += total.bytes;
  const std::lock_guard lock(mutex_);
  Untaken& untaken = untaken_[description];
  if (++untaken.count == kManyUntaken && !std::exchange(untaken.is_warned_of, true)) {
    log_.add(Severity::kWarning, std::to_string(kManyUntaken) + " rounds of " + description +
                                     " were started and not finished; their memory is held until "
                                     "jaxhetero.psum_done finishes them");
  }
  Pending& pending = pending_[++last_number_];
  pending.description = std::move(description);
  pending.total = std::move(total);
  return {owner_, last_number_};
}

void PendingRounds::end(const Ticket& ticket, const Status& status) {
  Pending over;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(ticket.number);
    if (found == pending_.end()) return;
    found->second.outcome = status;
    if (!found->second.taken) return;
    over = remove(found);
  }
  const auto waited = EventLoop::Clock::now() - over.waits_since;
  counters_.done_wait_us +=
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(waited).count());
  over.taken(status, over.total);
}

Status PendingRounds::take(const Ticket& ticket, size_t result_bytes, Taken taken) {
  if (ticket.owner != owner_) {
    return {Code::kInvalidArgument,
            "the round was started by another process, or before this one has joined the job; finish a round where it "
            "was started, and before a checkpoint"};
  }
  Pending over;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(ticket.number);
    if (found == pending_.end() || found->second.taken) {
      return {Code::kInvalidArgument, "the round has been finished already; each can be finished once"};
    }
    Pending& pending = found->second;
    if (pending.total.result_bytes() != result_bytes) {
      return {Code::kInvalidArgument,
              "the round is one of " + pending.description + ", whose total has another size; finish what was started"};
    }
    if (!pending.outcome.has_value()) {
      pending.taken = std::move(taken);
      pending.waits_since = EventLoop::Clock::now();
      return {};
    }
    over = remove(found);
  }
  callback_threads_.run(
      [taken = std::move(taken), status = *over.outcome, total = std::move(over.total)] { taken(status, total); });
  return {};
}

PendingRounds::Pending PendingRounds::remove(std::map<uint64_t, Pending>::iterator at) {
  Pending over = std::move(at->second);
  pending_.erase(at);
  --untaken_[over.description].count;
  --counters_.pending_count;
  counters_.pending_bytes -= over.total.bytes;
  return over;
}

std::string PendingRounds::describe_untaken() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  size_t count = 0;
  for (const auto& [number, pending] : pending_) {
    if (++count > kMostNamed) break;
    text += (text.empty() ? "" : ", ") + pending.description;
  }
  if (pending_.size() > kMostNamed) text += " and " + std::to_string(pending_.size() - kMostNamed) + " more";
  return text;
}

}  // namespace jaxhetero
