// Measures the rates of the network interfaces at the start of a job, by rounds like those of the program.
//
// A probe pushes equal shards to all reducers of one sort, dedicated or inside workers, each as fast as its link
// allows: the time of a shard gives the rate of the interface behind it. After every probe the workers sum their times
// in a round as well, so that all of them compute the same rates from the same numbers. Probes grow until one takes
// long enough, and that size is repeated. Of each shard the shortest time counts: other work of a host only lengthens
// it.
//
// The planner owns the probe and the communicator runs its rounds. One thread; nothing blocks.
#pragma once

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

  // `rail_count`: the most interfaces of any host, of which each carries an equal part of every shard.
  RateProbe(uint32_t worker_count, const std::vector<ReducerPlace>& reducers, const ShardPlan::Pace& pace,
            uint32_t rail_count = 1);

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

 private:
  enum class Phase : uint8_t { kMeeting, kPushing, kAgreeing, kOver };

  RoundRequest push_request();
  RoundRequest agree_request();
  void start_sort(bool colocated);
  void start_size(uint64_t bytes);
  void evaluate();
  void conclude_dedicated();
  void conclude_colocated();
  void conclude_rails();
  void note_us(size_t place, int64_t us);
  // Of a reducer, or behind them of a rail.
  [[nodiscard]] uint64_t mean_us(size_t place) const;

  const uint32_t worker_count_;
  const std::vector<ReducerPlace> reducers_;
  const ShardPlan::Pace pace_;  // the pace while nothing is known
  const uint32_t rail_count_;
  Phase phase_ = Phase::kMeeting;

  bool colocated_ = false;  // the sort that is probed
  uint64_t probed_count_ = 0;
  uint64_t probe_bytes_ = 0;
  int probe_count_ = 0;  // the probes of this size
  std::shared_ptr<const ShardPlan> plan_;

  // 1, or 0 if disturbed here; then by reducer, and by rail, how long its part took here, in us.
  std::vector<int64_t> own_;
  std::vector<int64_t> totals_;  // the sums of all workers' own_
  std::vector<uint32_t> rates_;
  std::vector<uint32_t> rail_rates_;
  uint64_t bytes_per_s_ = 0;
  size_t window_bytes_ = 0;
};

}  // namespace jaxhetero
