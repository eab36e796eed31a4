#include "events.h"

#include <utility>

namespace jaxhetero {
namespace {
constexpr size_t kMaxEvents = 1000;
}  // namespace

void EventLog::add(Severity severity, std::string text) {
  {
    const std::lock_guard lock(mutex_);
    if (events_.size() == kMaxEvents) events_.pop_front();
    events_.push_back({severity, std::move(text)});
  }
  added_.notify_one();
}

std::optional<Event> EventLog::next(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  if (!added_.wait_for(lock, patience, [this] { return !events_.empty(); })) return std::nullopt;
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

}  // namespace jaxhetero
