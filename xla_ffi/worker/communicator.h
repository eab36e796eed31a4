// A worker's part of a job: it joins the job and each of its views, has its strands run the program's rounds, and
// leaves or fails.
//
// Each strand has an event loop on a thread of its own, and links of its own to the reducers. The communicator itself
// lives on the first strand's thread; the program's threads only put requests into an inbox. The end of a round is told
// on other threads again (callback_threads.h). A round's inputs and outputs belong to the program, and are touched
// until its `done` is called.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/base/block_pool.h"
#include "xla_ffi/base/cores.h"
#include "xla_ffi/base/counters.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/inbox.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/loop_group.h"
#include "xla_ffi/base/memory_nodes.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/channel/channels.h"
#include "xla_ffi/channel/transfer.h"
#include "xla_ffi/membership/coordinator.h"
#include "xla_ffi/membership/member.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/worker/callback_threads.h"
#include "xla_ffi/worker/gate.h"
#include "xla_ffi/worker/launch_order.h"
#include "xla_ffi/worker/pending_rounds.h"
#include "xla_ffi/worker/planner.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/round_ledger.h"
#include "xla_ffi/worker/state_models.h"
#include "xla_ffi/worker/strand.h"
#include "xla_ffi/worker/timeline.h"

namespace jaxhetero {

struct CommunicatorConfig {
  uint32_t rank = 0;
  JobShape job;
  std::string coordinator;           // "host:port"
  std::vector<std::string> sources;  // the addresses to connect from, an interface each; none: the routes decide
  std::string host;                  // listens for channels on this address; empty: on every one
  Bytes token;
  std::string host_name;
  std::string version;
  std::chrono::milliseconds start_timeout{0};
  std::chrono::milliseconds timeout{0};  // the longest time that a round may go without progress
  bool shared_memory = true;             // reducers on this host, and workers that have channels, share memory
  Compress compress = Compress::kWhereFaster;
  uint32_t most_strands = 1;        // the strands that this process can run, where the job does not say how many
  std::vector<Cores> memory_nodes;  // the cores of each that this process may use
  std::string fabric = "off";       // see FabricChoice
  bool encrypt = false;             // all that goes over sockets
};

// These settings by name, beside those of `job`: the names are those of jaxhetero.config.Config.
template <typename Visit>
void for_each_worker_setting(Visit&& visit) {
  visit("rank", &CommunicatorConfig::rank);
  visit("coordinator", &CommunicatorConfig::coordinator);
  visit("sources", &CommunicatorConfig::sources);
  visit("host", &CommunicatorConfig::host);
  visit("token", &CommunicatorConfig::token);
  visit("start_timeout_ms", &CommunicatorConfig::start_timeout);
  visit("timeout_ms", &CommunicatorConfig::timeout);
  visit("shared_memory", &CommunicatorConfig::shared_memory);
  visit("compress", &CommunicatorConfig::compress);
  visit("fabric", &CommunicatorConfig::fabric);
  visit("encrypt", &CommunicatorConfig::encrypt);
  visit("most_strands", &CommunicatorConfig::most_strands);
  visit("memory_nodes", &CommunicatorConfig::memory_nodes);
}

class Communicator {
 public:
  explicit Communicator(CommunicatorConfig config);
  // Fails the rounds that are not complete, and joins the thread.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Looks up addresses, binds the coordinator on rank 0 and starts the thread. Waits for no other process.
  Status start();
  // How the start went; nothing if that is not known after `patience`. Any thread.
  [[nodiscard]] std::optional<Status> wait_ready(std::chrono::milliseconds patience) const;
  // Any thread; never blocks. Rounds of one op run one after the other, in the order of these calls.
  void start_round(RoundRequest request);
  // Any thread; never blocks. Runs the task as `done` of a round is run: apart from all others.
  void call_back(std::function<void()> task) { callback_threads_->run(std::move(task)); }
  // Any thread; never blocks. See Channels::post().
  std::shared_ptr<Transfer> post(Transfer::Direction direction, Transfer::Message message, Transfer::Done done = {}) {
    return channels_->post(direction, std::move(message), std::move(done));
  }
  // Any thread; never blocks. More bytes of some round's inputs are ready (SlicedTransfer::ready_bytes).
  void feed();
  // Any thread; never blocks. Tells the coordinator this of the links, beside what rounds tell: for tests.
  void tell_goodput(Goodput goodput);
  // Any thread; never blocks. Ends the job for every process.
  void abort(Status why);
  // Completes the rounds and the transfers that were started, says goodbye to the reducers and joins the thread. Fails
  // once one of them has made no progress for `patience`, and at once if that is 0; and when it has left, if no program
  // has taken the total of a pending round. A worker without rounds waits for
  // as long as the others have some: they may need what it keeps, and end the job themselves when it stalls. Where ops
  // have groups, it waits until all others leave as well.
  Status shutdown(std::chrono::milliseconds patience);

