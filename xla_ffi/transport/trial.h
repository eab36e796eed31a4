// A trial of the way between two processes before a job: how many bytes a second pass over a connection of ours, on its
// socket or on a fabric.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/connection.h"
#include "xla_ffi/transport/tcp_address.h"
#include "xla_ffi/transport/tcp_context.h"
#include "xla_ffi/transport/tcp_listener.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {

// The end that receives. It serves all who know the token, on a thread of its own, until it is destroyed.
class TrialServer {
 public:
  // Like a reducer, it takes the fabric that a peer offers.
  static Result<std::unique_ptr<TrialServer>> start(const TcpAddress& address, Bytes token);
  ~TrialServer();
  TrialServer(const TrialServer&) = delete;
  TrialServer& operator=(const TrialServer&) = delete;

  [[nodiscard]] uint16_t port() const { return listener_->port(); }

 private:
  class Owner;

  TrialServer(std::unique_ptr<EventLoop> loop, Bytes token);

  EventLog log_;
  const std::unique_ptr<EventLoop> loop_;
  TcpContext context_;
  std::unique_ptr<Owner> owner_;
  std::unique_ptr<TcpListener> listener_;
  std::thread thread_;
};

struct TrialResult {
  std::string provider;  // of the fabric; empty on a socket
  double bytes_per_s = 0;
};

struct TrialSettings {
  TcpAddress source;  // of this host: where connections come from
  Bytes token;
  std::string fabric;  // as FabricChoice has it; "off" for the socket
  std::chrono::milliseconds duration;
  std::chrono::milliseconds patience;  // beyond the duration
};

// Sends to a TrialServer for as long as `duration`. An error if `fabric` names one and bytes cannot go over it. Blocks.
Result<TrialResult> run_trial(const TcpAddress& server, const TrialSettings& settings);

}  // namespace jaxhetero
