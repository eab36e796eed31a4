#include "xla_ffi/membership/coordinator.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/membership/names.h"
#include "xla_ffi/transport/tcp_context.h"

namespace jaxhetero {

Coordinator::Coordinator(TcpContext& context, JobShape job, std::string version, EventLog& log)
    : context_(context),
      job_(job),
      version_(std::move(version)),
      log_(log),
      rate_watch_(job.worker_count),
      wait_watch_(job.worker_count) {}

bool Coordinator::takes(const Guest& guest, FrameType type) const {
  switch (type) {
    case FrameType::kRegister:
    case FrameType::kFault:
    case FrameType::kAlive:
      return true;
    case FrameType::kAsk:
      return !guest.is_registered();
    case FrameType::kState:
      return guest.is_registered();
    case FrameType::kReady:
      return !guest.is_worker();
    case FrameType::kLost:
      return guest.is_registered();
    case FrameType::kSettled:
      return guest.is_reducer();
    case FrameType::kProgress:
    case FrameType::kStill:
    case FrameType::kIdle:
    case FrameType::kGoodbye:
      return guest.is_worker();
    case FrameType::kGoodput:
    case FrameType::kBegun:
      return guest.is_worker() && !job_.is_elastic();
    default:
      return false;
  }
}

Status Coordinator::on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) {
  Guest& guest = guests_[&connection];
  if (!takes(guest, header.type)) {
    return {Code::kProtocol, "the coordinator takes no frame of type " + std::to_string(int(header.type))};
  }
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
  if (header.type == FrameType::kAsk) return on_ask(guest);
  if (header.type >= FrameType::kReport && header.type < FrameType::kFabric) return on_frame_of_elastic(guest, header);
  if (!guest.is_registered()) return {Code::kProtocol, "it sent a frame before it registered"};
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
    case FrameType::kIdle: {
      const Result<Idle> idle = decode_idle(header);
      if (!idle.ok()) return idle.status();
      on_idle(guest, idle.value());
      return {};
    }
    case FrameType::kSettled: {
      const Result<Settled> settled = decode_settled(header);
      if (!settled.ok()) return settled.status();
      guest.settled = settled.value();
      note_settled();
      return {};
    }
    case FrameType::kGoodput: {
      Result<Goodput> goodput = decode_goodput(guest.control);
      if (!goodput.ok()) return goodput.status();
      return on_goodput(guest, std::move(*goodput));
    }
    case FrameType::kBegun: {
      const Result<Progress> begun = decode_progress(guest.control);
      if (!begun.ok()) return begun.status();
      return on_begun(guest, begun.value());
    }
    case FrameType::kState:
      return on_state(guest);
    case FrameType::kGoodbye: {
      const Result<Idle> idle = decode_idle(header);
      if (!idle.ok()) return idle.status();
      on_goodbye(guest, idle.value());
      return {};
    }
    default:
      on_fault(guest, decode_fault(guest.control));
      return {};
  }
}

Status Coordinator::on_frame_of_elastic(Guest&, const FrameHeader& header) {
  return {Code::kProtocol,
          "it sent a frame of type " + std::to_string(int(header.type)) + ", and the job is not elastic"};
}

void Coordinator::on_fault(const Guest&, const Status& why) { refuse_all(why); }

Status Coordinator::on_ready(Guest& guest) {
  if (guest.phase == Guest::Phase::kReady) return {Code::kProtocol, "it reported ready twice"};
  guest.phase = Guest::Phase::kReady;
  if (phase_ == Phase::kStarted || phase_ == Phase::kChanging) {
    if (has_released_) return {};  // no rounds will come; the reducer is told when the job ends
    add_to_view(guest, view_.number + 1);
    change_view(named(guest.registration) + " joined");
    return {};
  }
  if (phase_ != Phase::kReducersToldMembers)
    return {Code::kProtocol, "it reported ready before it was told the members"};
  const auto is_awaited = [](const auto& entry) {
    return entry.second.is_reducer() && entry.second.phase != Guest::Phase::kReady;
  };
  if (std::ranges::none_of(guests_, is_awaited)) tell_view();
  return {};
}

// --- Views.