  std::optional<Event> next_event(std::chrono::milliseconds patience) { return log_.next(patience); }
  // Why no round or transfer can run any more; ok while rounds can. Any thread.
  [[nodiscard]] Status failure() const { return inbox_.why_closed(); }
  [[nodiscard]] Metrics metrics() const;
  // Of optimizers on reducers. Any thread.
  [[nodiscard]] StateModels& state_models() { return state_models_; }
  // The rounds that outlive their programs, and the memory of their buckets. Any thread.
  [[nodiscard]] PendingRounds& pending_rounds() { return pending_rounds_; }
  [[nodiscard]] BlockPool& block_pool() { return block_pool_; }
  // The completed rounds. Any thread.
  [[nodiscard]] Timeline& timeline() { return timeline_; }
  // Of an elastic job, the ranks that take part now; empty before the first view. Any thread.
  [[nodiscard]] std::vector<uint32_t> members() const {
    const std::lock_guard lock(strands_mutex_);
    return members_;
  }
  // Of an elastic job: what the program does at a gate, and what it has done there; see Gate. Any thread.
  Result<std::optional<Gate::Turn>> wait_at_gate(std::chrono::milliseconds patience);
  // Whether it still waits to be let into a job that had started before. Any thread.
  [[nodiscard]] bool is_candidate() const { return is_candidate_; }
  void say_met();
  void say_given(uint32_t view) { gate_.note_given(view); }
  void say_present(uint32_t view);
  void ask_to_leave();
  // Which job this is; nothing before the first view. Any thread.
  [[nodiscard]] std::optional<Place::Known> place() const { return place_.get(); }
  // The worker whose interface has become slow, as the coordinator in this process finds; -1 if none has, or there is
  // no coordinator. Any thread, once it has started.
  [[nodiscard]] int32_t slow_rank() const { return coordinator_ ? coordinator_->slow_rank() : -1; }
  // Likewise the reducers, whose interfaces carry so many percent of a full rate.
  [[nodiscard]] std::vector<Coordinator::SlowReducer> slow_reducers() const {
    return coordinator_ ? coordinator_->slow_reducers() : std::vector<Coordinator::SlowReducer>();
  }
  [[nodiscard]] uint32_t rank() const { return config_.rank; }
  [[nodiscard]] uint32_t worker_count() const { return config_.job.worker_count; }

 private:
  enum class Phase : uint8_t { kStarting, kRunning, kLeaving, kLeft, kFailed };

  // Start.
  void choose_fabric();
  Status add_strand();
  Status add_channels();
  [[nodiscard]] std::unique_ptr<TcpContext> make_context(EventLoop& loop, size_t strand) const;
  [[nodiscard]] Registration registration() const;
  [[nodiscard]] Member::Callbacks member_callbacks();
  [[nodiscard]] WorkerStrand::Callbacks strand_callbacks(bool is_first);
  void enrol();
  void probe_rates();
  void open_to_program();
  void note_ready(const Status& status);

  // Strands.
  void on_strands(const std::function<void(WorkerStrand&)>& task);
  static Result<std::vector<TcpAddress>> reducers_of(size_t strand, const View& view);
  using OpCounts = std::vector<Progress::OpProgress>;
  void report_progress(FrameType type, uint32_t view, const std::vector<OpCounts>& of_strands);

