#include "rendezvous.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kRetryInterval{100};
constexpr milliseconds kConnectPatience{5000};
// What a process waits past its own deadline for the coordinator's word, which names who is missing.
constexpr milliseconds kGrace{2000};

std::string named(const Registration& registration) {
  std::string name = registration.role == Role::kWorker ? "rank " : "reducer";
  if (registration.role == Role::kReducer && registration.rank >= 0) name += " of rank ";
  if (registration.rank >= 0) name += std::to_string(registration.rank);
  return name + " (host " + registration.host_name + ")";
}

void append_list(std::string& list, const std::string& item) { list += (list.empty() ? "" : ", ") + item; }

}  // namespace

Coordinator::Coordinator(TcpContext& context, JobShape job, std::string version, EventLog& log)
    : context_(context), job_(job), version_(std::move(version)), log_(log) {}

Status Coordinator::bind(const TcpAddress& address) {
  auto listener = TcpListener::bind(context_.loop, address, "the coordinator");
  if (!listener.ok()) return listener.status();
  listener_ = std::move(*listener);
  return {};
}

Status Coordinator::start(milliseconds patience) {
  patience_ = patience;
  context_.loop.after(patience, [this] { give_up(); });
  context_.loop.after(kReportInterval, [this] { report_missing(); });
  return listener_->start([this](Fd socket, const TcpAddress& peer, std::shared_ptr<void> admission) {
    auto connection = TcpConnection::accept(context_, std::move(socket), peer, *this, std::move(admission));
    guests_[connection.get()].connection = connection;
  });
}

Status Coordinator::on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) {
  if (header.type != FrameType::kRegister && header.type != FrameType::kReady) {
    return {Code::kProtocol, "the coordinator takes no frame of type " + std::to_string(int(header.type))};
  }
  Guest& guest = guests_[&connection];
  guest.control.resize(header.payload_bytes);
  into = as_pieces(guest.control);
  return {};
}

Status Coordinator::on_frame(Connection& connection, const FrameHeader& header) {
  Guest& guest = guests_[&connection];
  if (header.type == FrameType::kRegister) {
    Result<Registration> registration = decode_registration(guest.control);
    if (!registration.ok()) return registration.status();
    return admit(guest, std::move(*registration));
  }
  if (phase_ != Phase::kReducersToldMembers || guest.registration.role != Role::kReducer) {
    return {Code::kProtocol, "nobody asked it whether it is ready"};
  }
  guest.ready = true;
  const auto is_ready = [](const auto& entry) {
    return entry.second.ready || !entry.second.registered || entry.second.registration.role == Role::kWorker;
  };
  if (std::ranges::all_of(guests_, is_ready)) tell_workers();
  return {};
}

Status Coordinator::admit(Guest& guest, Registration registration) {
  if (guest.registered) return {Code::kProtocol, "it registered twice"};
  if (registration.role == Role::kReducer && registration.address.empty()) {
    registration.address = guest.connection->peer_host();
  }
  if (Status refusal = check(registration); !refusal.ok()) {
    last_refusal_ = named(registration) + " was refused: " + refusal.message();
    log_.add(Severity::kWarning, last_refusal_);
    refuse(*guest.connection, refusal);
    return {};
  }
  guest.registered = true;
  guest.registration = std::move(registration);
  if (count(Role::kWorker) == job_.worker_count && count(Role::kReducer) == total_reducer_count(job_)) tell_reducers();
  return {};
}

Status Coordinator::check(const Registration& registration) const {
  if (phase_ != Phase::kGathering)
    return {Code::kInvalidArgument, "this job has started already, with everybody it needs"};
  if (registration.version != version_) {
    return {Code::kVersionMismatch, named(registration) + " runs jaxhetero " + registration.version + ", rank 0 runs " +
                                        version_ + "; install the same version everywhere"};
  }
  const bool colocated = registration.role == Role::kReducer && registration.rank >= 0;
  if (registration.role == Role::kWorker) {
    if (registration.job != job_) {
      return {Code::kVersionMismatch, named(registration) + " was started with settings other than rank 0's: " +
                                          difference(registration.job, job_) + "; give all of them the same"};
    }
    if (registration.rank < 0 || static_cast<uint32_t>(registration.rank) >= job_.worker_count) {
      return {Code::kInvalidArgument, named(registration) + " is not one of " + std::to_string(job_.worker_count)};
    }
  } else if (!colocated && job_.reducer_count == 0) {
    return {Code::kInvalidArgument, "this job was started without dedicated reducers"};
  } else if (colocated && static_cast<uint32_t>(registration.rank) >= job_.colocated_count) {
    return {Code::kInvalidArgument,
            "this job has reducers inside its first " + std::to_string(job_.colocated_count) + " workers only"};
  }
  for (const auto& [connection, guest] : guests_) {
    if (!guest.registered || guest.registration.role != registration.role || registration.rank < 0) continue;
    if (guest.registration.rank == registration.rank) {
      return {Code::kInvalidArgument, named(registration) + " is taken already, by " + connection->peer() +
                                          "; give every worker a rank of its own"};
    }
  }
  if (registration.role == Role::kReducer && !colocated && dedicated_count() == job_.reducer_count) {
    return {Code::kInvalidArgument, "this job has its " + std::to_string(job_.reducer_count) + " reducers already"};
  }
  return {};
}

