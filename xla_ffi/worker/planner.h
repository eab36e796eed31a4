// By which plan a worker's rounds go: made anew for every view, from the rates of the reducers' interfaces, which are
// measured once, at the start of the job. All workers make the same plans of the same view.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/worker/rate_probe.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/shard_plan.h"

namespace jaxhetero {

class Planner {
 public:
  // `job` outlives the planner.
  explicit Planner(const JobShape& job) : job_(job) {}

  // A view begins, with these reducers. Before all else.
  void enter(const View& view);
  // Valid until the next view, or the end of the measurement.
  [[nodiscard]] const ShardPlan& plan_of(const RoundRequest& request) const;
  // Tells the reducers whether the workers' plans are alike; the same before and after the measurement.
  [[nodiscard]] uint64_t digest() const { return even_plan_->digest(); }

  // The measurement's next round; nothing once it is over, or if the job wants none. Lives as long as that round does.
  std::optional<RoundRequest> next_probe();
  // That round has its result.
  void finish_probe() { probe_->finish(is_undisturbed()); }
  [[nodiscard]] bool has_begun_probe() const { return probe_.has_value(); }
  // What was measured, when that is over:
  // "measured 23 MB/s; 50 % of that at reducer 3 (host c); windows of 20000 bytes where shards are large"
  [[nodiscard]] std::string rates_text() const;

 private:
  void begin_probe();
  void take_rates();
  void make_plans();
  [[nodiscard]] uint32_t rate_of(const View::Reducer& reducer) const;
  // In the view that the measurement began in.
  [[nodiscard]] bool is_undisturbed() const { return view_number_ == probe_view_; }

  const JobShape& job_;
  uint32_t view_number_ = 0;
  std::vector<View::Reducer> reducers_;         // of the view, as the next three
  std::vector<ReducerPlace> places_;            // as if all interfaces had one rate
  std::unique_ptr<const ShardPlan> even_plan_;  // from these; of internal rounds
  std::unique_ptr<const ShardPlan> plan_;       // by the rates that were measured

  std::optional<RateProbe> probe_;
  uint32_t probe_view_ = 0;
  std::vector<uint32_t> probed_;        // the numbers of its reducers
  std::map<uint32_t, uint32_t> rates_;  // by reducer number, as RateProbe gives them
  size_t window_bytes_ = 0;             // 0 while nothing is known
};

}  // namespace jaxhetero
