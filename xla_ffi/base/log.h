// The log: lines from native threads, which a Python thread takes and gives to Python's logging. Safe on any thread.
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

// A bounded queue of lines: if nobody reads, the oldest are dropped.
class EventLog {
 public:
  void add(Severity severity, std::string text);
  // Removes the oldest line. Blocks up to `patience` until there is one.
  std::optional<Event> next(std::chrono::milliseconds patience);

 private:
  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<Event> events_;
};

// A rate limit for lines about refused connections, of which anybody on the network can make many. Logs the first at
// once, then at most one every ten seconds, with the number of those skipped. One thread only.
class RefusalLog {
 public:
  // `now_ms` is any steady clock.
  void add(EventLog& log, Severity severity, std::string text, int64_t now_ms);

 private:
  uint64_t silent_count_ = 0;
  std::optional<int64_t> last_ms_;
};

}  // namespace jaxhetero