void Coordinator::refuse(Connection& connection, const Status& why) {
  connection.send(OutFrame::control(FrameType::kFault, encode(why)));
  connection.close_after_flush();
}

void Coordinator::refuse_all(const Status& why) {
  phase_ = Phase::kFailed;
  std::vector<std::shared_ptr<TcpConnection>> connections;  // refusing may change guests_
  for (const auto& [connection, guest] : guests_) connections.push_back(guest.connection);
  for (const auto& connection : connections) refuse(*connection, why);
}

size_t Coordinator::count(Role role) const {
  return static_cast<size_t>(std::ranges::count_if(guests_, [role](const auto& entry) {
    return entry.second.registered && entry.second.registration.role == role;
  }));
}

size_t Coordinator::dedicated_count() const {
  return static_cast<size_t>(std::ranges::count_if(guests_, [](const auto& entry) {
    const Registration& who = entry.second.registration;
    return entry.second.registered && who.role == Role::kReducer && who.rank < 0;
  }));
}

void Coordinator::tell_reducers() {
  phase_ = Phase::kReducersToldMembers;
  const Nonce random = fresh_nonce().value_or(Nonce{});
  std::memcpy(&members_.job_id, random.data(), sizeof members_.job_id);
  members_.job = job_;
  members_.worker_hosts.resize(job_.worker_count);
  for (auto& [connection, guest] : guests_) {
    if (!guest.registered) continue;
    const Registration& who = guest.registration;
    if (who.role == Role::kWorker) {
      members_.worker_hosts[static_cast<size_t>(who.rank)] = who.host_name;
    } else {
      guest.reducer_index = static_cast<uint32_t>(members_.reducers.size());
      members_.reducers.push_back({who.address, who.port, who.host_name, who.rank});
    }
  }
  for (auto& [connection, guest] : guests_) {
    if (!guest.registered || guest.registration.role != Role::kReducer) continue;
    members_.own_index = guest.reducer_index;
    connection->send(OutFrame::control(FrameType::kMembers, encode(members_)));
  }
  if (members_.reducers.empty()) tell_workers();
}

void Coordinator::tell_workers() {
  phase_ = Phase::kStarted;
  for (auto& [connection, guest] : guests_) {
    if (!guest.registered || guest.registration.role != Role::kWorker) continue;
    members_.own_index = static_cast<uint32_t>(guest.registration.rank);
    connection->send(OutFrame::control(FrameType::kMembers, encode(members_)));
  }
}

std::string Coordinator::missing() const {
  std::string text;
  for (uint32_t rank = 0; rank < job_.worker_count; ++rank) {
    const auto is_it = [rank](const auto& entry) {
      return entry.second.registered && entry.second.registration.role == Role::kWorker &&
             entry.second.registration.rank == static_cast<int32_t>(rank);
    };
    if (std::ranges::none_of(guests_, is_it)) append_list(text, "rank " + std::to_string(rank));
  }
  const size_t reducers = count(Role::kReducer);
  const uint32_t wanted = total_reducer_count(job_);
  if (reducers < wanted) {
    append_list(text, std::to_string(wanted - reducers) + " of " + std::to_string(wanted) + " reducers");
  }
  if (text.empty()) {
    for (const auto& [connection, guest] : guests_) {
      const bool waits = guest.registered && guest.registration.role == Role::kReducer && !guest.ready;
      if (waits) append_list(text, named(guest.registration) + " to get ready");
    }
  }
  if (!last_refusal_.empty()) text += " (" + last_refusal_ + ")";
  return text;
}

void Coordinator::report_missing() {
  if (phase_ == Phase::kStarted || phase_ == Phase::kFailed) return;
  const std::string text = "waiting for " + missing();
  for (auto& [connection, guest] : guests_) {
    if (guest.registered) connection->send(OutFrame::control(FrameType::kWaiting, encode(text)));
  }
  context_.loop.after(kReportInterval, [this] { report_missing(); });
}

