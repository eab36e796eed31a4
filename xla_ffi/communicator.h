// The worker's side of a round: cuts a bucket into shards and chunks, pushes them to the reducers under a self-clocked
// window, and scatters the totals that come back.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "buffers.h"
#include "completer.h"
#include "contribution.h"
#include "coordinator.h"
#include "enrolment.h"
#include "event_loop.h"
#include "events.h"
#include "shard_plan.h"
#include "status.h"
#include "tcp_transport.h"
#include "window.h"
#include "wire.h"

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
};

// One all-reduce, as the FFI handler asks for it. The memory of both buckets stays valid until `done` has been called.
//
// Where another device has the operands and takes the results, they come and go piece by piece: `ready_bytes` and
// `received`, which are null for memory that the program itself reads and writes.
struct RoundRequest {
  uint64_t op = 0;
  uint64_t sequence = 0;  // where workers should prefer the same of several rounds: the lower one first
  std::string description;
  RoundSpec spec;
  Leaves inputs;
  Leaves outputs;
  std::function<void(const Status&)> done;                   // called once, on a thread of its own
  std::shared_ptr<const std::atomic<size_t>> ready_bytes;    // of the inputs, from the front; feed() says that it grew
  std::function<void(size_t begin, size_t bytes)> received;  // of the outputs; called on the communicator's own thread
  std::shared_ptr<const void> inputs_owner;                  // who holds it may read the inputs after `done` as well
  Ranges reported;                                           // what `received` was called for, also before a halt
  EventLoop::Clock::time_point requested{};
};

