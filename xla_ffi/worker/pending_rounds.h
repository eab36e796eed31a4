// The rounds that outlive the program that starts them: from the moment when one begins until a program takes its
// total, in the same program or in a later one.
//
// The strands know nothing of this. To them such a round is like any other: its contribution and its total lie in
// memory of ours, and it is over when its total is there, taken or not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "xla_ffi/base/counters.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/worker/callback_threads.h"

namespace jaxhetero {

// What a program has of a pending round, as an array of uint32[4].
struct Ticket {
  uint64_t owner = 0;   // the process and its part in a job, unlike that of any other
  uint64_t number = 0;  // the number of the round, unlike that of any other of the owner
};
static_assert(sizeof(Ticket) == 4 * sizeof(uint32_t));

// The memory that a total is received into.
struct PendingTotal {
  std::shared_ptr<std::byte> memory;
  size_t bytes = 0;
  std::optional<DType> narrow;  // the 16-bit floats that it has in place of float32

  [[nodiscard]] size_t result_bytes() const { return narrow.has_value() ? 2 * bytes : bytes; }
};

// Any thread; nothing blocks.
class PendingRounds {
 public:
  // Gets the total, or why there is none.
  using Taken = std::function<void(const Status&, const PendingTotal& total)>;

  // All outlive this object.
  PendingRounds(Counters& counters, EventLog& log, CallbackThreads& callback_threads);

  // A round begins, whose total will be there. A program that starts rounds and never takes them loses memory in each
  // step: the log says so once of each op.
  Ticket add(std::string description, PendingTotal total);
  // It is over, well or badly. Called on one of the callback threads.
  void end(const Ticket& ticket, const Status& status);
  // Calls `taken` once the round is over, on one of the callback threads. An error, and no call, if there is no such
  // round or it has been taken before; the message goes behind the name of the op.
  Status take(const Ticket& ticket, size_t result_bytes, Taken taken);

  // What no program has taken, for a message; empty if there is nothing.
  [[nodiscard]] std::string describe_untaken() const;

 private:
  using Time = EventLoop::Clock::time_point;
  struct Pending {
    std::string description;
    PendingTotal total;
    std::optional<Status> outcome;
    Taken taken;  // set while a program waits
    Time waits_since;
  };

  // What nobody needs any more.
  Pending remove(std::map<uint64_t, Pending>::iterator at);

  Counters& counters_;
  EventLog& log_;
  CallbackThreads& callback_threads_;
  const uint64_t owner_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  uint64_t last_number_ = 0;
  std::map<uint64_t, Pending> pending_;  // keyed by number
  struct Untaken {
    size_t count = 0;
    bool is_warned_of = false;
  };
  std::map<std::string, Untaken> untaken_;  // keyed by description
};

}  // namespace jaxhetero
