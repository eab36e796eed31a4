#include "xla_ffi/membership/coordinator.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "xla_ffi/base/status.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kReportInterval{3000};  // how often those who wait hear whom for

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

Status Coordinator::start(milliseconds patience, milliseconds timeout) {
  patience_ = patience;
  timeout_ = timeout;
  context_.loop.after(patience, [this] { give_up(); });
  context_.loop.after(kReportInterval, [this] { report_missing(); });
  return listener_->start([this](Fd socket, const TcpAddress& peer, std::shared_ptr<void> admission) {
    auto connection = TcpConnection::accept(context_, std::move(socket), peer, *this, std::move(admission));
    guests_[connection.get()].connection = connection;
  });
}

bool Coordinator::is_worker(const Guest& guest) const {
  return guest.registered && guest.registration.role == Role::kWorker;
}

Status Coordinator::on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) {
  Guest& guest = guests_[&connection];
  const bool known = header.type == FrameType::kRegister || header.type == FrameType::kFault ||
                     header.type == FrameType::kAlive || (header.type == FrameType::kReady && !is_worker(guest)) ||
                     (is_worker(guest) && (header.type == FrameType::kLost || header.type == FrameType::kProgress ||
                                           header.type == FrameType::kStill || header.type == FrameType::kIdle ||
                                           header.type == FrameType::kGoodbye));
  if (!known) return {Code::kProtocol, "the coordinator takes no frame of type " + std::to_string(int(header.type))};
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
  if (!guest.registered) return {Code::kProtocol, "it spoke before it registered"};
  guest.heartbeat.heard();
  switch (header.type) {
    case FrameType::kAlive:
      return {};
    case FrameType::kReady:
      return on_ready(guest);
    case FrameType::kLost: {
      const Result<Lost> lost = decode_lost(guest.control);
      if (!lost.ok()) return lost.status();
      on_lost(lost.value());
      return {};
    }
    case FrameType::kProgress: {
      const Result<Progress> progress = decode_progress(guest.control);
      if (!progress.ok()) return progress.status();
      return on_progress(guest, progress.value());
    }
    case FrameType::kStill: {
      const Result<Progress> progress = decode_progress(guest.control);
      if (!progress.ok()) return progress.status();
      return on_still(guest, progress.value());
    }
    case FrameType::kIdle:
      on_idle(guest);
      return {};
    case FrameType::kGoodbye:
      on_goodbye(guest);
      return {};
    default:
      refuse_all(decode_fault(guest.control));
      return {};
  }
}

Status Coordinator::on_ready(Guest& guest) {
  if (guest.ready) return {Code::kProtocol, "it was ready before"};
  guest.ready = true;
  if (phase_ == Phase::kStarted || phase_ == Phase::kChanging) {
    if (has_left_) return {};  // there is nothing to reduce any more; it hears of the end like all others
    view_.reducers.push_back(enter_reducer(guest));
    change_view("reducer " + std::to_string(guest.number) + " (host " + guest.registration.host_name + ") has come");
    return {};
  }
  if (phase_ != Phase::kReducersToldMembers) return {Code::kProtocol, "nobody asked it whether it is ready"};
  const auto is_ready = [](const auto& entry) {
    return entry.second.ready || !entry.second.registered || entry.second.registration.role == Role::kWorker;
  };
  if (std::ranges::all_of(guests_, is_ready)) tell_view();
  return {};
}

// --- Views.

View::Reducer Coordinator::enter_reducer(Guest& guest) {
  const Registration& who = guest.registration;
  return {guest.number, who.address, who.port, who.host_name, who.rank};
}

void Coordinator::on_lost(const Lost& lost) {
  // Who has not heard of the new view yet may well complain of the end of the old one.
  if (lost.view == view_.number) lose_reducer(lost.reducer, lost.why);
}