struct CommunicatorMetrics {
  uint64_t sent_bytes = 0;
  uint64_t received_bytes = 0;
  uint64_t round_count = 0;
  uint64_t busy_us = 0;        // time during which at least one round was in flight
  uint64_t refused_count = 0;  // these three as in TransportCounters
  uint64_t bad_frame_count = 0;
  uint64_t checksum_mismatch_count = 0;
  uint64_t view_count = 0;  // after the first: how often a reducer was lost or came
};

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
  // Finishes the running rounds, takes leave of the reducers and ends the thread; after `patience`, without ceremony.
  Status shutdown(std::chrono::milliseconds patience);

  std::optional<Event> next_event(std::chrono::milliseconds patience) { return log_.next(patience); }
  // Why rounds cannot run any more, once something has failed.
  [[nodiscard]] Status failure() const;
  [[nodiscard]] CommunicatorMetrics metrics() const;
  // The latest rounds, oldest first; a bounded number.
  [[nodiscard]] std::vector<RoundRecord> timeline() const;
  [[nodiscard]] uint32_t worker_count() const { return config_.job.worker_count; }

 private:
  struct Pushed {        // a chunk whose total is not back
    uint64_t frame = 0;  // its number on the connection
    uint32_t bytes = 0;
    Window::Clock::time_point at;
  };
  struct Segment {  // the part of a round that goes through one reducer
    Shard shard;
    uint64_t next_push = 0;  // elements, counted in the bucket
    uint64_t next_result = 0;
    std::deque<Pushed> in_flight;
    size_t in_flight_bytes = 0;
    bool was_starved = false;
    bool all_pushed = false;
    bool done = false;
  };
  struct Round {
    RoundRequest request;
    uint64_t number = 0;
    std::vector<Segment> segments;
    size_t open_segment_count = 0;
    EventLoop::Clock::time_point begin;
    EventLoop::Clock::time_point first_result;
    EventLoop::Clock::time_point progress;
    std::string late;  // whom the reducers wait for, by their last word
    int64_t next_late_report_ms = 0;
    bool is_replay = false;            // it is over here, but not for others
    bool is_answered = false;          // a total has begun to come
    Contribution* keeps_in = nullptr;  // takes a copy of every chunk that is pushed
    bool has_accused = false;
  };
  struct Op {
    std::unique_ptr<Round> running;
    std::deque<RoundRequest> waiting;
    uint64_t next_round = 0;
    std::vector<bool> described;  // by reducer
    Contribution kept;
    RoundRequest replay;  // the round that `kept` is of, for those who have not completed it
  };
  // Of several rounds that run, all workers push the chunks of the same one first: the order they got them in may
  // differ, and chunks wait at a reducer until everybody's are there.
  using Turn = std::tuple<uint64_t, uint64_t, uint64_t>;  // round, sequence, op
  struct Link {                                           // the way to one reducer
    std::shared_ptr<TcpConnection> connection;
    std::map<Turn, std::pair<Round*, Segment*>> unfinished;
    std::optional<Window> window;
    EventLoop::Clock::time_point last_result;
    uint32_t number = 0;
    std::string name;  // "reducer 1 (host b, 10.0.0.2:4000)"
    TcpAddress address;
    bool open = false;
    Bytes control;
  };
  enum class Phase : uint8_t { kStarting, kRunning, kLeaving, kLeft, kFailed };

  void on_open(Connection& connection) override;
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override;
  Status on_frame(Connection& connection, const FrameHeader& header) override;
  void on_close(Connection& connection, const Status& why) override;

  void join(const Members& members);
  void resume();
  void replay(uint64_t op_id, uint64_t number);
  void halt(const Halt& halt);
  void stop_round(Op& op);
  [[nodiscard]] Progress progress() const;
  void set_ready(Status status);

  [[nodiscard]] bool has_ended() const { return phase_ == Phase::kLeft || phase_ == Phase::kFailed; }

  void take_inbox();
  void refuse_inbox();
  void enqueue(RoundRequest request);
  void start_next(uint64_t op_id, Op& op);
  void run(uint64_t op_id, Op& op, std::unique_ptr<Round> round);
  void describe_op(uint64_t op_id, Op& op, uint32_t reducer);
  static Turn turn_of(const Round& round) { return {round.number, round.request.sequence, round.request.op}; }
  void push_chunks(Link& link);
  [[nodiscard]] size_t window_bytes(const Link& link, const Round& round) const;
  [[nodiscard]] size_t frame_bytes(const RoundSpec& spec) const;
  [[nodiscard]] uint64_t next_chunk_count(const Round& round, const Segment& segment) const;
  [[nodiscard]] bool can_push(const Round& round, const Segment& segment) const;
  size_t push_chunk(Link& link, const Round& round, Segment& segment);
  void feed_starved();
  Result<Segment*> segment_of(const FrameHeader& header, uint32_t reducer);
  Status begin_result(const FrameHeader& header, uint32_t reducer, std::vector<iovec>& into);
  void keep(Op& op);
  [[nodiscard]] bool has_data(const RoundSpec& spec) const;
  void finish_result(const FrameHeader& header, uint32_t reducer);
  void finish_round(uint64_t op_id, Op& op);
  void record(const Round& round);
  void note_busy();
  void note_late(const FrameHeader& header, const Bytes& text);
  void complete(RoundRequest request, const Status& status);

  void watch_progress();
  [[nodiscard]] std::string silent_reducers(const Round& round) const;
  bool accuse_silent(Round& round);
  void report_lost(const Link& link, const std::string& why);
  void fail_as_told(const Status& why);
  [[nodiscard]] std::string circumstances() const;

  [[nodiscard]] bool is_idle() const { return !halted_ && running_round_count_ + waiting_round_count_ == 0; }
  void note_idle();
  void leave();
  void end_in_order();
  void fail(const Status& why);
  [[nodiscard]] uint32_t reducer_of(const Connection& connection) const;
  [[nodiscard]] std::string own_name() const;  // "rank 3 (host b)"
  [[nodiscard]] std::string round_name(const Round& round) const;

  const CommunicatorConfig config_;
  EventLog log_;
  std::unique_ptr<Completer> completer_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<TcpContext> context_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Enrolment> enrolment_;
  std::unique_ptr<ShardPlan> plan_;
  std::thread thread_;

  // The loop's thread only.
  Phase phase_ = Phase::kStarting;
  uint64_t job_id_ = 0;
  uint32_t view_ = 0;
  bool halted_ = true;  // not connected to all reducers of the view
  EventLoop::Clock::time_point halted_since_;
  std::vector<Members::Resume> resume_;
  bool asked_whether_idle_ = false;
  bool coordinator_has_left_ = false;
  std::vector<Link> links_;  // by place in the view
  std::unordered_map<uint64_t, Op> ops_;
  size_t running_round_count_ = 0;
  size_t waiting_round_count_ = 0;
  EventLoop::Clock::time_point busy_since_;
  std::string last_completed_ = "none";

  std::atomic<uint64_t> round_count_ = 0;
  std::atomic<uint64_t> view_count_ = 0;
  std::atomic<uint64_t> busy_us_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Status> ready_;      // guarded by mutex_, as is all below
  std::optional<Status> failure_;    // why rounds cannot run any more
  std::vector<RoundRequest> inbox_;  // on their way to the loop's thread
  std::deque<RoundRecord> timeline_;
};

}  // namespace jaxhetero
