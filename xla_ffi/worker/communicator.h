// A worker's part of a job: it joins the job and each of its views, runs the program's rounds over the links to the
// reducers, and leaves or fails.
//
// One event loop on one thread of its own does all of this; the program's threads only put requests into an inbox. The
// end of a round is told on other threads again (callback_threads.h). A round's inputs and outputs belong to the
// program, and are touched until its `done` is called.
#pragma once

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/base/counters.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/membership/coordinator.h"
#include "xla_ffi/membership/member.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/worker/callback_threads.h"
#include "xla_ffi/worker/inbox.h"
#include "xla_ffi/worker/op.h"
#include "xla_ffi/worker/planner.h"
#include "xla_ffi/worker/reducer_link.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/schedule.h"
#include "xla_ffi/worker/stall_watch.h"
#include "xla_ffi/worker/timeline.h"

namespace jaxhetero {

struct CommunicatorConfig {
  uint32_t rank = 0;
  JobShape job;
  std::string coordinator;  // "host:port"
  std::string source;       // the address to connect from; empty: the routes decide
  Bytes token;
  std::string host_name;
  std::string version;
  std::chrono::milliseconds start_timeout{0};
  std::chrono::milliseconds timeout{0};  // how long a round may go without progress
  bool shared_memory = true;             // with reducers on this host
};

// These settings by name, beside those of `job`: the names are those of jaxhetero.config.Config.
template <typename Visit>
void for_each_worker_setting(Visit&& visit) {
  visit("rank", &CommunicatorConfig::rank);
  visit("coordinator", &CommunicatorConfig::coordinator);
  visit("source", &CommunicatorConfig::source);
  visit("token", &CommunicatorConfig::token);
  visit("start_timeout_ms", &CommunicatorConfig::start_timeout);
  visit("timeout_ms", &CommunicatorConfig::timeout);
  visit("shared_memory", &CommunicatorConfig::shared_memory);
}

class Communicator final : private ConnectionOwner {
 public:
  explicit Communicator(CommunicatorConfig config);
  // Fails the rounds that are not complete, and joins the thread.
  ~Communicator() override;

  // Looks up addresses, binds the coordinator on rank 0 and starts the thread. Waits for no other process.
  Status start();
  // How the start went; nothing if that is not known after `patience`. Any thread.
  [[nodiscard]] std::optional<Status> wait_ready(std::chrono::milliseconds patience) const;
  // Any thread; never blocks. Rounds of one op run one after the other, in the order of these calls.
  void start_round(RoundRequest request);
  // Any thread; never blocks. More bytes of some round's inputs are ready (SlicedTransfer::ready_bytes).
  void feed();
  // Any thread; never blocks. Ends the job for every process.
  void abort(Status why);
  // Completes the rounds that were started, says goodbye to the reducers and joins the thread. Fails once a round has
  // made no progress for `patience`, and at once if that is 0. A worker without rounds waits for as long as the others
  // have some: they may need what it keeps, and end the job themselves when it stalls.
  Status shutdown(std::chrono::milliseconds patience);

  std::optional<Event> next_event(std::chrono::milliseconds patience) { return log_.next(patience); }
  // Why no round can run any more; ok while rounds can. Any thread.
  [[nodiscard]] Status failure() const { return inbox_.why_closed(); }
  [[nodiscard]] Metrics metrics() const { return snapshot(*counters_); }
  // The completed rounds. Any thread.
  [[nodiscard]] Timeline& timeline() { return timeline_; }
  // Which job this is; nothing before the first view. Any thread.
  [[nodiscard]] std::optional<Place::Known> place() const { return place_.get(); }
  [[nodiscard]] uint32_t worker_count() const { return config_.job.worker_count; }

 private:
  enum class Phase : uint8_t { kStarting, kRunning, kLeaving, kLeft, kFailed };

  // Start.
  Status make_context();
  [[nodiscard]] Registration registration() const;
  [[nodiscard]] Member::Callbacks member_callbacks();
  void enrol();
  void probe_rates();

  // Views.
  void join(const View& view);
  void resume();
  void replay(uint64_t op_id, uint64_t number);
  void halt(const Halt& halt);
  void report_still(EventLoop::Clock::time_point now);

  // Rounds, from the program's request to its end.
  void take_inbox();
  void enqueue(RoundRequest request);
  [[nodiscard]] bool may_start(const Op& op) const;
  void start_waiting();
  void start_next(Op& op);
  void run(Op& op, Round& round);
  void describe_op(Op& op, uint32_t reducer);
  void feed_starved();
  void finish_round(Op& op);
  void record(const Round& round);
  void complete(RoundRequest request, const Status& status);

  // Frames of reducers.
  void on_open(Connection& connection) override;
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override;
  Status on_frame(Connection& connection, const FrameHeader& header) override;
  void on_close(Connection& connection, const Status& why) override;
  [[nodiscard]] uint32_t reducer_of(const Connection& connection) const;
  Result<Segment*> segment_of(const FrameHeader& header, uint32_t reducer);
  Status place_result(const FrameHeader& header, uint32_t reducer, std::vector<iovec>& into);
  void finish_result(const FrameHeader& header, uint32_t reducer);
  void note_late(const FrameHeader& header, const Bytes& late_workers);

  // Stalls, losses and the end.
  void watch();
  void report_lost(const ReducerLink& link, const std::string& why);
  void fail_as_told(const Status& why);
  void note_idle();
  void leave();
  void end_in_order();
  void fail(const Status& why);
  void refuse_inbox();
  [[nodiscard]] bool has_ended() const { return phase_ == Phase::kLeft || phase_ == Phase::kFailed; }
  [[nodiscard]] bool is_idle() const { return !halted_ && schedule_->is_empty(); }
  [[nodiscard]] ProcessState state() const;
  [[nodiscard]] std::string own_name() const;  // "rank 3 (host b)"

  const CommunicatorConfig config_;

  // Any thread.
  EventLog log_;
  const std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();
  Place place_;
  Timeline timeline_;
  Inbox inbox_;  // closed once rounds cannot run any more
  std::promise<Status> ready_promise_;
  const std::shared_future<Status> ready_ = ready_promise_.get_future().share();

  std::unique_ptr<CallbackThreads> callback_threads_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<TcpContext> context_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Member> member_;
  std::thread thread_;

  // The loop's thread only.
  Phase phase_ = Phase::kStarting;
  View view_;
  bool halted_ = true;  // not connected to all reducers of the view
  EventLoop::Clock::time_point halted_at_;
  Planner planner_{config_.job};
  std::vector<ReducerLink> links_;  // by place in the view
  std::unique_ptr<Schedule> schedule_;
  std::unique_ptr<StallWatch> stall_watch_;
  bool asked_whether_idle_ = false;
  bool coordinator_has_left_ = false;
  std::vector<iovec> pieces_;             // of a total that is widened
  std::vector<RoundRecord::Part> parts_;  // of a round that is recorded
};

}  // namespace jaxhetero
