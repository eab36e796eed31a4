// The coordinator: gathers the processes of a job, and decides which reducers are in use.
//
// Start. Every worker and reducer registers here. Once all have, the coordinator tells the reducers who the members
// are. Once every reducer is ready, it sends view 0 to the workers, which then connect to the reducers.
//
// Changes. Rounds do not pass through the coordinator, but its connections and heartbeats tell it when a process dies.
// A lost worker ends the job. A lost reducer ends the job too, unless the job has failover: then, and when a reducer
// joins later, the coordinator makes a new view. It halts the workers. Each reports how many rounds of each op it has
// completed. Once all have, it sends them the new view: the reducers, and the ops of which some workers have completed
// a round that others have not. Only rank 0 runs a coordinator, so there is one opinion; if rank 0 is lost, the job
// ends.
//
// Rates. Workers report what their links carry. When that is off the plan for long enough (rate_watch.h), the
// coordinator has the workers hold: each begins no more rounds, and reports how many of each op have begun. For each op
// the new rates hold from the first round that nobody has begun. All other rounds run on meanwhile. A view that changes
// before the rounds are named wins.
//
// Forgetting. A worker may free an idle op's kept contribution once all workers have completed the same rounds of that
// op. Workers report idle ops (kStill); the coordinator tells all when they agree (kForget).
//
// Answering. A visitor, who knows the token and is no process of the job, asks how it is doing. The coordinator asks
// all members, waits a second for their answers, and tells the visitor: also that of some there was none.
//
// Leaving. A worker that has no more rounds says goodbye. The coordinator releases it once no worker has a round
// running: until then, others may need the contributions that it keeps. Where ops have groups, others may still run
// rounds without it, and need its reducer and its voice in changes. So all workers are released together then.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/membership/heartbeat.h"
#include "xla_ffi/membership/rate_watch.h"
#include "xla_ffi/membership/slow_watch.h"
#include "xla_ffi/membership/wait_watch.h"
#include "xla_ffi/transport/connection.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/transport/tcp_listener.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

// Runs in rank 0's process, on the thread of its event loop; never blocks. Owned by the Communicator. What is virtual
// is otherwise in an elastic job: see ElasticCoordinator.
class Coordinator : protected ConnectionOwner {
 public:
  Coordinator(TcpContext& context, JobShape job, std::string version, EventLog& log);
  ~Coordinator() override = default;

  // Binds and listens, on all that are this host's. On any thread, before the loop runs.
  Status bind(const std::vector<TcpAddress>& addresses);
  // Accepts connections. Fails the job if anybody is missing after `patience`; later, if a worker does not answer a
  // halt within `timeout`, or a process is silent for most of it. On the loop's thread, like end().
  virtual Status start(std::chrono::milliseconds patience, std::chrono::milliseconds timeout);
  // Rank 0 leaves: says goodbye to everybody who is still connected, and calls `done` when their connections are
  // closed.
  void end(std::function<void()> done);
  // The rank of the worker whose interface has become slow; -1 if none has. Any thread.
  [[nodiscard]] int32_t slow_rank() const { return slow_rank_; }
  // The reducers whose interfaces carry less than three quarters of a full rate. Any thread.
  struct SlowReducer {
    uint32_t number = 0;
    uint32_t percent = 0;
  };
  [[nodiscard]] std::vector<SlowReducer> slow_reducers() const;

 protected:
  // A process that is connected to the coordinator.
  struct Guest {
    // Everybody:  kConnected  -> kRegistered   admit()
    // A reducer:  kRegistered -> kReady        on_ready()
    //             kReady      -> kReleased     lose_reducer()
    // A worker:   kRegistered -> kLeaving      on_goodbye()
    //             kLeaving    -> kReleased     release_idle(), and then no view changes any more
    //             kRegistered, kLeaving, kHalted -> kHalting   change_view()
    //             kHalting    -> kHalted       on_progress()
    //             kHalted     -> kRegistered   on_progress() of the last worker; goodbyes are said anew
    // A worker that comes to an elastic job later: kConnected -> kCandidate -> kRegistered, where all meet. The reducer
    // inside it comes with it: kConnected -> kCandidate -> kReady.
    enum class Phase : uint8_t { kConnected, kCandidate, kRegistered, kReady, kHalting, kHalted, kLeaving, kReleased };

