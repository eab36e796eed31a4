// How the processes of a job find each other at the start.
//
// Everybody enrols at the coordinator, which rank 0 runs. When all are there, the reducers are told who takes part;
// when every reducer is ready for its workers, the workers are told as well, and connect to the reducers. From then on
// the coordinator is not needed.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "event_loop.h"
#include "events.h"
#include "tcp_transport.h"
#include "transport.h"
#include "wire.h"

namespace jaxhetero {

// How often those who wait say whom they wait for.
inline constexpr std::chrono::milliseconds kReportInterval{3000};

class Coordinator final : private ConnectionOwner {
 public:
  Coordinator(TcpContext& context, JobShape job, std::string version, EventLog& log);
  ~Coordinator() override = default;

  // Binds; call from any thread before the loop runs.
  Status bind(const TcpAddress& address);
  // Accepts until everybody is there or `patience` has passed; on the loop's thread.
  Status start(std::chrono::milliseconds patience);

 private:
  struct Guest {
    std::shared_ptr<TcpConnection> connection;
    Bytes control;
    bool registered = false;
    bool ready = false;
    uint32_t reducer_index = 0;
    Registration registration;
  };

  void on_open(Connection&) override {}
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override;
  Status on_frame(Connection& connection, const FrameHeader& header) override;
  void on_close(Connection& connection, const Status& why) override;

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

  enum class Phase : uint8_t { kGathering, kReducersToldMembers, kStarted, kFailed };

  TcpContext& context_;
  JobShape job_;
  std::string version_;
  EventLog& log_;
  std::unique_ptr<TcpListener> listener_;
  std::map<Connection*, Guest> guests_;
  Members members_;
  Phase phase_ = Phase::kGathering;
  std::string last_refusal_;
  RefusalLog refusals_;
  std::chrono::milliseconds patience_{0};
};

// The other side: one process's way to the coordinator.
class Enrolment final : private ConnectionOwner {
 public:
  using OnMembers = std::function<void(const Members&)>;
  using OnFailure = std::function<void(const Status&)>;

  Enrolment(TcpContext& context, TcpAddress coordinator, Registration registration, EventLog& log);
  ~Enrolment() override = default;

  // Tries to reach the coordinator until `patience` has passed, and then waits as long again for its word. Calls
  // `on_failure` when that was in vain, or when refused.
  void start(std::chrono::milliseconds patience, OnMembers on_members, OnFailure on_failure);
  // A reducer is ready for its workers.
  void send_ready();
  void stop();

 private:
  void on_open(Connection& connection) override;
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override;
  Status on_frame(Connection& connection, const FrameHeader& header) override;
  void on_close(Connection& connection, const Status& why) override;

  void connect();
  void expire();
  void fail(const Status& why);

  TcpContext& context_;
  TcpAddress coordinator_;
  Registration registration_;
  EventLog& log_;
  OnMembers on_members_;
  OnFailure on_failure_;
  std::shared_ptr<TcpConnection> connection_;
  Bytes control_;
  std::chrono::milliseconds patience_{0};
  EventLoop::TimerId deadline_ = 0;
  EventLoop::TimerId retry_ = 0;
  int64_t next_report_ms_ = 0;
  std::string last_problem_;
  bool finished_ = false;
};

}  // namespace jaxhetero
