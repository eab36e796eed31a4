// A reducer process, or the reducer inside a worker: joins the job, hands the workers' connections to its strands,
// which sum, and ends as the coordinator or a failure says.
//
// Each strand has an event loop on a thread of its own; the server itself lives on the first one's. The functions of
// ReducerServer may be called from any thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/base/cores.h"
#include "xla_ffi/base/counters.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/loop_group.h"
#include "xla_ffi/base/memory_nodes.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/membership/member.h"
#include "xla_ffi/reducer/strand.h"
#include "xla_ffi/transport/strand_door.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/transport/tcp_listener.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

struct ReducerServerConfig {
  std::string coordinator;  // "host:port"
  Bytes token;
  std::string host;  // listens on this address; empty: on all, and workers use the one that the coordinator sees
  std::vector<std::string> more_hosts;  // the addresses of its other interfaces, where it listens at the same port
  uint16_t port = 0;                    // any free port where it is 0
  int32_t number = -1;                  // the number that it asks the coordinator for; any where it is -1
  int32_t colocated_rank = -1;          // the rank of the worker in the same process; -1 for a dedicated reducer
  std::string host_name;
  std::string version;
  std::chrono::milliseconds start_timeout{0};
  std::chrono::milliseconds timeout{0};
  uint32_t most_strands = 1;        // the strands that this process can run, where the job does not say how many
  std::vector<Cores> memory_nodes;  // the cores of each that this process may use
  bool encrypt = false;             // all that goes over sockets
};

// These settings by name: the names are those of jaxhetero.config.ReducerConfig, and colocated_rank.
template <typename Visit>
void for_each_reducer_setting(Visit&& visit) {
  visit("coordinator", &ReducerServerConfig::coordinator);
  visit("token", &ReducerServerConfig::token);
  visit("host", &ReducerServerConfig::host);
  visit("more_hosts", &ReducerServerConfig::more_hosts);
  visit("port", &ReducerServerConfig::port);
  visit("number", &ReducerServerConfig::number);
  visit("colocated_rank", &ReducerServerConfig::colocated_rank);
  visit("start_timeout_ms", &ReducerServerConfig::start_timeout);
  visit("timeout_ms", &ReducerServerConfig::timeout);
  visit("most_strands", &ReducerServerConfig::most_strands);
  visit("memory_nodes", &ReducerServerConfig::memory_nodes);
  visit("encrypt", &ReducerServerConfig::encrypt);
}

class ReducerServer {
 public:
  explicit ReducerServer(ReducerServerConfig config)
      : config_(std::move(config)), loops_(MemoryNodes(config_.memory_nodes)) {}
  ~ReducerServer();
  ReducerServer(const ReducerServer&) = delete;
  ReducerServer& operator=(const ReducerServer&) = delete;

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
  [[nodiscard]] Metrics metrics() const;
  // Which reducer of which job it is; nothing before it has heard that. Any thread.
  [[nodiscard]] std::optional<Place::Known> place() const { return place_.get(); }

 private:
  using LateWorkers = std::vector<ProcessState::LateWorker>;

  Status listen();
  [[nodiscard]] Registration registration() const;
  [[nodiscard]] Member::Callbacks member_callbacks();
  void start_job(const View& view);
  Status add_strand(const View& view);
  [[nodiscard]] ReducerStrand::Callbacks strand_callbacks(size_t index, bool is_elastic);
  Status open_doors();
  void tell_fault(const Status& why, bool is_elastic);
  void note_settled(size_t index, const Settled& settled);
  void watch_late();
  void find_late(std::function<void(LateWorkers)> then);
  void answer_state();
  [[nodiscard]] std::string own_name(const View& view) const;
  void on_strands(const std::function<void(ReducerStrand&)>& task);
  void close_down(const Status& how);
  void note_quiet();
  void note_lost(const Lost& lost);
  void finish(const Status& how);
  void hang_up();

  const ReducerServerConfig config_;
  EventLog log_;
  const std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();  // all counters but the strands' own
  Place place_;

  LoopGroup loops_;            // the loops of the strands, in their order
  EventLoop* loop_ = nullptr;  // the first of them, which is the server's as well
  mutable std::mutex strands_mutex_;
  std::vector<std::unique_ptr<ReducerStrand>> strands_;  // changed under the mutex, on the loop's thread
  // Takes what workers offer, except that nothing encrypts what goes over a fabric.
  const std::shared_ptr<FabricChoice> fabric_ = std::make_shared<FabricChoice>(config_.encrypt ? "off" : "", log_);
  std::shared_ptr<const CryptoLibrary> crypto_;          // null where nothing is encrypted
  std::unique_ptr<TcpContext> context_;                  // the context of the member
  std::vector<std::unique_ptr<TcpListener>> listeners_;  // one for each address
  std::vector<std::string> addresses_;                   // numeric addresses
  std::unique_ptr<StrandDoor> door_;
  std::unique_ptr<Member> member_;
  std::thread thread_;  // the thread of the first loop

  // The loop's thread only.
  bool closing_ = false;
  Status end_;  // the reason of the end, once it closes down
  size_t quiet_strand_count_ = 0;
  std::vector<std::optional<Settled>> settled_;  // the latest word of each strand

  std::mutex mutex_;
  std::condition_variable ended_;
  // Guarded by mutex_.
  std::optional<Status> result_;
  std::optional<uint32_t> lost_number_;
  LateWorkers late_workers_;
};

}  // namespace jaxhetero