    [[nodiscard]] bool is_registered() const { return phase != Phase::kConnected; }
    [[nodiscard]] bool is_worker() const { return is_registered() && registration.role == Role::kWorker; }
    [[nodiscard]] bool is_reducer() const { return is_registered() && registration.role == Role::kReducer; }
    // Of a reducer that has one.
    [[nodiscard]] uint32_t number() const { return static_cast<uint32_t>(registration.number); }
    // Still takes part in the job.
    [[nodiscard]] bool is_member() const { return phase > Phase::kCandidate && phase != Phase::kReleased; }

    std::shared_ptr<TcpConnection> connection;
    Bytes control;  // payload of the frame that is coming in
    Phase phase = Phase::kConnected;
    bool idle = false;        // the worker has no round running: its answer to kLeaving, which may come in any phase
    bool holds = false;       // the worker has answered kHold
    bool is_present = false;  // of a candidate: the worker's program waits at a gate, or the reducer is ready
    bool is_visitor = false;  // the guest has asked how the job is doing
    std::optional<ProcessState> answer;  // the answer to the latest question of the coordinator
    std::optional<Settled> settled;      // the latest kSettled of a reducer
    Heartbeat heartbeat;
    Registration registration;
  };

  void on_open(Connection&) override {}
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override;
  Status on_frame(Connection& connection, const FrameHeader& header) override;
  void on_close(Connection& connection, const Status& why) override;

  [[nodiscard]] virtual bool takes(const Guest& guest, FrameType type) const;
  virtual Status on_frame_of_elastic(Guest& guest, const FrameHeader& header);
  virtual void on_fault(const Guest& guest, const Status& why);
  virtual Status on_ready(Guest& guest);
  void on_lost(const Lost& lost);
  Status on_progress(Guest& guest, const Progress& progress);
  Status on_still(const Guest& guest, const Progress& progress);
  Status on_goodput(const Guest& guest, Goodput goodput);
  void follow_links(uint32_t rank, const Goodput& goodput);
  void follow_waits(uint32_t rank, const Goodput& goodput);
  [[nodiscard]] std::optional<uint32_t> reducer_inside(uint32_t rank) const;
  [[nodiscard]] std::vector<uint32_t> awaited_workers() const;
  [[nodiscard]] bool has_answers() const;
  void watch_workers(double pace, std::optional<uint32_t> awaited, bool asks);
  void tell_slow(std::optional<uint32_t> before);
  void note_slow_reducers();
  [[nodiscard]] std::string name_of_worker(uint32_t rank) const;
  [[nodiscard]] std::string name_of_reducer(uint32_t number) const;  // one of the view
  void change_rates(std::vector<NewRates::Rate> rates);
  Status on_begun(Guest& guest, const Progress& begun);
  void name_rounds();
  [[nodiscard]] uint32_t rate_percent(const Registration& process) const;
  [[nodiscard]] uint32_t percent_of_reducer(uint32_t number) const;
  [[nodiscard]] bool can_change_rates() const;
  [[nodiscard]] std::string describe(const std::vector<NewRates::Rate>& rates) const;
  [[nodiscard]] std::string describe_trial(const std::optional<WaitWatch::Trial>& before, bool changes) const;
  void on_idle(Guest& guest, const Idle& idle);
  virtual void on_goodbye(Guest& guest, const Idle& idle);
  void release_idle();
  void lose_reducer(uint32_t number, const std::string& why);
  void let_go(Guest& guest, uint32_t number, const std::string& why);
  virtual void lose_worker(uint32_t rank, const std::string& why);
  virtual void lose(const Registration& process, const std::string& why);
  virtual void lose_silent(const std::vector<Registration>& workers, const std::string& why);
  virtual void note_settled();
  virtual void change_view(const std::string& why);
  virtual void note_members() {}
  virtual void tell_view();
  virtual bool beat();
  [[nodiscard]] bool is_cut_off() const;
  void ask_whether_idle();
  [[nodiscard]] std::vector<View::Resume> rounds_to_resume() const;
  [[nodiscard]] uint32_t member_count(uint32_t group_size) const {
    return group_size == 0 ? job_.worker_count : group_size;
  }
  void add_to_view(const Guest& reducer, uint32_t since);

