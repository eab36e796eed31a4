#include "xla_ffi/worker/pending_rounds.h"

#include <chrono>
#include <random>
#include <utility>

namespace jaxhetero {
namespace {

constexpr size_t kMostNamed = 5;  // so many rounds are named in a message

uint64_t unlike_any_other() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace

PendingRounds::PendingRounds(Counters& counters, CallbackThreads& callback_threads)
    : counters_(counters), callback_threads_(callback_threads), owner_(unlike_any_other()) {}

Ticket PendingRounds::add(std::string description, PendingTotal total) {
  ++counters_.pending_count;
  counters_.pending_bytes += total.bytes;
  const std::lock_guard lock(mutex_);
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
    over = std::move(found->second);
    pending_.erase(found);
  }
  const auto waited = EventLoop::Clock::now() - over.waits_since;
  counters_.done_wait_us +=
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(waited).count());
  --counters_.pending_count;
  counters_.pending_bytes -= over.total.bytes;
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
    over = std::move(pending);
    pending_.erase(found);
  }
  --counters_.pending_count;
  counters_.pending_bytes -= over.total.bytes;
  callback_threads_.run(
      [taken = std::move(taken), status = *over.outcome, total = std::move(over.total)] { taken(status, total); });
  return {};
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
