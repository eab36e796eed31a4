// A reducer process, or the reducer inside a worker: joins the job, takes the workers' connections, and moves frames
// between them and a ReducerStateMachine.
//
// One event loop on one thread of its own does all of this. The functions of ReducerServer may be called from any
// thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/base/counters.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/membership/member.h"
#include "xla_ffi/reducer/state_machine.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/transport/tcp_listener.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

struct ReducerServerConfig {
  std::string coordinator;  // "host:port"
  Bytes token;
  std::string host;     // listens on this address; empty: on all, and workers use the one that the coordinator sees
  uint16_t port = 0;    // 0: any free one
  int32_t number = -1;  // that it asks the coordinator for; -1: any
  int32_t colocated_rank = -1;  // of the worker in the same process; -1 for a dedicated reducer
  std::string host_name;
  std::string version;
  std::chrono::milliseconds start_timeout{0};
  std::chrono::milliseconds timeout{0};
};

// These settings by name: the names are those of jaxhetero.config.ReducerConfig, and colocated_rank.
template <typename Visit>
void for_each_reducer_setting(Visit&& visit) {
  visit("coordinator", &ReducerServerConfig::coordinator);
  visit("token", &ReducerServerConfig::token);
  visit("host", &ReducerServerConfig::host);
  visit("port", &ReducerServerConfig::port);
  visit("number", &ReducerServerConfig::number);
  visit("colocated_rank", &ReducerServerConfig::colocated_rank);
  visit("start_timeout_ms", &ReducerServerConfig::start_timeout);
  visit("timeout_ms", &ReducerServerConfig::timeout);
}

class ReducerServer final : private ConnectionOwner {
 public:
  explicit ReducerServer(ReducerServerConfig config) : config_(std::move(config)) {}
  ~ReducerServer() override;

  // Binds the socket and starts the thread. Waits for no other process.
  Status start();
  // How the reducer ended; nothing if it still runs after `patience`. Ok when every worker left in order.
  std::optional<Status> wait(std::chrono::milliseconds patience);
  // The number under which the job has gone on without this reducer; nothing if it has not. Call it after wait().
  std::optional<uint32_t> lost_number();
  // The workers that rounds wait for, as of the latest look, a few times per timeout.
  std::vector<ProcessState::LateWorker> late_workers();
  // Ends it. Does not wait for that; the destructor does.
  void stop();

  std::optional<Event> next_event(std::chrono::milliseconds patience) { return log_.next(patience); }
  [[nodiscard]] Metrics metrics() const { return snapshot(*counters_); }
  // Which reducer of which job it is; nothing before it has heard that. Any thread.
  [[nodiscard]] std::optional<Place::Known> place() const { return place_.get(); }

 private:
  struct Peer {
    std::shared_ptr<TcpConnection> connection;
    std::optional<uint32_t> rank;  // once it has joined
    Bytes control;                 // the payload of its latest frame that is no chunk
    int64_t control_bytes = 0;     // sent to it in frames that are no totals
    int64_t data_bytes = 0;        // the most that has passed beyond those
  };

  void on_open(Connection&) override {}
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override;
  Status on_frame(Connection& connection, const FrameHeader& header) override;
  Result<bool> on_lent(Connection& connection, const FrameHeader& header,
                       const std::shared_ptr<const std::byte>& payload) override;
  void on_close(Connection& connection, const Status& why) override;

  void start_job(const View& view);
  [[nodiscard]] ProcessState state() const;
  [[nodiscard]] std::string own_name() const;
  [[nodiscard]] Status check(const Join& join) const;
  Status join(Peer& peer);
  Status describe_op(const Peer& peer, const FrameHeader& header);
  void count_rounds();
  void enter_view(uint32_t number);
  void check_all_joined();
  void watch_rounds();
  [[nodiscard]] std::vector<bool> find_moving();
  void deliver();
  void close_down(const Status& how);
  void note_lost(const Lost& lost);
  void end_if_done();
  void finish(const Status& how);
  void hang_up();

  const ReducerServerConfig config_;
  EventLog log_;
  const std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();
  Place place_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<TcpContext> context_;
  std::unique_ptr<TcpListener> listener_;
  std::unique_ptr<Member> member_;
  std::thread thread_;

  // The loop's thread only.
  View view_;
  std::unique_ptr<ReducerStateMachine> reducer_;  // of the view
  std::map<const Connection*, Peer> peers_;
  std::vector<TcpConnection*> by_rank_;  // null until the worker has joined
  uint64_t plan_ = 0;                    // ShardPlan::digest() of the workers that have joined
  std::vector<Outgoing> outgoing_;
  RefusalLog refusals_;
  bool closing_ = false;
  Status end_;                        // how it ends, once it closes down
  uint64_t earlier_round_count_ = 0;  // of earlier views

  std::mutex mutex_;
  std::condition_variable ended_;
  // Guarded by mutex_.
  std::optional<Status> result_;
  std::optional<uint32_t> lost_number_;
  std::vector<ProcessState::LateWorker> late_workers_;
};

}  // namespace jaxhetero