  // Views.
  void join(const View& view);
  void await_admission(const View& view);
  void say_candidacy();
  void note_joined(uint32_t view);
  void record_view(EventLoop::Clock::time_point begun);
  void halt(const Halt& halt);
  void report(uint32_t view);
  void note_lost(const Lost& lost);
  void watch();
  Status watch_gate();
  void answer_state();

  // Rates that change.
  void hold(const Hold& hold);
  void follow(const NewRates& rates);
  void report_goodput();

  // Rounds, on their way from the program to the strands.
  void take_inbox();
  void enqueue(RoundRequest request);
  void start(RoundRequest request);
  void complete(RoundRequest request, const Status& status);

  // Losses and the end.
  void note_idle();
  void leave();
  void follow_goodbyes(uint64_t view, EventLoop::Clock::time_point deadline);
  void end_in_order();
  void fail(const Status& cause);
  void refuse_inbox();
  [[nodiscard]] bool has_ended() const { return phase_ == Phase::kLeft || phase_ == Phase::kFailed; }
  [[nodiscard]] bool is_idle() const {
    return !halted_ && early_.empty() && ledger_.is_empty() && channels_->is_idle();
  }
  [[nodiscard]] std::string own_name() const;  // "rank 3 (host b)"

  const CommunicatorConfig config_;

  // Any thread.
  EventLog log_;
  Place place_;
  Timeline timeline_;
  StateModels state_models_;
  Inbox<RoundRequest> inbox_;  // closed once rounds cannot run any more
  std::promise<Status> ready_promise_;
  bool is_ready_ = false;  // the promise is kept
  const std::shared_future<Status> ready_ = ready_promise_.get_future().share();
  std::unique_ptr<CallbackThreads> callback_threads_ = std::make_unique<CallbackThreads>();
  const std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();  // all counters but the strands' own
  BlockPool block_pool_;
  PendingRounds pending_rounds_{*counters_, log_, *callback_threads_};
  RoundLedger ledger_;
  Gate gate_{config_.rank};
  std::atomic<bool> awaits_idle_{false};  // whether note_idle() is to be called once no round or transfer is open

  LoopGroup loops_;            // the loops of the strands, in their order
  EventLoop* loop_ = nullptr;  // the first of them, which is the communicator's as well
  mutable std::mutex strands_mutex_;
  std::vector<std::unique_ptr<WorkerStrand>> strands_;  // changed under the mutex, on the loop's thread
  std::unique_ptr<Channels> channels_;                  // used on the first loop; set under the mutex, in start()
  std::vector<uint32_t> members_;                       // the members of the view of an elastic job; changed likewise

  std::vector<TcpAddress> sources_;
  std::shared_ptr<FabricChoice> fabric_;
  std::shared_ptr<const CryptoLibrary> crypto_;  // null where nothing is encrypted
  std::unique_ptr<TcpContext> context_;          // the context of coordinator and member
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Member> member_;
  std::thread thread_;  // the thread of the first loop

  // The loop's thread only.
  Phase phase_ = Phase::kStarting;
  View view_;
  bool halted_ = true;  // some strand is not connected to all reducers of the view
  size_t joined_strand_count_ = 0;
  EventLoop::Clock::time_point halted_at_;
  std::string halted_why_;
  Planner planner_{config_.job};
  LaunchOrder launch_order_;
  std::vector<RoundRequest> early_;  // rounds that the program starts before the plan is known
  bool has_groups_ = false;          // this worker has run an op of a group
  bool uses_states_ = false;         // some round has had to do with an optimizer on reducers
  bool has_said_goodbye_ = false;    // this worker has said goodbye in this view
  bool asked_whether_idle_ = false;
  bool coordinator_has_left_ = false;
  bool lacks_coordinator_ = false;          // of an elastic job: for a while, nobody can be done without
  bool has_accused_at_gate_ = false;        // those who do not come there, in this view
  std::atomic<bool> is_candidate_ = false;  // has not been let into the job yet, which had started before
  bool wants_to_leave_ = false;
  std::vector<View::Count> earlier_;  // rounds of ops before this worker came
};

}  // namespace jaxhetero
