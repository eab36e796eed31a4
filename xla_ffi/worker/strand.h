// One strand of a worker: an event loop on a thread of its own, with links of its own to every reducer, which runs a
// part of the program's rounds. Strands share nothing on the way of a byte.
//
// The communicator owns the strands, gives them their parts of every round, and tells all of them of views, of the end
// and of failures.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/base/counters.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/elastic_messages.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/worker/chunk_coder.h"
#include "xla_ffi/worker/held_rounds.h"
#include "xla_ffi/worker/op.h"
#include "xla_ffi/worker/planner.h"
#include "xla_ffi/worker/reducer_link.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/round_ledger.h"
#include "xla_ffi/worker/schedule.h"
#include "xla_ffi/worker/shard_plan.h"
#include "xla_ffi/worker/stall_watch.h"

namespace jaxhetero {

// How often a strand, and the communicator, look at what has come of their work.
inline constexpr std::chrono::milliseconds kStrandWatchInterval{250};

// On the thread of its loop, but for the constructor. Nothing blocks.
class WorkerStrand final : private ConnectionOwner {
 public:
  struct Config {
    uint32_t rank = 0;
    std::string own_name;  // the worker's name: "rank 3 (host b)"
    JobShape job;
    std::chrono::milliseconds start_timeout{0};
    std::chrono::milliseconds timeout{0};
    Compress compress = Compress::kWhereFaster;
  };
  // Called on the strand's thread.
  struct Callbacks {
    std::function<void(uint32_t view)> on_joined;              // connected to all reducers of the view
    std::function<void(const Lost&)> on_lost;                  // a reducer is lost
    std::function<void(const Status&)> on_failure;             // the job has failed, as found here or told by a reducer
    std::function<void(const std::string& round)> on_waiting;  // a reducer says that this round waits for other workers
    // Of an elastic job.
    std::function<void(const std::shared_ptr<WholeRound>&)> on_safe;  // all parts of this round, which has several, are
    std::function<void(const Accusation&)> on_stuck;                  // other workers are stuck
  };

  // `log` and `ledger` outlive the strand.
  WorkerStrand(Config config, std::unique_ptr<TcpContext> context, EventLog& log, RoundLedger& ledger,
               Callbacks callbacks);

  // Starts the timers.
  void start();
  // Any thread.
  [[nodiscard]] Metrics metrics() const { return snapshot(*context_->counters); }

  // A view starts: connects to its reducers, which have these addresses, and then runs the rounds that its plans allow.
  void join(const View& view, const std::vector<TcpAddress>& addresses, const Plans& plans);
  // The view ends. Its connections close, so that no late frame of it can come in; its running rounds will run anew.
  // Returns how many rounds of each op are complete.
  std::vector<Progress::OpProgress> halt();
  // The same in an elastic job: what runs or is held stays as it is until join() tells what becomes of it.
  void pause();
  // All strands have paused: how far each op is.
  [[nodiscard]] std::vector<Report::Op> report() const { return held_rounds_.report(); }
  // Gives the program this round, if a part of it is here: all of them are safe.
  void give(const WholeRound& whole);

  // From now on the program's rounds come, and run by these plans.
  void open_to_program(const Plans& plans);

  // The plans are about to change: begins no more rounds. Returns how many of each op have begun.
  std::vector<Progress::OpProgress> hold();
  // They change, from these rounds on.
  void follow(const Plans& plans, const std::vector<NewRates::Begin>& begins);
  // What rounds have told of the links since the last call.
  struct LinkTimes {
    uint32_t round_count = 0;
    std::map<uint32_t, Goodput::Link> links;      // keyed by the reducer's number
    std::map<uint32_t, uint64_t> awaited_counts;  // likewise: its totals for which all other links waited
    uint64_t bytes = 0;                           // of the totals of rounds in step
    uint64_t us = 0;                              // the time in which these came

    void add(const LinkTimes& more);
  };
  LinkTimes take_link_times() { return std::exchange(link_times_, {}); }

  // From now on some rounds use states: reducers need to know who keeps them.
  void use_states();
  // A part of a round; or the whole of it.
  void start_round(RoundRequest part);
  // More bytes of some round's inputs are ready.
  void feed();
  // Tells the reducers that the worker waits in this round, on some strand. Who waits for the worker elsewhere hears
  // it.
  void tell_waiting(const std::string& round);
  // All workers have completed so many rounds.
  void forget(const Progress& completed) { schedule_.forget(completed); }
  // How many rounds of those ops are complete that came to rest since the last call.
  [[nodiscard]] std::vector<Progress::OpProgress> take_still();
  // In an elastic job nobody needs what is kept of them.
  void forget_still() { forget({0, take_still()}); }
  // The round that has had no total for longest, and for how long; nothing if none runs.
  [[nodiscard]] ProcessState state() const;