// Once all reducers say so of this view, and there is something to keep. Those that have joined have their part then,
// and the next view lets them keep it.
void Coordinator::note_settled() {
  if (phase_ != Phase::kStarted || has_released_) return;
  bool has_states = false;
  bool has_candidates = false;
  for (const View::Reducer& reducer : view_.reducers) {
    const Guest* const guest = find_reducer(reducer.number);
    if (guest == nullptr || !guest->settled || guest->settled->view != view_.number) return;
    has_states = has_states || guest->settled->has_states;
    has_candidates = has_candidates || guest->settled->has_candidates;
  }
  if (!has_states) return;
  log_.add(Severity::kInfo, "view " + std::to_string(view_.number) + ": what reducers keep of optimizers is backed up");
  if (!has_candidates) return;
  view_.is_settled = true;
  change_view("the reducers that joined keep their part of optimizers");
}

// In the order of the numbers, so that the same reducers have the same shares whoever came first, and rows of a bucket
// lie where they belong: see ShardPlan::cut().
void Coordinator::add_to_view(const Guest& guest, uint32_t since) {
  const Registration& who = guest.registration;
  view_.reducers.push_back({guest.number(), who.address, who.port, who.host_name, who.rank, who.more_addresses, since});
  std::ranges::sort(view_.reducers, {}, &View::Reducer::number);
}

void Coordinator::on_lost(const Lost& lost) {
  // A worker that has not received the current view yet may still report connections of the previous one.
  if (lost.view == view_.number) lose_reducer(lost.reducer, lost.why);
}

void Coordinator::lose_reducer(uint32_t number, const std::string& why) {
  if (phase_ != Phase::kStarted && phase_ != Phase::kChanging) return;
  if (has_released_) return;  // a worker has gone: no view could have all of them
  const auto lost = std::ranges::find(view_.reducers, number, &View::Reducer::number);
  if (lost == view_.reducers.end()) return;
  const std::string text =
      "reducer " + std::to_string(number) + " (host " + lost->host_name + ", " + lost->address + ") was lost: " + why;
  view_.reducers.erase(lost);
  if (!job_.failover) return refuse_all({Code::kReducerLost, text});
  if (view_.reducers.empty()) return refuse_all({Code::kReducerLost, text + "; no reducer is left"});
  for (auto& [connection, guest] : guests_) {
    // It may be alive: one worker that cannot reach it is enough.
    if (guest.is_reducer() && guest.is_member() && guest.number() == number) let_go(guest, number, text);
  }
  change_view(text);
}

// Tells a process that the job goes on without it.
void Coordinator::let_go(Guest& guest, uint32_t number, const std::string& why) {
  guest.phase = Guest::Phase::kReleased;
  const Lost last{view_.number, number, why + "; the job goes on without it"};
  guest.connection->send(OutFrame::control(FrameType::kLost, encode(last)));
  guest.connection->close_after_flush();
}

void Coordinator::lose_worker(uint32_t /*rank*/, const std::string& why) { refuse_all({Code::kWorkerLost, why}); }

// Its connection has ended.
void Coordinator::lose(const Registration& process, const std::string& why) {
  if (process.role == Role::kReducer) return lose_reducer(static_cast<uint32_t>(process.number), why);
  lose_worker(static_cast<uint32_t>(process.rank), named(process) + " was lost: " + why);
}

// They have not answered a halt.
void Coordinator::lose_silent(const std::vector<Registration>& workers, const std::string& why) {
  std::string names;
  for (const Registration& worker : workers) append_list(names, named(worker));
  refuse_all({Code::kWorkerLost, names + " " + why});
}

// Halts the workers. Once all have answered, tell_view() lets them continue.
void Coordinator::change_view(const std::string& why) {
  phase_ = Phase::kChanging;
  new_rates_.reset();
  rate_watch_.begin_anew();
  wait_watch_.begin_anew();
  worker_watch_ = {};
  slow_rank_ = -1;
  note_slow_reducers();
  completed_.clear();
  const uint32_t number = ++view_.number;
  log_.add(Severity::kInfo, "view " + std::to_string(number) + ": " + why);
  for (auto& [connection, guest] : guests_) {
    if (!guest.is_worker() || !guest.is_member()) continue;
    guest.phase = Guest::Phase::kHalting;
    connection->send(OutFrame::control(FrameType::kHalt, encode(Halt{number, why})));
  }
  context_.loop.after(timeout_, [this, number] {
    if (phase_ != Phase::kChanging || view_.number != number) return;
    std::vector<Registration> silent;
    for (const auto& [connection, guest] : guests_) {
      if (guest.phase == Guest::Phase::kHalting) silent.push_back(guest.registration);
    }
    lose_silent(silent, "did not answer for " + std::to_string(timeout_.count()) + " ms when the reducers changed");
  });
}

