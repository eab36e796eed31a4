// Our own all-reduce in virtual time: workers that push by the worker's plan, window and push rule, and reducers that
// are the reducer's state machine.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/reducer/state_machine.h"
#include "xla_ffi/simulator/events.h"
#include "xla_ffi/simulator/job.h"
#include "xla_ffi/simulator/network.h"
#include "xla_ffi/simulator/processor.h"
#include "xla_ffi/worker/planner.h"
#include "xla_ffi/worker/push_rule.h"
#include "xla_ffi/worker/round.h"

namespace jaxhetero::simulator {

class TwoHop;

// One strand of a worker.
class SimulatedWorker final : public Strand {
 public:
  SimulatedWorker(TwoHop& job, Processor& processor, uint32_t rank, uint32_t strand);

  // In the reducers' order: the flow that pushes go through.
  void add_link(uint32_t flow);
  // The program asks for the round of this part.
  void call(const RoundRequest& part, uint64_t number);

 private:
  struct Running {
    Round round;
    std::vector<Segment*> segments;  // indexed by reducer
  };
  class Link final : public ChunkSender {
   public:
    Link(SimulatedWorker& worker, uint32_t flow);
    Sent send_chunk(const Round& round, const FrameHeader& header) override;
    PushRule rule;

   private:
    SimulatedWorker& worker_;
    const uint32_t flow_;
  };

  void handle(const Message& message) override;
  void start_round(Running& running);
  void finish_result(Running& running, const Message& message);

  TwoHop& job_;
  const uint32_t rank_;
  const uint32_t strand_;
  std::deque<Link> links_;
  std::unordered_map<uint64_t, std::unique_ptr<Running>> running_;  // keyed by op
};

// One strand of a reducer.
class SimulatedReducer final : public Strand {
 public:
  SimulatedReducer(TwoHop& job, Processor& processor, uint32_t number);

  // In the ranks' order: the flow that totals go through.
  void add_link(uint32_t flow) { flows_.push_back(flow); }
  Status describe_op(uint32_t rank, uint64_t op, const OpSpec& spec);

 private:
  void handle(const Message& message) override;

  TwoHop& job_;
  std::vector<uint32_t> flows_;
  ReducerStateMachine machine_;
  std::vector<Outgoing> outgoing_;
};

class TwoHop final : private EventHandler {
 public:
  TwoHop(const Cluster& cluster, const JobConfig& config);
  ~TwoHop() override;
  TwoHop(const TwoHop&) = delete;
  TwoHop& operator=(const TwoHop&) = delete;

  // Runs so many events at most. Returns whether the job is at its end.
  Result<bool> run(uint64_t most_events);

  // By step and rank: when the worker had ended it.
  [[nodiscard]] const std::vector<double>& step_ends_s() const { return step_ends_s_; }
  // By host, and of a host by interface.
  [[nodiscard]] std::vector<double> sent_bytes() const;
  [[nodiscard]] std::vector<double> received_bytes() const;
  // Indexed by process: workers, dedicated reducers, co-located reducers.
  [[nodiscard]] std::vector<double> busy_s() const;
  [[nodiscard]] uint64_t event_count() const { return events_.past_count(); }
  [[nodiscard]] uint64_t lost_count() const { return network_.lost_count(); }
  [[nodiscard]] const std::string& rates_text() const { return rates_text_; }

 private:
  friend class SimulatedWorker;
  friend class SimulatedReducer;

  // A moment of a step at which the program has something to do with a bucket, or ends.
  struct Moment {
    enum class Kind : uint8_t { kNeedsTotal, kIsReady, kEnds };

    double time_s = 0;  // after the step's start, where the program waits for no total
    Kind kind = Kind::kEnds;
    uint32_t bucket = 0;
  };
  // A worker's program: steps, one after the other.
  struct TrainLoop {
    uint32_t step = 0;
    size_t moment = 0;               // the place of the next one
    std::vector<size_t> open_parts;  // by bucket: the parts of its round that runs
    bool is_waiting = false;         // for the totals of that moment
  };

  // `what`: a rank. Its program has come to its next moment.
  void on_event(uint64_t what) override;
  void connect();
  void cut_buckets();
  void plan_moments();
  void start_step(uint32_t rank);
  // The program goes on until it has to compute or to wait.
  void proceed(uint32_t rank);
  [[nodiscard]] bool waits(const TrainLoop& loop, const Moment& moment) const;
  [[nodiscard]] double slowdown(uint32_t rank) const;
  void end_part(uint32_t rank, const RoundRequest& part);
  void fail(const Status& why) {
    if (failure_.ok()) failure_ = why;
  }
  [[nodiscard]] uint32_t interface_of(uint32_t host, uint32_t strand) const;
  [[nodiscard]] Round::Time now() const;
  [[nodiscard]] SimulatedWorker& worker(uint32_t rank, uint32_t strand) {
    return *workers_[rank * config_.strand_count + strand];
  }
  [[nodiscard]] SimulatedReducer& reducer(uint32_t number, uint32_t strand) {
    return *reducers_[number * config_.strand_count + strand];
  }

  const Cluster cluster_;
  const JobConfig config_;
  EventQueue events_;
  Network network_;
  std::vector<std::unique_ptr<Processor>> processors_;
  std::vector<uint32_t> first_interface_;  // indexed by host
  Plans plans_;
  std::string rates_text_;
  std::vector<std::unique_ptr<SimulatedWorker>> workers_;
  std::vector<std::unique_ptr<SimulatedReducer>> reducers_;
  std::vector<std::vector<RoundPart>> parts_;  // indexed by bucket
  std::vector<Moment> moments_;                // of each step, in their order
  std::vector<TrainLoop> train_loops_;         // indexed by rank
  std::vector<double> step_ends_s_;
  size_t ended_count_ = 0;  // steps of workers
  Status failure_;
};

}  // namespace jaxhetero::simulator
