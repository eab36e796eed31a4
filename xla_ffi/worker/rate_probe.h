// Finds the rates of the network interfaces at the start of a job, by rounds that go the way all rounds go.
//
// A probe pushes equal shards to all reducers of one sort, dedicated or inside workers, each as fast as it goes: the
// time of a shard tells the rate of the interface behind it. After every probe the workers sum their times in a round
// as well, so that all of them compute the same from the same numbers. Probes grow until one takes long enough, which
// is repeated: of each shard the shortest time counts, since what else a host does only makes it longer.
#pragma once

#include <chrono>
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
  static constexpr uint32_t kFullRate = 16;  // of the fastest dedicated reducer's interface

  RateProbe(uint32_t worker_count, const std::vector<ReducerPlace>& reducers, const ShardPlan::Pace& pace);

  // The next round to run; nothing once the probe is over. Lives as long as that round does.
  std::optional<RoundRequest> next();
  // That round has its result. `undisturbed`: in the view that the probe began in.
  void finish(bool undisturbed);

  // By reducer, of the interface it is behind, in sixteenths of the fastest dedicated one's; empty if something came in
  // between. Dedicated ones that differ from it by no more than an eighth count as equal, workers by less than a third.
  [[nodiscard]] const std::vector<uint32_t>& rates() const { return rates_; }
  // Of dedicated reducers, or of workers where there are none; 0 if something came in between.
  [[nodiscard]] uint64_t bytes_per_s() const { return bytes_per_s_; }
  // What one link carries in the time that its window should bridge.
  [[nodiscard]] size_t window_bytes() const { return window_bytes_; }

 private:
  using Clock = std::chrono::steady_clock;
  enum class Stage : uint8_t { kMeeting, kPushing, kAgreeing, kOver };

  RoundRequest push_request();
  RoundRequest agree_request();
  void note_received(size_t begin, size_t bytes);
  void probe(bool colocated);
  void begin_size(uint64_t bytes);
  void evaluate();
  void conclude_dedicated();
  void conclude_colocated();
  [[nodiscard]] uint64_t mean_us(size_t reducer) const;

  const uint32_t worker_count_;
  const std::vector<ReducerPlace> reducers_;
  const ShardPlan::Pace pace_;  // while nothing is known
  Stage stage_ = Stage::kMeeting;

  bool colocated_ = false;  // which sort is probed
  uint64_t probed_count_ = 0;
  uint64_t probe_bytes_ = 0;
  int probe_count_ = 0;  // of that size
  std::shared_ptr<const ShardPlan> plan_;
  std::vector<Shard> shards_;       // of the running probe, in order
  std::vector<size_t> left_bytes_;  // of each of them
  Clock::time_point begin_;

  std::vector<int64_t> own_;     // 1, or 0 if this was disturbed; how long each reducer's shard took here, in us
  std::vector<int64_t> totals_;  // of all workers
  std::vector<uint32_t> rates_;
  uint64_t bytes_per_s_ = 0;
  size_t window_bytes_ = 0;
};

}  // namespace jaxhetero
