// Lines for the log, on their way from native threads to Python's logging.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

namespace jaxhetero {

// The levels of Python's logging module.
enum class Severity : int { kInfo = 20, kWarning = 30 };

struct Event {
  Severity severity;
  std::string text;
};

// Bounded: when nobody reads, the oldest lines go. Any thread.
class EventLog {
 public:
  void add(Severity severity, std::string text);
  // The oldest line, waiting for one up to `patience`.
  std::optional<Event> next(std::chrono::milliseconds patience);

 private:
  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<Event> events_;
};

// Of connections that were refused, which anybody on the network can make as many of as he likes: the first is logged
// at once, and then at most one every ten seconds, with the number of those in between.
class RefusalLog {
 public:
  // `now_ms` is any steady clock.
  void add(EventLog& log, Severity severity, std::string text, int64_t now_ms);

 private:
  uint64_t silent_count_ = 0;
  std::optional<int64_t> last_ms_;
};

}  // namespace jaxhetero
