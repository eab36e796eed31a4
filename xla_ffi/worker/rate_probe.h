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
// All strands carry these probes. Where fewer are enough for the rate that they have found, by what a strand carries on
// a slow core, a last series has only those. Which number is faster depends on what else the cores of the hosts do.
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
  // `strand_count` strands. `chooses_strands`: that is the most that there may be.
  RateProbe(uint32_t worker_count, const std::vector<ReducerPlace>& reducers, const ShardPlan::Pace& pace,
            uint32_t rail_count = 1, uint32_t strand_count = 1, bool chooses_strands = false);

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
  // The strands that carry it.
  [[nodiscard]] uint32_t pushing_strand_count() const { return has_few_strands_ ? few_strands_ : strand_count_; }
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
  // The strands that carry large rounds best: all, or fewer where these are no slower.
  [[nodiscard]] uint32_t best_strand_count() const { return best_strand_count_; }
  // The highest rate that was seen, in either series.
  [[nodiscard]] uint64_t most_bytes_per_s() const { return std::max(most_bytes_per_s_, bytes_per_s_); }

 private:
  enum class Phase : uint8_t { kMeeting, kPushing, kAgreeing, kOver };

  RoundRequest push_request();
  RoundRequest agree_request();
  void start_sort(bool colocated);
  void start_size(uint64_t bytes);
  void start_large_chunks();
  void consider_few_strands();
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
  const bool chooses_strands_;
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
  bool has_few_strands_ = false;  // the last series
  uint32_t few_strands_ = 0;      // its strands; 0 before it is known whether there is one
  uint32_t best_strand_count_;
  uint64_t first_probe_bytes_ = 0;  // of the first series: the size of its last probes, and how long they took
  uint64_t first_slowest_us_ = 0;
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
