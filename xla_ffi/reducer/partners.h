// The connections of a strand of a reducer to its partners, which back up what it keeps of optimizers: a connection to
// each, made when something is sent to it for the first time. They outlive the views of the job.
//
// In an elastic job, a round that begins anew in another view may have another sum. So each view is announced on each
// connection, before anything that is of it. A partner of a later view takes nothing of an earlier one, and replies to
// an earlier view do not count.
//
// The strand's thread only; nothing blocks.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/wire/state_plan.h"

namespace jaxhetero {

class Partners final : private ConnectionOwner {
 public:
  struct Callbacks {
    std::function<void(uint32_t partner, const FrameHeader&)> on_reply;  // kBackedUp or kCopied
    // Called once nothing more can be sent to the partner.
    std::function<void(uint32_t partner, const std::string& why)> on_lost;
  };

  // `own`: how this reducer introduces itself. `context` outlives this.
  Partners(TcpContext& context, const Join& own, std::chrono::milliseconds patience, Callbacks callbacks)
      : context_(context), own_(own), patience_(patience), callbacks_(std::move(callbacks)) {}

  // From now on reducers are where the plan says. Connections to those that are not in it any more close.
  void enter(const StatePlan& plan);
  // The same in another view of an elastic job, which has these members.
  void enter(const StatePlan& plan, uint32_t view, const std::vector<uint32_t>& members);
  // Sends a frame to a reducer of the plan; one that cannot be reached is reported lost.
  void send(uint32_t partner, OutFrame frame);
  // Closes all connections; no callback follows.
  void close();

 private:
  struct Link {
    std::shared_ptr<TcpConnection> connection;
    bool is_open = false;
    bool is_announced = true;       // the partner has heard of the view
    std::vector<OutFrame> waiting;  // frames that wait until the connection is open
    Bytes control;
  };

  void on_open(Connection& connection) override;
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override;
  Status on_frame(Connection& connection, const FrameHeader& header) override;
  void on_close(Connection& connection, const Status& why) override;
  [[nodiscard]] std::map<uint32_t, Link>::iterator link_of(const Connection& connection);
  void announce(uint32_t partner, const Link& link);
  void lose(uint32_t partner, const std::string& why);

  TcpContext& context_;
  Join own_;
  const std::chrono::milliseconds patience_;
  const Callbacks callbacks_;
  StatePlan plan_;
  std::map<uint32_t, Link> links_;  // keyed by number
  bool closed_ = false;
};

}  // namespace jaxhetero