Status Coordinator::on_progress(Guest& guest, const Progress& progress) {
  if (phase_ != Phase::kChanging || progress.view != view_.number) return {};
  if (guest.phase != Guest::Phase::kHalting) return {};
  guest.phase = Guest::Phase::kHalted;
  for (const Progress::OpProgress& op : progress.ops) {
    Completed& completed = completed_[op.op];
    completed.least = completed.reports == 0 ? op.completed_count : std::min(completed.least, op.completed_count);
    completed.most = std::max(completed.most, op.completed_count);
    completed.group_size = op.group_size;
    ++completed.reports;
  }
  const auto is_halting = [](const auto& entry) { return entry.second.phase == Guest::Phase::kHalting; };
  if (std::ranges::any_of(guests_, is_halting)) return {};
  view_.resume = rounds_to_resume();
  // A worker that still has no rounds will say goodbye again.
  for (auto& [connection, other] : guests_) {
    if (other.phase == Guest::Phase::kHalted) other.phase = Guest::Phase::kRegistered;
  }
  is_asking_ = false;
  tell_view();
  return {};
}

std::vector<View::Resume> Coordinator::rounds_to_resume() const {
  std::vector<View::Resume> resume;
  for (const auto& [op, completed] : completed_) {
    const uint64_t least = completed.reports == member_count(completed.group_size) ? completed.least : 0;
    if (least < completed.most) resume.push_back({op, least});
  }
  return resume;
}

// Valid in every view, unlike the answers to a halt: nobody can ask again for rounds that all have completed.
Status Coordinator::on_still(const Guest& guest, const Progress& progress) {
  Progress forgettable{view_.number, {}};
  for (const Progress::OpProgress& op : progress.ops) {
    Still& still = still_[op.op];
    if (op.completed_count > still.completed_count) still = {op.completed_count, {}};
    if (op.completed_count == still.completed_count) still.ranks.insert(guest.registration.rank);
    if (still.ranks.size() < member_count(op.group_size)) continue;
    forgettable.ops.push_back({op.op, still.completed_count});
    still_.erase(op.op);
  }
  const size_t most_ops = size_t{kMaxOps} * view_.strand_count;
  if (still_.size() > most_ops)
    return {Code::kProtocol, "it reports progress in more than " + std::to_string(most_ops) + " ops"};
  if (forgettable.ops.empty()) return {};
  for (auto& [connection, other] : guests_) {
    if (!other.is_worker() || !other.is_member()) continue;
    connection->send(OutFrame::control(FrameType::kForget, encode(forgettable)));
  }
  return {};
}

void Coordinator::tell_view() {
  if (phase_ != Phase::kChanging) {  // the start: heartbeats count from now on
    for (auto& [connection, guest] : guests_) guest.heartbeat.heard();
    Heartbeat::start(context_.loop, timeout_, [this] { return beat(); });
  }
  phase_ = Phase::kStarted;
  note_members();
  for (auto& [connection, guest] : guests_) {
    if (!guest.is_worker() || !guest.is_member()) continue;
    view_.own_index = static_cast<uint32_t>(guest.registration.rank);
    view_.is_candidate = false;
    connection->send(OutFrame::control(FrameType::kView, encode(view_)));
  }
  view_.is_settled = false;
}

// Returns whether to beat again. Handles one loss at a time, because that may change guests_.
bool Coordinator::beat() {
  if (phase_ == Phase::kEnded || phase_ == Phase::kFailed) return false;
  name_rounds();  // a worker may have left that was to answer
  const Guest* stopped = nullptr;
  for (const auto& [connection, guest] : guests_) {
    if (!guest.is_member()) continue;
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
  } else {
    lose(Registration(stopped->registration), why);
  }
  return true;
}