  Status on_ask(Guest& visitor);
  Status on_state(Guest& guest);
  void tell_state();
  [[nodiscard]] JobState state() const;
  void tell_members(JobState& job) const;

  virtual Status admit(Guest& guest, Registration registration);
  Status check(const Registration& registration) const;
  [[nodiscard]] const Guest* find_reducer(uint32_t number) const;
  void give_number(Registration& reducer) const;
  void refuse(Connection& connection, const Status& why);
  virtual void refuse_all(const Status& why);
  virtual void consider_start();
  void tell_reducers();
  void tell_workers();
  void report_missing();
  void give_up();
  [[nodiscard]] uint32_t rail_count() const;
  [[nodiscard]] uint32_t strand_count() const;
  [[nodiscard]] std::string missing() const;
  [[nodiscard]] size_t count(Role role) const;
  [[nodiscard]] size_t dedicated_count() const;

  enum class Phase : uint8_t {
    kGathering,            // lasts until everybody has registered
    kReducersToldMembers,  // lasts until every reducer is ready
    kStarted,
    kChanging,  // lasts until every worker has answered the halt
    kEnded,     // rank 0 left
    kFailed,
  };

  TcpContext& context_;
  JobShape job_;
  std::string version_;
  EventLog& log_;
  std::vector<std::unique_ptr<TcpListener>> listeners_;  // one for each address
  std::map<Connection*, Guest> guests_;
  View view_;
  Phase phase_ = Phase::kGathering;
  Status fault_;  // why the job failed
  std::string last_refusal_;
  RefusalLog refusals_;
  std::chrono::milliseconds patience_{0};
  std::chrono::milliseconds timeout_{0};
  // Rounds of an op that workers have completed, over the reports of a change of view.
  struct Completed {
    uint32_t reports = 0;
    uint32_t group_size = 0;  // all workers where it is 0
    uint64_t least = 0;
    uint64_t most = 0;
  };
  std::unordered_map<uint64_t, Completed> completed_;  // keyed by op; empty but while the view changes
  // Workers that report the same progress in an op that they do not run.
  struct Still {
    uint64_t completed_count = 0;
    std::set<int32_t> ranks;  // the workers that have completed so many rounds and run no more
  };
  std::unordered_map<uint64_t, Still> still_;  // keyed by op
  RateWatch rate_watch_;                       // where all reducers are dedicated
  WaitWatch wait_watch_;                       // where some are inside workers
  SlowWatch worker_watch_;
  std::atomic<int32_t> slow_rank_{-1};
  mutable std::mutex slow_mutex_;
  std::vector<SlowReducer> slow_reducers_;     // guarded by slow_mutex_
  std::optional<NewRates> new_rates_;          // those that workers hold for
  std::map<uint64_t, uint64_t> begun_counts_;  // keyed by op: the most rounds that any of them has begun
  bool is_asking_ = false;                     // the workers, whether they are idle
  bool has_groups_ = false;                    // some worker has said that it has run an op of a group
  bool has_visitors_ = false;                  // visitors wait for an answer
  EventLoop::TimerId visit_ends_ = 0;
  bool has_released_ = false;  // a worker: from then on no view changes
  std::function<void()> on_empty_;
};

}  // namespace jaxhetero
