// The plans of a worker's rounds. A plan is made for every view, from the rates of the reducers' interfaces. These are
// measured at the start of the job, and followed later where that is possible. All workers make the same plans of the
// same view and rates.
//
// The communicator owns it and runs the rounds of the measurement. One thread.
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
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/wire/state_plan.h"
#include "xla_ffi/worker/part_plan.h"
#include "xla_ffi/worker/rate_probe.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/shard_plan.h"
#include "xla_ffi/worker/timeline.h"

namespace jaxhetero {

// From what the plan learns of rates that change.
enum class Follows : uint8_t {
  kNothing,
  kLinks,  // from what each link carries, in rounds whose links need not go in step
  kWaits,  // from whom the links of ordinary rounds wait for: reducers share the interfaces of workers
};

// What strands need to know of the plans.
struct Plans {
  struct Reducer {
    ReducerPlace place;
    int32_t colocated_rank = -1;  // the rank of the worker that it is in; -1 for a dedicated reducer
  };
  std::shared_ptr<const ShardPlan> even;     // the plan of internal rounds, as if all interfaces had one rate
  std::shared_ptr<const ShardPlan> program;  // the plan of the program's rounds, from the measured rates
  // The probe's own plan is for the reducers of the view in which it started. In a later view, workers that have the
  // rates may replay a round of the measurement for others that do not, so internal rounds are cut evenly.
  bool is_undisturbed = true;
  // What the plan of a group follows from, beside its members.
  std::vector<Reducer> reducers;
  std::shared_ptr<const StatePlan> states;  // the plan of ops that use a state
  ShardPlan::Pace pace;
  bool is_slower_than_codes = false;  // the network, as measured, is slower than a strand codes and decodes
  Follows follows = Follows::kNothing;

  [[nodiscard]] std::shared_ptr<const ShardPlan> plan_of(const RoundRequest& request) const {
    if (request.plan && is_undisturbed) return request.plan;
    if (!request.spec.group.empty()) return std::make_shared<ShardPlan>(plan_of_group(request.spec));
    return request.is_internal ? even : program;
  }
  // By which reducers see whether all workers have the same plan. The measurement does not change it.
  [[nodiscard]] uint64_t digest() const { return even->digest(); }

 private:
  [[nodiscard]] ShardPlan plan_of_group(const OpSpec& spec) const;
};

class Planner {
 public:
  // `job` outlives the planner.
  explicit Planner(const JobShape& job) : job_(job) {}

  // A view starts, with these reducers. Called before all else.
  void enter(const View& view);
  // Of the view, and of what has been measured so far.
  [[nodiscard]] Plans plans() const {
    return {even_plan_,  plan_, !probe_ || is_undisturbed(), rated_,
            state_plan_, pace_, is_slower_than_codes(),      follows()};
  }
  // The coordinator names these rates. Plans of states stay as they are, because states do.
  void follow(const NewRates& rates);
  // What the plan of the view has for each reducer, and for a byte; nothing that was timed.
  [[nodiscard]] Goodput planned() const;
  // Which strand carries which part of a round. Valid until the next view or the end of the measurement.
  [[nodiscard]] const PartPlan& parts_of(const RoundRequest& request) const {
    if (request.plan != nullptr) return probe_parts_;
    return request.is_internal ? even_parts_ : parts_;
  }

  // The latest view that has been entered, and its plan of states, as Report has it. Before the first: nothing.
  [[nodiscard]] uint32_t view_number() const { return view_number_; }
  [[nodiscard]] Bytes encoded_states() const { return state_plan_ ? encode(*state_plan_) : Bytes(); }

  // The measurement's next round; nothing once it is over, or if the job wants none. The planner outlives the round.
  std::optional<RoundRequest> next_probe();
  // That round is complete.
  void finish_probe(const RoundOutcome& round);
  [[nodiscard]] bool has_started_probe() const { return probe_.has_value(); }
  // What it has found of the costs of messages; 0 if nothing.
  [[nodiscard]] const MessageCosts& costs() const { return pace_.costs; }
  // The outcome of a measurement that is over, for the log:
  // "measured 23 MB/s; 50 % of that at reducer 3 (host c); windows of 20000 bytes where shards are large"
  [[nodiscard]] std::string rates_text() const;

 private:
  void start_probe();
  void take_rates();
  void make_plans();
  [[nodiscard]] StatePlan make_state_plan() const;
  [[nodiscard]] StatePlan next_state_plan(const View& view) const;
  [[nodiscard]] bool is_slower_than_codes() const;
  [[nodiscard]] Follows follows() const;
  [[nodiscard]] uint64_t planned_time() const;
  [[nodiscard]] uint32_t strands_for_rates() const;
  [[nodiscard]] std::vector<uint32_t> strand_shares() const;
  [[nodiscard]] uint32_t rate_of(const View::Reducer& reducer) const;
  [[nodiscard]] uint32_t rate_with_cores(const View::Reducer& reducer) const;
  [[nodiscard]] uint32_t rate_now_of(const View::Reducer& reducer) const;
  [[nodiscard]] uint32_t fine_rate_of(const View::Reducer& reducer) const;
  // Whether this is still the view that the measurement started in.
  [[nodiscard]] bool is_undisturbed() const { return view_number_ == probe_view_; }

  const JobShape& job_;
  uint32_t worker_count_ = job_.worker_count;  // of the view
  uint32_t view_number_ = 0;
  std::vector<View::Reducer> reducers_;  // the reducers of the view
  std::vector<ReducerPlace> places_;     // the same, as if all interfaces had one rate
  std::vector<Plans::Reducer> rated_;    // the same, with the rates that are known
  ShardPlan::Pace pace_;                 // the pace of the program's rounds
  std::shared_ptr<const ShardPlan> even_plan_;
  std::shared_ptr<const ShardPlan> plan_;
  // A state stays where it is, so its plan follows from the first view and from what became of that.
  struct ViewOfStates {
    std::vector<StatePlan::Member> members;
    bool is_settled = false;
  };
  std::vector<View::Reducer> first_reducers_;
  std::vector<ViewOfStates> later_views_;
  std::shared_ptr<const StatePlan> state_plan_;
  uint32_t most_strands_ = 1;  // the strands that every process of the job has
  uint32_t rail_count_ = 1;
  uint32_t strand_count_ = 1;  // the strands that carry a large round of the program
  PartPlan even_parts_{job_, {1}};
  PartPlan probe_parts_{job_, {1}};  // the parts of the next probe: for all of its strands, and so all interfaces
  PartPlan parts_{job_, {1}};
  std::vector<uint32_t> rail_rates_;  // the rates that RateProbe gives; empty while nothing is known

  std::optional<RateProbe> probe_;
  uint32_t probe_view_ = 0;
  std::vector<uint32_t> probed_;                 // the numbers of the probed reducers
  std::map<uint32_t, uint32_t> rates_;           // the rates that RateProbe gives, keyed by reducer number
  std::map<uint32_t, uint32_t> followed_rates_;  // the latest NewRates, likewise; empty before the first
  size_t window_bytes_ = 0;  // the window to one reducer, over all strands; 0 while nothing is known
};

}  // namespace jaxhetero