void Coordinator::lose_reducer(uint32_t number, const std::string& why) {
  if (phase_ != Phase::kStarted && phase_ != Phase::kChanging) return;
  if (has_left_) return;  // there is no round any more that everybody could take part in
  const auto lost = std::ranges::find(view_.reducers, number, &View::Reducer::number);
  if (lost == view_.reducers.end()) return;
  const std::string text =
      "reducer " + std::to_string(number) + " (host " + lost->host_name + ", " + lost->address + ") was lost: " + why;
  view_.reducers.erase(lost);
  if (!job_.failover) return refuse_all({Code::kReducerLost, text});
  if (view_.reducers.empty()) return refuse_all({Code::kReducerLost, text + "; no reducer is left"});
  for (auto& [connection, guest] : guests_) {
    if (guest.registered && !is_worker(guest) && guest.number == number) {
      // It may live, only not for all of us.
      refuse(*connection, {Code::kReducerLost, text + "; the job goes on without it"});
    }
  }
  change_view(text);
}

// Halts the workers; when all have answered, tell_view() sets them going again.
void Coordinator::change_view(const std::string& why) {
  phase_ = Phase::kChanging;
  completed_.clear();
  const uint32_t number = ++view_.number;
  log_.add(Severity::kInfo, "view " + std::to_string(number) + ": " + why);
  for (auto& [connection, guest] : guests_) {
    if (!is_worker(guest)) continue;
    guest.halted = false;
    connection->send(OutFrame::control(FrameType::kHalt, encode(Halt{number, why})));
  }
  context_.loop.after(timeout_, [this, number] {
    if (phase_ != Phase::kChanging || view_.number != number) return;
    std::string silent;
    for (const auto& [connection, guest] : guests_) {
      if (is_worker(guest) && !guest.halted) append_list(silent, named(guest.registration));
    }
    refuse_all({Code::kWorkerLost,
                silent + " did not answer for " + std::to_string(timeout_.count()) + " ms when the reducers changed"});
  });
}

Status Coordinator::on_progress(Guest& guest, const Progress& progress) {
  if (phase_ != Phase::kChanging || progress.view != view_.number || guest.halted) return {};
  guest.halted = true;
  for (const Progress::OpProgress& op : progress.ops) {
    Completed& completed = completed_[op.op];
    completed.least = completed.reports == 0 ? op.completed_count : std::min(completed.least, op.completed_count);
    completed.most = std::max(completed.most, op.completed_count);
    ++completed.reports;
  }
  const auto has_answered = [this](const auto& entry) { return !is_worker(entry.second) || entry.second.halted; };
  if (!std::ranges::all_of(guests_, has_answered)) return {};
  view_.resume = rounds_to_resume();
  // Goodbyes from before the halt are said again by who still has nothing to do.
  for (auto& [connection, other] : guests_) other.leaving = false;
  is_asking_ = false;
  tell_view();
  return {};
}

std::vector<View::Resume> Coordinator::rounds_to_resume() const {
  std::vector<View::Resume> resume;
  for (const auto& [op, completed] : completed_) {
    const uint64_t least = completed.reports == job_.worker_count ? completed.least : 0;
    if (least < completed.most) resume.push_back({op, least});
  }
  return resume;
}

// Unlike the answers to a halt this is true in every view: what all have completed nobody can ask for again.
Status Coordinator::on_still(const Guest& guest, const Progress& progress) {
  Progress forgettable{view_.number, {}};
  for (const Progress::OpProgress& op : progress.ops) {
    Still& still = still_[op.op];
    if (op.completed_count > still.completed_count) still = {op.completed_count, {}};
    if (op.completed_count == still.completed_count) still.ranks.insert(guest.registration.rank);
    if (still.ranks.size() < job_.worker_count) continue;
    forgettable.ops.push_back({op.op, still.completed_count});
    still_.erase(op.op);
  }
  if (still_.size() > kMaxOps) return {Code::kProtocol, "it names more than " + std::to_string(kMaxOps) + " ops"};
  if (forgettable.ops.empty()) return {};
  for (auto& [connection, other] : guests_) {
    if (!is_worker(other) || other.released) continue;
    connection->send(OutFrame::control(FrameType::kForget, encode(forgettable)));
  }
  return {};
}