// Whether several other hosts, and all of them, went silent within a few beats of each other. Then the fault is here.
bool Coordinator::is_cut_off() const {
  std::set<std::string> others;
  for (const auto& [connection, guest] : guests_) {
    const Registration& who = guest.registration;
    if (!guest.is_member() || who.host_name == view_.worker_hosts[0]) continue;
    if (guest.heartbeat.silence() < Heartbeat::patience(timeout_) * 3 / 4) return false;
    others.insert(who.host_name);
  }
  return others.size() > 1;
}

// --- Leaving.

void Coordinator::on_goodbye(Guest& guest, const Idle& idle) {
  has_groups_ = has_groups_ || idle.has_groups;
  if (guest.phase == Guest::Phase::kRegistered) guest.phase = Guest::Phase::kLeaving;
  if (!is_asking_) return ask_whether_idle();
  release_idle();
}

void Coordinator::ask_whether_idle() {
  is_asking_ = true;
  for (auto& [connection, guest] : guests_) {
    if (!guest.is_worker() || !guest.is_member()) continue;
    guest.idle = false;
    connection->send(OutFrame::control(FrameType::kLeaving, {}));
  }
}

void Coordinator::on_idle(Guest& guest, const Idle& idle) {
  has_groups_ = has_groups_ || idle.has_groups;
  guest.idle = true;
  release_idle();
}

// Workers may leave once no worker has a round running: then every completed round is complete everywhere.
void Coordinator::release_idle() {
  const auto is_busy = [this](const auto& entry) {
    const Guest& guest = entry.second;
    if (!guest.is_worker() || !guest.is_member()) return false;
    return !guest.idle || (has_groups_ && guest.phase != Guest::Phase::kLeaving);
  };
  if (!is_asking_ || phase_ != Phase::kStarted || std::ranges::any_of(guests_, is_busy)) return;
  is_asking_ = false;
  for (auto& [connection, guest] : guests_) {
    if (guest.phase != Guest::Phase::kLeaving) continue;
    has_released_ = true;
    guest.phase = Guest::Phase::kReleased;
    connection->send(OutFrame::control(FrameType::kGoodbye, {}));
  }
}

void Coordinator::end(std::function<void()> done) {
  phase_ = Phase::kEnded;
  on_empty_ = std::move(done);
  for (const auto& listener : listeners_) listener->stop();
  std::vector<std::shared_ptr<TcpConnection>> connections;  // closing may change guests_
  for (const auto& [connection, guest] : guests_) connections.push_back(guest.connection);
  for (const auto& connection : connections) {
    connection->send(OutFrame::control(FrameType::kGoodbye, {}));
    connection->close_after_flush();
  }
  if (guests_.empty()) on_empty_();
}

const Coordinator::Guest* Coordinator::find_reducer(uint32_t number) const {
  const auto found = std::ranges::find_if(guests_, [number](const auto& entry) {
    return entry.second.is_reducer() && entry.second.is_member() && entry.second.number() == number;
  });
  return found == guests_.end() ? nullptr : &found->second;
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
    return entry.second.is_registered() && entry.second.registration.role == role;
  }));
}

void Coordinator::on_close(Connection& connection, const Status& why) {
  const auto found = guests_.find(&connection);
  if (found == guests_.end()) return;
  const Guest guest = std::move(found->second);
  guests_.erase(found);
  if (guests_.empty() && on_empty_) return on_empty_();
  if (phase_ == Phase::kEnded || phase_ == Phase::kFailed || why.ok() || guest.phase == Guest::Phase::kReleased) return;
  if (guest.is_visitor || guest.phase == Guest::Phase::kCandidate) return;
  if (!guest.is_registered()) {
    // A stranger, or a process with the wrong token, whose own message says more than ours can.
    refusals_.add(log_, Severity::kWarning,
                  "the coordinator refused a connection from " + connection.peer() + ": " + why.message(),
                  context_.loop.now_ms());
    if (why.code() == Code::kUnauthenticated) last_refusal_ = connection.peer() + " was refused: " + why.message();
    return;
  }
  if (phase_ == Phase::kStarted || phase_ == Phase::kChanging) {
    return lose(guest.registration, why.message());
  }
  const std::string text = named(guest.registration) + " left before the job started: " + why.message();
  log_.add(Severity::kWarning, text);
  if (phase_ == Phase::kReducersToldMembers) refuse_all({Code::kStartTimeout, text});
}

}  // namespace jaxhetero
