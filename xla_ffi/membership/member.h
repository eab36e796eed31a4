// A process's connection to the coordinator, from its registration to the end of the job. Every communicator and every
// reducer server owns one, rank 0's too.
//
// The coordinator of an elastic job may be lost and started anew. The member then connects again, and tells it what it
// knows of the job; meanwhile rounds go on.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "xla_ffi/base/counters.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/membership/heartbeat.h"
#include "xla_ffi/transport/connection.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/elastic_messages.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

// What every process says of itself when it is asked.
ProcessState process_state(uint32_t view, const Metrics& counts);

// On the thread of the event loop; never blocks.
class Member final : private ConnectionOwner {
 public:
  // Called with the coordinator's messages, on the loop's thread. Only on_view must be set.
  struct Callbacks {
    std::function<void(const View&)> on_view;
    std::function<void(const Halt&)> on_halt;
    std::function<void(const Progress&)> on_forget;
    std::function<void(const Hold&)> on_hold = {};
    std::function<void(const NewRates&)> on_new_rates = {};
    std::function<void()> on_leaving;
    std::function<void()> on_goodbye;
    std::function<void(const Meeting&)> on_meet = {};
    std::function<void(const Presence&)> on_go = {};
    std::function<void()> on_ask = {};  // the coordinator asks how this process is doing: answer with kState, soon
    std::function<void(const Lost&)> on_lost = {};  // the job goes on without this process; the last
    // Of an elastic job: the coordinator is lost or silent, or speaks again.
    std::function<void(bool is_there)> on_coordinator = {};
    std::function<uint32_t()> heard_view = {};      // the highest number of a view that others have told
    std::function<void(const Status&)> on_failure;  // called at most once, and last
  };

  // The coordinator counts as lost if it is silent for most of `timeout` once the job has started.
  Member(TcpContext& context, std::vector<TcpAddress> coordinator, Registration registration, EventLog& log,
         std::chrono::milliseconds timeout);
  ~Member() override = default;

  // Registers, retrying to connect until `patience` has passed; once connected, waits as long again for the first view.
  // Calls on_failure if either takes too long, if refused, or if the connection ends before the coordinator's goodbye.
  void start(std::chrono::milliseconds patience, Callbacks callbacks);
  void send(OutFrame frame);
  // Closes the connection; no callback follows. If `last` is an error, sends it to the coordinator first.
  void stop(const Status& last = {});

 private:
  void on_open(Connection& connection) override;
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override;
  Status on_frame(Connection& connection, const FrameHeader& header) override;
  void on_close(Connection& connection, const Status& why) override;

  void connect();
  [[nodiscard]] std::string coordinator_text() const { return coordinator_[tried_].text(); }
  void expire();
  void greet();
  void note_away(const Status& why);
  void note_coordinator(bool is_there);
  bool beat();
  bool outlasts_silence();
  void fail(const Status& why);

  TcpContext& context_;
  const std::vector<TcpAddress> coordinator_;  // the coordinator's addresses, of which one is tried after the other
  size_t tried_ = 0;                           // the index of the one that is tried now, or connected
  Registration registration_;
  EventLog& log_;
  Callbacks callbacks_;
  std::shared_ptr<TcpConnection> connection_;
  Bytes control_;
  Heartbeat heartbeat_;
  BeatRhythm beats_;
  const std::chrono::milliseconds timeout_;
  std::chrono::milliseconds patience_{0};
  EventLoop::TimerId deadline_ = 0;
  EventLoop::TimerId retry_ = 0;
  int64_t next_report_ms_ = 0;
  std::string last_problem_;
  std::string coordinator_host_;  // known once is_member_
  bool is_member_ = false;        // it has had a view
  // Of an elastic job.
  View view_;                // the latest one
  uint32_t heard_view_ = 0;  // the highest number of a view that the coordinator has told
  bool is_away_ = false;     // the coordinator was lost, and no view has come since
  bool is_there_ = true;     // it speaks
  bool finished_ = false;
};

}  // namespace jaxhetero
