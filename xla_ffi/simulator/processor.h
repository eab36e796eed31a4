// The processors of simulated hosts: what a process does with a message takes time on one of their cores.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "xla_ffi/simulator/events.h"
#include "xla_ffi/simulator/network.h"

namespace jaxhetero::simulator {

// What a message costs the process that sends or receives it, and a call of the program its own.
struct Costs {
  double s_per_call = 0;
  double s_per_message = 0;
  double s_per_byte = 0;
  double wake_up_s = 0;  // the time before the first message after a pause
};

class Strand;

// Some cores, and the memory behind them. One or several hosts have it for themselves.
class Processor final : private EventHandler {
 public:
  // `memory_bytes_per_s`: of messages that go through its memory, all strands together; 0 for no limit.
  // `events` outlives the processor, and the processor its strands' last event.
  Processor(EventQueue& events, uint32_t core_count, double memory_bytes_per_s)
      : events_(events), idle_cores_(core_count), memory_bytes_per_s_(memory_bytes_per_s) {}

 private:
  friend class Strand;

  uint32_t add(Strand& strand);
  // The strand has something to do.
  void enqueue(Strand& strand);
  void run(Strand& strand);
  void run_next();
  void on_event(uint64_t what) override;

  EventQueue& events_;
  uint32_t idle_cores_;
  const double memory_bytes_per_s_;
  double memory_free_at_s_ = 0;
  std::vector<Strand*> strands_;
  std::deque<Strand*> ready_;
};

// A thread of a process, which handles its messages one after the other.
class Strand : public Receiver {
 public:
  Strand(Processor& processor, const Costs& costs)
      : processor_(processor), costs_(costs), number_(processor.add(*this)) {}
  Strand(const Strand&) = delete;
  Strand& operator=(const Strand&) = delete;

  void on_message(const Message& message) final;
  // The program calls: a message that came over no flow, and costs what a call does.
  void on_call(const FrameHeader& header) { on_message({kCall, 0, 0, header}); }
  // Busy on a core so far, in seconds.
  [[nodiscard]] double busy_s() const { return busy_s_; }

 protected:
  static constexpr uint32_t kCall = ~uint32_t{0};  // the number of a call, in place of a flow's

  // A message has been received and its time on the core is over.
  virtual void handle(const Message& message) = 0;
  // A message of so many bytes is sent: the strand is busy for its time from now on, or after what it handles now.
  void charge_send(uint32_t bytes);

 private:
  friend class Processor;

  Processor& processor_;
  const Costs costs_;
  const uint32_t number_;
  bool is_queued_ = false;  // the strand is on a core, or waits for one
  std::deque<Message> inbox_;
  bool has_message_ = false;  // the first one of the inbox is on the core
  double owed_s_ = 0;         // the time owed for messages that were sent
  uint64_t owed_bytes_ = 0;
  double busy_s_ = 0;
};

}  // namespace jaxhetero::simulator
