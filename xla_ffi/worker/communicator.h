// The worker's end of a job: runs the rounds that the program asks for over the links to the reducers, one after the
// other for each op, and takes them through every change of the view.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
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
#include "xla_ffi/worker/op.h"
#include "xla_ffi/worker/planner.h"
#include "xla_ffi/worker/reducer_link.h"
#include "xla_ffi/worker/round.h"

namespace jaxhetero {

struct CommunicatorConfig {
  uint32_t rank = 0;
  JobShape job;
  std::string coordinator;  // "host:port"
  std::string source;       // the address to connect from; empty: as the routes decide
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

// When a round that is over went through its stages.
struct RoundRecord {
  using Time = EventLoop::Clock::time_point;

  std::string description;
  uint64_t number = 0;
  uint64_t bytes = 0;
  Time requested;     // by the program
  Time first_push;    // given to the transport
  Time first_result;  // received
  Time end;           // the last one received
};

class Communicator final : private ConnectionOwner {
 public:
  explicit Communicator(CommunicatorConfig config);
  ~Communicator() override;

  // Looks up addresses, binds the coordinator on rank 0, starts the thread. Does not wait for the others.
  Status start();
  // How the start went, or nothing if that is not known after `patience`.
  std::optional<Status> wait_ready(std::chrono::milliseconds patience);
  // Any thread; never blocks. Rounds of one op run one after the other, in the order of these calls.
  void start_round(RoundRequest request);
  // Any thread; never blocks. More of some round's inputs is ready.
  void feed();
  // Any thread; never blocks. Ends the job for everybody.
  void abort(Status why);
  // Finishes the running rounds, takes leave of the reducers and ends the thread; without ceremony once the rounds
  // stand still for `patience`, and at once if that is 0. When none runs here, it is for the others to end what stands
  // still.
  Status shutdown(std::chrono::milliseconds patience);

  std::optional<Event> next_event(std::chrono::milliseconds patience) { return log_.next(patience); }
  // Why rounds cannot run any more, once something has failed.
  [[nodiscard]] Status failure() const;
  [[nodiscard]] Metrics metrics() const { return snapshot(*counters_); }
  // The latest rounds, oldest first; a bounded number.
  [[nodiscard]] std::vector<RoundRecord> timeline() const;
  [[nodiscard]] uint32_t worker_count() const { return config_.job.worker_count; }

 private:
  enum class Phase : uint8_t { kStarting, kRunning, kLeaving, kLeft, kFailed };

  void on_open(Connection& connection) override;
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override;
  Status on_frame(Connection& connection, const FrameHeader& header) override;
  void on_close(Connection& connection, const Status& why) override;

  void join(const View& view);
  void resume();
  void probe_rates();
  void start_waiting();
  [[nodiscard]] bool may_start(const Op& op) const;
  void replay(uint64_t op_id, uint64_t number);
  void halt(const Halt& halt);
  [[nodiscard]] Progress progress() const;
  void report_still(EventLoop::Clock::time_point now);
  void forget(const Progress& completed);
  void set_ready(Status status);

  [[nodiscard]] bool has_ended() const { return phase_ == Phase::kLeft || phase_ == Phase::kFailed; }

  void take_inbox();
  void refuse_inbox();
  void enqueue(RoundRequest request);
  void start_next(uint64_t op_id, Op& op);
  void run(uint64_t op_id, Op& op, Round& round);
  void describe_op(uint64_t op_id, Op& op, uint32_t reducer);
  void feed_starved();
  Result<Segment*> segment_of(const FrameHeader& header, uint32_t reducer);
  Status begin_result(const FrameHeader& header, uint32_t reducer, std::vector<iovec>& into);
  void finish_result(const FrameHeader& header, uint32_t reducer);
  void finish_round(uint64_t op_id, Op& op);
  void record(const Round& round);
  void note_busy();
  void note_late(const FrameHeader& header, const Bytes& text);
  void complete(RoundRequest request, const Status& status);

  void watch_progress();
  [[nodiscard]] std::string silent_reducers(const Round& round) const;
  bool accuse_silent(Round& round);
  void report_lost(const ReducerLink& link, const std::string& why);
  void fail_as_told(const Status& why);
  [[nodiscard]] std::string circumstances() const;

  [[nodiscard]] bool is_idle() const { return !halted_ && running_round_count_ + waiting_round_count_ == 0; }
  void note_idle();
  void leave();
  void end_in_order();
  void fail(const Status& why);
  [[nodiscard]] uint32_t reducer_of(const Connection& connection) const;
  [[nodiscard]] std::string own_name() const;  // "rank 3 (host b)"

  const CommunicatorConfig config_;
  EventLog log_;
  const std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();
  std::unique_ptr<CallbackThreads> callback_threads_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<TcpContext> context_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Member> member_;
  std::thread thread_;

  // The loop's thread only.
  Phase phase_ = Phase::kStarting;
  uint64_t job_id_ = 0;
  uint32_t view_number_ = 0;
  bool halted_ = true;  // not connected to all reducers of the view
  EventLoop::Clock::time_point halted_since_;
  std::vector<View::Resume> resume_;
  Planner planner_{config_.job};
  bool asked_whether_idle_ = false;
  bool coordinator_has_left_ = false;
  std::vector<ReducerLink> links_;  // by place in the view
  std::unordered_map<uint64_t, Op> ops_;
  size_t running_round_count_ = 0;
  size_t waiting_round_count_ = 0;
  EventLoop::Clock::time_point busy_since_;
  std::string last_completed_ = "none";
  std::chrono::milliseconds leave_patience_{0};
  std::vector<iovec> pieces_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Status> ready_;      // guarded by mutex_, as is all below
  std::optional<Status> failure_;    // why rounds cannot run any more
  std::vector<RoundRequest> inbox_;  // on their way to the loop's thread
  std::deque<RoundRecord> timeline_;
};

}  // namespace jaxhetero
