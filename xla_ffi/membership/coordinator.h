// How the processes of a job find each other, and agree on who is still there.
//
// Everybody enrols at the coordinator, which rank 0 runs. When all are there, the reducers are told who takes part;
// when every reducer is ready for its workers, the workers are told as well, and connect to the reducers.
//
// Rounds do not pass through the coordinator. But its connections tell it when a process dies. A worker's death ends
// the job. A reducer's, where the job has failover, makes a new view: the workers are halted and say which rounds they
// have completed; when all have, they are told who reduces from now on, and of which ops some have completed a round
// that others have not. Only rank 0 decides, so nobody can disagree; and without rank 0 there is no job.
//
// What a worker keeps for that of an op that no longer runs it may forget when all have completed the same rounds of
// it.
//
// A worker that has no more rounds leaves when nobody has one running, for until then others may need what it keeps.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/membership/heartbeat.h"
#include "xla_ffi/transport/connection.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/transport/tcp_listener.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

class Coordinator final : private ConnectionOwner {
 public:
  Coordinator(TcpContext& context, JobShape job, std::string version, EventLog& log);
  ~Coordinator() override = default;

  // Binds; call from any thread before the loop runs.
  Status bind(const TcpAddress& address);
  // Gives up when not everybody is there after `patience`, or when a worker does not answer for `timeout`; on the
  // loop's thread, like end().
  Status start(std::chrono::milliseconds patience, std::chrono::milliseconds timeout);
  // Rank 0 leaves: says goodbye to who is still here, and calls `done` when they have heard it.
  void end(std::function<void()> done);

 private:
  struct Guest {
    std::shared_ptr<TcpConnection> connection;
    Bytes control;
    bool registered = false;
    bool ready = false;
    bool halted = false;   // has said how far it is, for the next view
    bool idle = false;     // has no round running
    bool leaving = false;  // wants to leave
    bool released = false;
    uint32_t number = 0;  // of a reducer
    Heartbeat heartbeat;
    Registration registration;
  };

  void on_open(Connection&) override {}
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override;
  Status on_frame(Connection& connection, const FrameHeader& header) override;
  void on_close(Connection& connection, const Status& why) override;

  [[nodiscard]] bool is_worker(const Guest& guest) const;
  Status on_ready(Guest& guest);
  void on_lost(const Lost& lost);
  Status on_progress(Guest& guest, const Progress& progress);
  Status on_still(const Guest& guest, const Progress& progress);
  void on_idle(Guest& guest);
  void on_goodbye(Guest& guest);
  void lose_reducer(uint32_t number, const std::string& why);
  void change_view(const std::string& why);
  void tell_view();
  bool beat();
  [[nodiscard]] bool is_cut_off() const;
  void ask_whether_idle();
  [[nodiscard]] std::vector<View::Resume> rounds_to_resume() const;
  View::Reducer enter_reducer(Guest& guest);

  Status admit(Guest& guest, Registration registration);
  Status check(const Registration& registration) const;
  void refuse(Connection& connection, const Status& why);
  void refuse_all(const Status& why);
  void tell_reducers();
  void tell_workers();
  void report_missing();
  void give_up();
  [[nodiscard]] std::string missing() const;
  [[nodiscard]] size_t count(Role role) const;
  [[nodiscard]] size_t dedicated_count() const;

  enum class Phase : uint8_t { kGathering, kReducersToldMembers, kStarted, kChanging, kEnded, kFailed };

  TcpContext& context_;
  JobShape job_;
  std::string version_;
  EventLog& log_;
  std::unique_ptr<TcpListener> listener_;
  std::map<Connection*, Guest> guests_;
  View view_;
  Phase phase_ = Phase::kGathering;
  Status fault_;  // why, once it failed
  std::string last_refusal_;
  RefusalLog refusals_;
  std::chrono::milliseconds patience_{0};
  std::chrono::milliseconds timeout_{0};
  uint32_t next_reducer_number_ = 0;
  struct Completed {
    uint32_t reports = 0;
    uint64_t least = 0;
    uint64_t most = 0;
  };
  std::unordered_map<uint64_t, Completed> completed_;  // by op, while the view changes
  struct Still {
    uint64_t completed_count = 0;
    std::set<int32_t> ranks;  // who has completed so many and begun no more
  };
  std::unordered_map<uint64_t, Still> still_;  // by op
  bool is_asking_ = false;                     // whether everybody is idle
  bool has_left_ = false;                      // some worker
  std::function<void()> on_empty_;
};

}  // namespace jaxhetero
