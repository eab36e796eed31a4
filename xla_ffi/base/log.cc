#include "xla_ffi/base/log.h"

#include <string>
#include <utility>

namespace jaxhetero {
namespace {
constexpr size_t kMaxEvents = 1000;
constexpr int64_t kRefusalIntervalMs = 10000;
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

void RefusalLog::add(EventLog& log, Severity severity, std::string text, int64_t now_ms) {
  if (last_ms_.has_value() && now_ms - *last_ms_ < kRefusalIntervalMs) {
    ++silent_count_;
    return;
  }
  if (silent_count_ > 0) text += "; and before that " + std::to_string(silent_count_) + " more";
  last_ms_ = now_ms;
  silent_count_ = 0;
  log.add(severity, std::move(text));
}

}  // namespace jaxhetero
