// Measures the rates of the network interfaces at the start of a job, by rounds like those of the program.
//
// A probe pushes equal shards to all reducers of one sort, dedicated or inside workers, each as fast as its link
// allows: the time of a shard gives the rate of the interface behind it. After every probe the workers sum their times
// in a round as well, so that all of them compute the same rates from the same numbers. Probes grow until one takes
// long enough, and that size is repeated. Of each shard the shortest time counts: other work of a host only lengthens
// it.
//
// Where that keeps the cores of the strands busy, a second series has larger chunks. What both take of the cores tells
// what a message and a byte cost. Where the cores were the limit of the first series, the second one gives the rates.
//
// The planner owns the probe and the communicator runs its rounds. One thread; nothing blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/shard_plan.h"

namespace jaxhetero {

class RateProbe {
 public:
  static constexpr uint32_t kFullRate = 16;  // stands for the fastest dedicated reducer's interface

  // `rail_count`: the most interfaces of any host, of which each carries an equal part of every shard, as does each of
  // `strand_count` strands.
  RateProbe(uint32_t worker_count, const std::vector<ReducerPlace>& reducers, const ShardPlan::Pace& pace,
            uint32_t rail_count = 1, uint32_t strand_count = 1);

  // The next round to run; nothing once the probe is over. The probe outlives the round.
  std::optional<RoundRequest> next();
  // How long the shard of one reducer took in a round.
  struct ShardTime {
    size_t reducer = 0;  // the reducer's place in the constructor's list
    int64_t us = 0;
  };
  struct Times {
    std::vector<ShardTime> shards;
    std::vector<int64_t> rails_us;  // the longest of each rail
    int64_t cpu_ns = 0;             // the time of all strands on cores
    int64_t message_count = 0;      // the chunks that they pushed and the totals that they received
  };
  // That round is complete. `undisturbed`: in the view that the probe started in.
  void finish(bool undisturbed, const Times& times);

  // By reducer: the rate of its interface, in sixteenths of the fastest dedicated reducer's; empty if any worker was
  // disturbed. A dedicated reducer's within an eighth of the fastest counts as equal to it, a worker's within a third.
  [[nodiscard]] const std::vector<uint32_t>& rates() const { return rates_; }
  // By rail, in sixteenths of the fastest one; empty if any worker was disturbed. Within an eighth counts as equal.
  [[nodiscard]] const std::vector<uint32_t>& rail_rates() const { return rail_rates_; }
  // Of the fastest dedicated reducer, or of workers where there are none; 0 if any worker was disturbed.
  [[nodiscard]] uint64_t bytes_per_s() const { return bytes_per_s_; }
  // The bytes that one link carries in the time that its window should bridge.
  [[nodiscard]] size_t window_bytes() const { return window_bytes_; }
  // What a message and a byte of it cost a worker, in the mean of all; 0 where the cores had little to do.
  [[nodiscard]] const MessageCosts& costs() const { return costs_; }
  // The highest rate that was seen, in either series.
  [[nodiscard]] uint64_t most_bytes_per_s() const { return std::max(most_bytes_per_s_, bytes_per_s_); }

 private:
  enum class Phase : uint8_t { kMeeting, kPushing, kAgreeing, kOver };

  RoundRequest push_request();
  RoundRequest agree_request();
  void start_sort(bool colocated);
  void start_size(uint64_t bytes);
  void start_large_chunks();
  void make_plan(const ShardPlan::Pace& pace);
  void evaluate();
  void conclude();
  void end_sort();
  void conclude_dedicated();
  void conclude_colocated();
  void conclude_rails();
  void conclude_costs();
  [[nodiscard]] uint64_t slowest_us() const;
  [[nodiscard]] uint64_t rate_of_sort() const;
  void note_us(size_t place, int64_t us);
  // Of a reducer, or behind them of a rail.
  [[nodiscard]] uint64_t mean_us(size_t place) const;
  // Of the probes of this size: a message, with its bytes; 0 if nothing is known.
  [[nodiscard]] uint64_t message_ps() const;
  [[nodiscard]] uint64_t message_bytes() const;
  // How long the cores were busy in 1/16 of the time that the shards took.
  [[nodiscard]] uint64_t busy_part() const;

  const uint32_t worker_count_;
  const std::vector<ReducerPlace> reducers_;
  const ShardPlan::Pace pace_;  // the pace while nothing is known
  const uint32_t rail_count_;
  const uint32_t strand_count_;
  Phase phase_ = Phase::kMeeting;

  bool colocated_ = false;  // the sort that is probed
  uint64_t probed_count_ = 0;
  uint64_t probe_bytes_ = 0;
  int probe_count_ = 0;              // the probes of this size
  bool has_large_chunks_ = false;    // the second series
  bool wants_large_chunks_ = false;  // the cores were busy in the first series of the first sort
  bool is_bound_by_cores_ = false;   // they were its limit
  uint64_t small_message_ps_ = 0;    // the costs of its messages
  uint64_t small_message_bytes_ = 0;
  std::shared_ptr<const ShardPlan> plan_;

  // 1, or 0 if disturbed here; then by reducer, and by rail, how long its part took here, in us; then the time on cores
  // in ns, and the number of messages.
  std::vector<int64_t> own_;
  std::vector<int64_t> totals_;  // the sums of all workers' own_
  std::vector<uint32_t> rates_;
  std::vector<uint32_t> rail_rates_;
  uint64_t bytes_per_s_ = 0;
  uint64_t most_bytes_per_s_ = 0;
  size_t window_bytes_ = 0;
  MessageCosts costs_{};
};

}  // namespace jaxhetero