void Coordinator::tell_view() {
  if (phase_ != Phase::kChanging) {  // the start: from now on everybody is to be heard
    for (auto& [connection, guest] : guests_) guest.heartbeat.heard();
    Heartbeat::start(context_.loop, timeout_, [this] { return beat(); });
  }
  phase_ = Phase::kStarted;
  for (auto& [connection, guest] : guests_) {
    if (!is_worker(guest)) continue;
    view_.own_index = static_cast<uint32_t>(guest.registration.rank);
    connection->send(OutFrame::control(FrameType::kView, encode(view_)));
  }
}

// Whether to go on. One loss at a time: it may change guests_.
bool Coordinator::beat() {
  if (phase_ == Phase::kEnded || phase_ == Phase::kFailed) return false;
  const Guest* stopped = nullptr;
  for (const auto& [connection, guest] : guests_) {
    if (!guest.registered || guest.released) continue;
    connection->send(OutFrame::control(FrameType::kAlive, {}));
    if (guest.heartbeat.stopped(timeout_)) stopped = &guest;
  }
  if (stopped == nullptr) return true;
  const std::string why = "no sign of life for " + std::to_string(Heartbeat::patience(timeout_).count()) + " ms";
  if (is_cut_off()) {
    refuse_all(
        {Code::kWorkerLost, "rank 0 (host " + view_.worker_hosts[0] +
                                "), where the coordinator is, was cut off: no other host gave a sign of life for " +
                                std::to_string(Heartbeat::patience(timeout_).count()) + " ms"});
  } else if (is_worker(*stopped)) {
    refuse_all({Code::kWorkerLost, named(stopped->registration) + " was lost: " + why});
  } else {
    lose_reducer(stopped->number, why);
  }
  return true;
}

// Whether all other hosts, of several, went silent within a few beats of each other: then it is not they who broke.
bool Coordinator::is_cut_off() const {
  std::set<std::string> others;
  for (const auto& [connection, guest] : guests_) {
    const Registration& who = guest.registration;
    if (!guest.registered || guest.released || who.host_name == view_.worker_hosts[0]) continue;
    if (guest.heartbeat.silence() < Heartbeat::patience(timeout_) * 3 / 4) return false;
    others.insert(who.host_name);
  }
  return others.size() > 1;
}

// --- Leaving.

void Coordinator::on_goodbye(Guest& guest) {
  guest.leaving = true;
  if (!is_asking_) ask_whether_idle();
}

void Coordinator::ask_whether_idle() {
  is_asking_ = true;
  for (auto& [connection, guest] : guests_) {
    if (!is_worker(guest) || guest.released) continue;
    guest.idle = false;
    connection->send(OutFrame::control(FrameType::kLeaving, {}));
  }
}

// Who wants to leave may when nobody has a round running: whatever has been completed anywhere then is everywhere.
void Coordinator::on_idle(Guest& idle) {
  idle.idle = true;
  const auto is_busy = [this](const auto& entry) {
    return is_worker(entry.second) && !entry.second.released && !entry.second.idle;
  };
  if (!is_asking_ || phase_ != Phase::kStarted || std::ranges::any_of(guests_, is_busy)) return;
  is_asking_ = false;
  for (auto& [connection, guest] : guests_) {
    if (!guest.leaving || guest.released) continue;
    has_left_ = guest.released = true;
    connection->send(OutFrame::control(FrameType::kGoodbye, {}));
  }
}

void Coordinator::end(std::function<void()> done) {
  phase_ = Phase::kEnded;
  on_empty_ = std::move(done);
  listener_->stop();
  std::vector<std::shared_ptr<TcpConnection>> connections;  // closing may change guests_
  for (const auto& [connection, guest] : guests_) connections.push_back(guest.connection);
  for (const auto& connection : connections) {
    connection->send(OutFrame::control(FrameType::kGoodbye, {}));
    connection->close_after_flush();
  }
  if (guests_.empty()) on_empty_();
}

