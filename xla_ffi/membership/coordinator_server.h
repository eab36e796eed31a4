// The process of an elastic job's coordinator.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/membership/elastic_coordinator.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/transport/tcp_context.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {

struct CoordinatorServerConfig {
  std::string coordinator;  // "host:port" to listen on
  Bytes token;
  std::string version;
  std::chrono::milliseconds start_timeout{0};
  std::chrono::milliseconds lost_after{0};      // without a sign of life
  std::chrono::milliseconds rejoin_timeout{0};  // while too few workers are left
  std::string history_file;                     // see History; may be empty
  bool encrypt = false;                         // all that goes over sockets
};

// These settings by name: the names are those of jaxhetero.config.CoordinatorConfig.
template <typename Visit>
void for_each_coordinator_setting(Visit&& visit) {
  visit("coordinator", &CoordinatorServerConfig::coordinator);
  visit("token", &CoordinatorServerConfig::token);
  visit("start_timeout_ms", &CoordinatorServerConfig::start_timeout);
  visit("lost_after_ms", &CoordinatorServerConfig::lost_after);
  visit("rejoin_timeout_ms", &CoordinatorServerConfig::rejoin_timeout);
  visit("history_file", &CoordinatorServerConfig::history_file);
  visit("encrypt", &CoordinatorServerConfig::encrypt);
}

// The functions may be called from any thread.
class CoordinatorServer {
 public:
  explicit CoordinatorServer(CoordinatorServerConfig config) : config_(std::move(config)) {}
  ~CoordinatorServer();
  CoordinatorServer(const CoordinatorServer&) = delete;
  CoordinatorServer& operator=(const CoordinatorServer&) = delete;

  // Binds the socket and starts the thread. Waits for no other process.
  Status start();
  // How the job ended; nothing if it still runs after `patience`. Ok when every worker left in order.
  std::optional<Status> wait(std::chrono::milliseconds patience);
  // Ends it, and the job with it unless another one is started.
  void stop();

  std::optional<Event> next_event(std::chrono::milliseconds patience) { return log_.next(patience); }

 private:
  void finish(const Status& how);

  const CoordinatorServerConfig config_;
  EventLog log_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<TcpContext> context_;
  std::unique_ptr<ElasticCoordinator> coordinator_;
  std::thread thread_;

  std::mutex mutex_;
  std::condition_variable ended_;
  std::optional<Status> result_;  // guarded by mutex_
};

}  // namespace jaxhetero
