#include "xla_ffi/membership/member.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/base/buffers.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

// Until the first report that the coordinator is not reached yet: rank 0 imports JAX before it listens.
constexpr milliseconds kFirstReport{10000};
constexpr milliseconds kUnreachedReportInterval{3000};  // the pause between later reports
constexpr milliseconds kRetryInterval{100};
constexpr milliseconds kConnectPatience{5000};
// Past our own deadline we wait a little for the coordinator's error, which names the missing processes.
constexpr milliseconds kGrace{2000};
// For how long the members of an elastic job do without their coordinator.
constexpr milliseconds kAwayPatience{300000};

}  // namespace

ProcessState process_state(uint32_t view, const Metrics& counts) {
  ProcessState state;
  state.view = view;
  state.round_count = counts.round_count;
  state.sent_bytes = counts.sent_bytes;
  state.received_bytes = counts.received_bytes;
  return state;
}

Member::Member(TcpContext& context, std::vector<TcpAddress> coordinator, Registration registration, EventLog& log,
               milliseconds timeout)
    : context_(context),
      coordinator_(std::move(coordinator)),
      registration_(std::move(registration)),
      log_(log),
      timeout_(timeout) {}

void Member::start(milliseconds patience, Callbacks callbacks) {
  callbacks_ = std::move(callbacks);
  patience_ = patience;
  next_report_ms_ = context_.loop.now_ms() + kFirstReport.count();
  deadline_ = context_.loop.after(patience_, [this] { expire(); });
  connect();
}

void Member::connect() {
  connection_ = TcpConnection::connect(context_, coordinator_[tried_], *this, kConnectPatience);
}

void Member::on_open(Connection& connection) {
  last_problem_.clear();
  if (is_away_) return greet();
  // From now on the coordinator's deadline counts. It started with rank 0, and may end after ours.
  context_.loop.cancel(deadline_);
  deadline_ = context_.loop.after(patience_ + kGrace, [this] { expire(); });
  connection.send(OutFrame::control(FrameType::kRegister, encode(registration_)));
}

// To a coordinator that has been started anew.
void Member::greet() {
  heartbeat_.heard();
  if (callbacks_.heard_view) heard_view_ = std::max(heard_view_, callbacks_.heard_view());
  Registration registration = registration_;
  // The number of a reducer inside a worker follows from the rank.
  if (registration.role == Role::kReducer && registration.rank < 0) {
    registration.number = static_cast<int32_t>(view_.own_index);
  }
  if (view_.is_candidate) return send(OutFrame::control(FrameType::kRegister, encode(registration)));
  send(OutFrame::control(FrameType::kReturn, encode(Return{registration, heard_view_, view_})));
}

Status Member::on_header(Connection&, const FrameHeader& header, std::vector<iovec>& into) {
  control_.resize(header.payload_bytes);
  into = as_pieces(control_);
  return {};
}

Status Member::on_frame(Connection&, const FrameHeader& header) {
  if (finished_) return {};
  heartbeat_.heard();
  note_coordinator(true);
  switch (header.type) {
    case FrameType::kAlive:
      // The coordinator of an elastic job says how often it wants to hear of its members.
      if (view_.job.is_elastic()) send(OutFrame::control(FrameType::kAlive, {}));
      beats_.note();
      return {};
    case FrameType::kWaiting:
      log_.add(Severity::kWarning, decode_text(control_));
      return {};
    case FrameType::kFault:
      fail(decode_fault(control_));
      return {};
    case FrameType::kView: {
      const Result<View> view = decode_view(control_);
      if (!view.ok()) return view.status();
      context_.loop.cancel(deadline_);
      coordinator_host_ = view.value().worker_hosts[0];
      if (view.value().job.is_elastic()) view_ = view.value();
      heard_view_ = std::max(heard_view_, view.value().number);
      is_away_ = false;
      if (!std::exchange(is_member_, true)) Heartbeat::start(context_.loop, timeout_, [this] { return beat(); });
      callbacks_.on_view(view.value());
      return {};
    }
    case FrameType::kHalt: {
      const Result<Halt> halt = decode_halt(control_);
      if (!halt.ok()) return halt.status();
      heard_view_ = std::max(heard_view_, halt.value().view);
      if (callbacks_.on_halt) callbacks_.on_halt(halt.value());
      return {};
    }
    case FrameType::kForget: {
      const Result<Progress> progress = decode_progress(control_);
      if (!progress.ok()) return progress.status();
      if (callbacks_.on_forget) callbacks_.on_forget(progress.value());
      return {};
    }
    case FrameType::kHold: {
      const Result<Hold> hold = decode_hold(header);
      if (!hold.ok()) return hold.status();
      if (callbacks_.on_hold) callbacks_.on_hold(hold.value());
      return {};
    }
    case FrameType::kNewRates: {
      const Result<NewRates> rates = decode_new_rates(control_);
      if (!rates.ok()) return rates.status();
      if (callbacks_.on_new_rates) callbacks_.on_new_rates(rates.value());
      return {};
    }
    case FrameType::kLeaving:
      if (callbacks_.on_leaving) callbacks_.on_leaving();
      return {};
    case FrameType::kMeet:
      if (callbacks_.on_meet) callbacks_.on_meet(decode_meeting(header));
      return {};
    case FrameType::kGo: {
      const Result<Presence> presence = decode_presence(header);
      if (!presence.ok()) return presence.status();
      if (callbacks_.on_go) callbacks_.on_go(presence.value());
      return {};
    }
    case FrameType::kAsk:
      if (callbacks_.on_ask) callbacks_.on_ask();
      return {};
    case FrameType::kLost: {
      const Result<Lost> lost = decode_lost(control_);
      if (!lost.ok()) return lost.status();
      finished_ = true;
      if (callbacks_.on_lost) callbacks_.on_lost(lost.value());
      return {};
    }
    case FrameType::kGoodbye:
      finished_ = true;
      if (callbacks_.on_goodbye) callbacks_.on_goodbye();
      return {};
    default:
      return {Code::kProtocol, "the coordinator sent a frame of type " + std::to_string(int(header.type))};
  }
}