// --- The start.

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
  if (phase_ != Phase::kGathering) {  // a reducer that comes later; it is used once it is ready
    guest.number = next_reducer_number_++;
    view_.own_index = guest.number;
    guest.connection->send(OutFrame::control(FrameType::kView, encode(view_)));
    return {};
  }
  if (count(Role::kWorker) == job_.worker_count && count(Role::kReducer) == total_reducer_count(job_)) tell_reducers();
  return {};
}

Status Coordinator::check(const Registration& registration) const {
  const bool may_come_later = job_.failover && !has_left_ && registration.role == Role::kReducer &&
                              registration.rank < 0 && (phase_ == Phase::kStarted || phase_ == Phase::kChanging);
  if (phase_ == Phase::kFailed) return fault_;
  if (phase_ != Phase::kGathering && !may_come_later) {
    return {Code::kInvalidArgument, "this job has started already, with everybody it needs"};
  }
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
  if (phase_ != Phase::kFailed) fault_ = why;
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
  std::memcpy(&view_.job_id, random.data(), sizeof view_.job_id);
  view_.job = job_;
  view_.worker_hosts.resize(job_.worker_count);
  for (auto& [connection, guest] : guests_) {
    if (!guest.registered) continue;
    const Registration& who = guest.registration;
    if (who.role == Role::kWorker) {
      view_.worker_hosts[static_cast<size_t>(who.rank)] = who.host_name;
    } else {
      guest.number = next_reducer_number_++;
      view_.reducers.push_back(enter_reducer(guest));
    }
  }
  for (auto& [connection, guest] : guests_) {
    if (!guest.registered || guest.registration.role != Role::kReducer) continue;
    view_.own_index = guest.number;
    connection->send(OutFrame::control(FrameType::kView, encode(view_)));
  }
  if (view_.reducers.empty()) tell_view();
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
  if (phase_ > Phase::kReducersToldMembers) return;
  const std::string text = "waiting for " + missing();
  for (auto& [connection, guest] : guests_) {
    if (guest.registered) connection->send(OutFrame::control(FrameType::kWaiting, encode(text)));
  }
  context_.loop.after(kReportInterval, [this] { report_missing(); });
}

void Coordinator::give_up() {
  if (phase_ > Phase::kReducersToldMembers) return;
  refuse_all({Code::kStartTimeout,
              "the job did not start within " + std::to_string(patience_.count()) + " ms: missing " + missing()});
}

void Coordinator::on_close(Connection& connection, const Status& why) {
  const auto found = guests_.find(&connection);
  if (found == guests_.end()) return;
  const Guest guest = std::move(found->second);
  guests_.erase(found);
  if (guests_.empty() && on_empty_) return on_empty_();
  if (phase_ == Phase::kEnded || phase_ == Phase::kFailed || why.ok() || guest.released) return;
  if (!guest.registered) {
    // A stranger, or a process with the wrong token: its own message says more than ours can.
    refusals_.add(log_, Severity::kWarning,
                  "the coordinator refused a connection from " + connection.peer() + ": " + why.message(),
                  context_.loop.now_ms());
    if (why.code() == Code::kUnauthenticated) last_refusal_ = connection.peer() + " was refused: " + why.message();
    return;
  }
  if (phase_ == Phase::kStarted || phase_ == Phase::kChanging) {
    if (!is_worker(guest)) return lose_reducer(guest.number, why.message());
    return refuse_all({Code::kWorkerLost, named(guest.registration) + " was lost: " + why.message()});
  }
  const std::string text = named(guest.registration) + " left before the job started: " + why.message();
  log_.add(Severity::kWarning, text);
  if (phase_ == Phase::kReducersToldMembers) refuse_all({Code::kStartTimeout, text});
}

}  // namespace jaxhetero