  // No round may go longer without progress than this from now on.
  void limit_patience(std::chrono::milliseconds most) { stall_watch_.limit_patience(most); }
  // Of an elastic job: rounds that wait for a worker do so until there is a coordinator, which lets the job go on.
  void note_coordinator(bool is_there);
  // Tells the reducers that no more rounds come.
  void say_goodbye();
  // Whether no reducer has still to be sent anything.
  [[nodiscard]] bool has_sent_all() const { return std::ranges::all_of(links_, &ReducerLink::has_sent_all); }
  // Closes the connections.
  void end_in_order();
  // Tells the reducers `word`, if it is an error, closes the connections and gives up all rounds for `why`.
  void fail(const Status& why, const Status& word);

 private:
  void resume();
  void replay(uint64_t op_id, uint64_t number);
  [[nodiscard]] bool may_start(const Op& op) const;
  void start_waiting();
  void run(Op& op, Round& round);
  void run_state(Op& op, Round& round);
  std::shared_ptr<const Plans> plans_for(Op& op, const Round& round);
  [[nodiscard]] bool is_to_be_timed(const Round& round, const ShardPlan& plan) const;
  void time_links(const Round& round);
  void time_in_step(const Round& round);
  void forget_times();
  void describe_op(Op& op, uint32_t reducer, const Range& share = {});
  void send_plan();
  void set_coding();
  [[nodiscard]] uint32_t place_of(uint32_t reducer) const;
  void send_step(const Round& round, uint32_t reducer);
  void feed_starved();
  void end_totals(Op& op);
  void finish_round(Op& op);
  void record(const Round& round);
  Status take_safe(const FrameHeader& header, uint32_t reducer);
  void settle(const View& view);

  void on_open(Connection& connection) override;
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override;
  Status on_frame(Connection& connection, const FrameHeader& header) override;
  void on_close(Connection& connection, const Status& why) override;
  [[nodiscard]] uint32_t reducer_of(const Connection& connection) const;
  Result<Segment*> segment_of(const FrameHeader& header, uint32_t reducer);
  Status place_result(const FrameHeader& header, uint32_t reducer, std::vector<iovec>& into);
  Status finish_result(const FrameHeader& header, uint32_t reducer);
  Status take_totals(const FrameHeader& header, const Bytes& payload);
  Status note_absent(const FrameHeader& header, const Bytes& ranks);
  Status note_late(const FrameHeader& header, const Bytes& late_workers);

  void watch();
  Status find_stall();
  void report_lost(const ReducerLink& link, const std::string& why);
  [[nodiscard]] StallWatch::Accuse accuse();
  [[nodiscard]] StallWatch::AccuseWorkers accuse_workers();

  const Config config_;
  const std::unique_ptr<TcpContext> context_;
  EventLog& log_;
  RoundLedger& ledger_;
  const Callbacks callbacks_;

  bool has_ended_ = false;
  bool is_open_to_program_ = false;
  bool uses_states_ = false;
  bool is_leaving_ = false;
  bool lacks_coordinator_ = false;
  View view_;
  Plans plans_;
  // The plans of an op's rounds before this one.
  struct EarlierPlans {
    uint64_t end = 0;
    std::shared_ptr<const Plans> plans;
  };
  std::map<uint64_t, std::deque<EarlierPlans>> earlier_plans_;  // keyed by op; of this view
  bool is_holding_ = false;                                     // the plans are about to change
  LinkTimes link_times_;
  LinkTimes step_times_;  // of rounds in step, of a step that is not over
  std::set<uint64_t> step_ops_;
  bool halted_ = true;  // the strand is not connected to all reducers of the view
  EventLoop::Clock::time_point halted_at_;
  EventLoop::Clock::time_point told_at_;  // on_waiting was called
  std::vector<ReducerLink> links_;        // indexed by place in the view
  Schedule schedule_;
  HeldRounds held_rounds_{schedule_, ledger_};  // of an elastic job
  StallWatch stall_watch_;
  std::vector<iovec> pieces_;             // the pieces of a total that is widened
  std::vector<RoundRecord::Part> parts_;  // the parts of a round that is over
};

}  // namespace jaxhetero