void Coordinator::give_up() {
  if (phase_ == Phase::kStarted || phase_ == Phase::kFailed) return;
  refuse_all({Code::kStartTimeout,
              "the job did not start within " + std::to_string(patience_.count()) + " ms: missing " + missing()});
}

void Coordinator::on_close(Connection& connection, const Status& why) {
  const auto found = guests_.find(&connection);
  if (found == guests_.end()) return;
  const Guest guest = std::move(found->second);
  guests_.erase(found);
  if (phase_ == Phase::kStarted || phase_ == Phase::kFailed || why.ok()) return;
  if (!guest.registered) {
    // A stranger, or a process with the wrong token: its own message says more than ours can.
    refusals_.add(log_, Severity::kWarning,
                  "the coordinator refused a connection from " + connection.peer() + ": " + why.message(),
                  context_.loop.now_ms());
    if (why.code() == Code::kUnauthenticated) last_refusal_ = connection.peer() + " was refused: " + why.message();
    return;
  }
  const std::string text = named(guest.registration) + " left before the job started: " + why.message();
  log_.add(Severity::kWarning, text);
  if (phase_ == Phase::kReducersToldMembers) refuse_all({Code::kStartTimeout, text});
}

Enrolment::Enrolment(TcpContext& context, TcpAddress coordinator, Registration registration, EventLog& log)
    : context_(context), coordinator_(coordinator), registration_(std::move(registration)), log_(log) {}

void Enrolment::start(milliseconds patience, OnMembers on_members, OnFailure on_failure) {
  on_members_ = std::move(on_members);
  on_failure_ = std::move(on_failure);
  patience_ = patience;
  next_report_ms_ = context_.loop.now_ms() + kReportInterval.count();
  deadline_ = context_.loop.after(patience_, [this] { expire(); });
  connect();
}

void Enrolment::connect() { connection_ = TcpConnection::connect(context_, coordinator_, *this, kConnectPatience); }

void Enrolment::on_open(Connection& connection) {
  last_problem_.clear();
  // From here on the coordinator's deadline counts, which began when rank 0 did and may be later than ours.
  context_.loop.cancel(deadline_);
  deadline_ = context_.loop.after(patience_ + kGrace, [this] { expire(); });
  connection.send(OutFrame::control(FrameType::kRegister, encode(registration_)));
}

Status Enrolment::on_header(Connection&, const FrameHeader& header, std::vector<iovec>& into) {
  control_.resize(header.payload_bytes);
  into = as_pieces(control_);
  return {};
}

Status Enrolment::on_frame(Connection&, const FrameHeader& header) {
  if (finished_) return {};
  switch (header.type) {
    case FrameType::kWaiting:
      log_.add(Severity::kWarning, decode_text(control_));
      return {};
    case FrameType::kFault:
      fail(decode_fault(control_));
      return {};
    case FrameType::kMembers: {
      Result<Members> members = decode_members(control_);
      if (!members.ok()) return members.status();
      finished_ = true;
      context_.loop.cancel(deadline_);
      on_members_(*members);
      return {};
    }
    default:
      return {Code::kProtocol, "the coordinator sent a frame of type " + std::to_string(int(header.type))};
  }
}

void Enrolment::on_close(Connection&, const Status& why) {
  connection_.reset();
  if (finished_) return;
  const bool final = why.code() == Code::kUnauthenticated || why.code() == Code::kVersionMismatch;
  if (final) {
    fail({why.code(), "the coordinator at " + coordinator_.text() + ": " + why.message()});
    return;
  }
  last_problem_ = why.message();
  if (context_.loop.now_ms() >= next_report_ms_) {
    next_report_ms_ += kReportInterval.count();
    log_.add(Severity::kWarning,
             "still trying to reach the coordinator at " + coordinator_.text() + ": " + last_problem_);
  }
  retry_ = context_.loop.after(kRetryInterval, [this] { connect(); });
}

void Enrolment::expire() {
  fail({Code::kStartTimeout, "the coordinator at " + coordinator_.text() + " did not answer in time" +
                                 (last_problem_.empty() ? "" : " (" + last_problem_ + ")") +
                                 "; is rank 0 running, and is the address right?"});
}

void Enrolment::fail(const Status& why) {
  if (finished_) return;
  stop();
  on_failure_(why);
}

void Enrolment::send_ready() {
  if (connection_) connection_->send(OutFrame::control(FrameType::kReady, {}));
}

void Enrolment::stop() {
  finished_ = true;
  context_.loop.cancel(deadline_);
  context_.loop.cancel(retry_);
  if (connection_) connection_->close();
  connection_.reset();
}

}  // namespace jaxhetero