void Member::on_close(Connection&, const Status& why) {
  connection_.reset();
  if (finished_) return;
  if (is_member_ && !view_.job.is_elastic()) {
    return fail({Code::kWorkerLost,
                 "rank 0 (host " + coordinator_host_ + "), where the coordinator is, was lost: " + why.message()});
  }
  if (is_member_) note_away(why);
  const bool final = why.code() == Code::kUnauthenticated || why.code() == Code::kVersionMismatch;
  if (final) {
    fail({why.code(), "the coordinator at " + coordinator_text() + ": " + why.message()});
    return;
  }
  last_problem_ = why.message();
  if (!is_away_ && context_.loop.now_ms() >= next_report_ms_) {
    next_report_ms_ += kUnreachedReportInterval.count();
    log_.add(Severity::kWarning,
             "still trying to reach the coordinator at " + coordinator_text() + ": " + last_problem_);
  }
  tried_ = (tried_ + 1) % coordinator_.size();
  retry_ = context_.loop.after(kRetryInterval, [this] { connect(); });
}

void Member::note_away(const Status& why) {
  if (std::exchange(is_away_, true)) return;
  note_coordinator(false);
  log_.add(Severity::kWarning, "the coordinator at " + coordinator_text() + " was lost: " + why.message() +
                                   "; the job goes on, and nobody can join or leave until it is back");
  context_.loop.cancel(deadline_);
  deadline_ = context_.loop.after(kAwayPatience, [this] { expire(); });
}

void Member::note_coordinator(bool is_there) {
  if (std::exchange(is_there_, is_there) != is_there && callbacks_.on_coordinator) callbacks_.on_coordinator(is_there);
}

bool Member::beat() {
  if (finished_) return false;
  if (view_.job.is_elastic()) return outlasts_silence();
  send(OutFrame::control(FrameType::kAlive, {}));
  if (!heartbeat_.stopped(timeout_)) return true;
  fail({Code::kWorkerLost, "rank 0 (host " + coordinator_host_ +
                               "), where the coordinator is, was lost: no sign of life for " +
                               std::to_string(Heartbeat::patience(timeout_).count()) + " ms"});
  return false;
}

// Of an elastic job. It answers the coordinator, and mostly the connection tells whether that is there.
bool Member::outlasts_silence() {
  if (heartbeat_.stopped(timeout_) && heartbeat_.silence() > beats_.most_silence()) note_coordinator(false);
  if (heartbeat_.silence() < kAwayPatience) return true;
  fail({Code::kWorkerLost, "the coordinator at " + coordinator_text() + " has given no sign of life for " +
                               std::to_string(kAwayPatience.count() / 1000) + " s; is its host cut off, or this one?"});
  return false;
}

void Member::expire() {
  if (is_away_) {
    return fail({Code::kWorkerLost, "the coordinator at " + coordinator_text() +
                                        " was lost and has not come back for " +
                                        std::to_string(kAwayPatience.count() / 1000) + " s; start it again in time"});
  }
  fail({Code::kStartTimeout, "the coordinator at " + coordinator_text() + " did not answer in time" +
                                 (last_problem_.empty() ? "" : " (" + last_problem_ + ")") +
                                 "; is rank 0 running, and is the address right?"});
}

void Member::fail(const Status& why) {
  if (finished_) return;
  stop();
  if (callbacks_.on_failure) callbacks_.on_failure(why);
}

void Member::send(OutFrame frame) {
  if (connection_) connection_->send(std::move(frame));
}

void Member::stop(const Status& last) {
  finished_ = true;
  context_.loop.cancel(deadline_);
  context_.loop.cancel(retry_);
  if (!connection_) return;
  if (last.ok()) {
    connection_->close();
  } else {
    connection_->close_with(OutFrame::control(FrameType::kFault, encode(last)));
  }
  connection_.reset();
}

}  // namespace jaxhetero
