#include "xla_ffi/reducer/server.h"

#include <algorithm>
#include <map>
#include <utility>

#include "xla_ffi/reducer/state_machine.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFaultFlush{2000};
constexpr milliseconds kLateInterval{2500};

// Of each worker the longest wait of any strand.
std::vector<ProcessState::LateWorker> merge(const std::vector<std::vector<ProcessState::LateWorker>>& of_strands) {
  std::map<uint32_t, int64_t> waited_ms;
  for (const auto& workers : of_strands) {
    for (const auto& [rank, ms] : workers) waited_ms[rank] = std::max<int64_t>(waited_ms[rank], ms);
  }
  return latest_first(waited_ms);
}

}  // namespace

ReducerServer::~ReducerServer() {
  stop();
  if (thread_.joinable()) thread_.join();
}

Status ReducerServer::start() {
  Result<std::vector<TcpAddress>> coordinator = resolve_all(config_.coordinator);
  if (!coordinator.ok()) return coordinator.status();
  Result<std::shared_ptr<const CryptoLibrary>> crypto = CryptoLibrary::open_if(config_.encrypt);
  if (!crypto.ok()) return crypto.status();
  crypto_ = std::move(*crypto);
  if (Status status = loops_.add(); !status.ok()) return status;
  loop_ = &loops_.at(0);
  context_ = std::make_unique<TcpContext>(*loop_, config_.token);
  context_->crypto = crypto_;
  context_->counters = counters_;
  if (Status status = listen(); !status.ok()) return status;
  member_ = std::make_unique<Member>(*context_, *coordinator, registration(), log_, config_.timeout);
  loop_->post([this] { member_->start(config_.start_timeout, member_callbacks()); });
  thread_ = std::thread([this] {
    loops_.run_first();
    hang_up();
  });
  return {};
}

Status ReducerServer::listen() {
  std::vector<std::string> hosts = {config_.host};
  hosts.insert(hosts.end(), config_.more_hosts.begin(), config_.more_hosts.end());
  for (const std::string& host : hosts) {
    Result<TcpAddress> address = resolve(host, listeners_.empty() ? config_.port : listeners_[0]->port());
    if (!address.ok()) return address.status();
    Result<std::unique_ptr<TcpListener>> listener = TcpListener::bind(*loop_, *address, "this reducer");
    if (!listener.ok()) return listener.status();
    listeners_.push_back(std::move(*listener));
    addresses_.push_back(address->host());
  }
  return {};
}

Registration ReducerServer::registration() const {
  Registration registration;
  registration.role = Role::kReducer;
  registration.rank = config_.colocated_rank;
  registration.number = config_.number;
  registration.strand_count = config_.most_strands;
  registration.version = config_.version;
  registration.host_name = config_.host_name;
  registration.port = listeners_[0]->port();
  registration.address = config_.host.empty() ? "" : addresses_[0];
  registration.more_addresses.assign(addresses_.begin() + 1, addresses_.end());
  registration.rail_count = static_cast<uint32_t>(listeners_.size());
  return registration;
}

Member::Callbacks ReducerServer::member_callbacks() {
  return {
      .on_view = [this](const View& view) { start_job(view); },
      .on_halt = {},
      .on_forget = {},
      .on_leaving = {},
      .on_goodbye = [this] { close_down({}); },
      .on_ask = [this] { answer_state(); },
      .on_lost = [this](const Lost& lost) { note_lost(lost); },
      .heard_view = [this] { return strands_.empty() ? 0 : strands_[0]->view_number(); },
      .on_failure = [this](const Status& why) { close_down(why); },
  };
}

// --- Strands.

void ReducerServer::start_job(const View& view) {
  // Another coordinator has to hear, too, that one which waits to be let in is ready.
  if (!strands_.empty() && view.is_candidate) member_->send(OutFrame::control(FrameType::kReady, {}));
  if (!strands_.empty()) {
    // A rank may be another worker's than at the start, on another host.
    return on_strands([hosts = view.worker_hosts](ReducerStrand& strand) { strand.name_hosts(hosts); });
  }
  place_.set({view.job_id, view.own_index});
  Status status;
  while (status.ok() && strands_.size() < view.strand_count) status = add_strand(view);
  if (status.ok()) status = open_doors();
  if (!status.ok()) {
    tell_fault(status, view.job.is_elastic());
    return finish(status);
  }
  watch_late();
  member_->send(OutFrame::control(FrameType::kReady, {}));
  log_.add(Severity::kInfo, "reducer " + std::to_string(view.own_index) + " is ready for " +
                                std::to_string(view.worker_hosts.size()) + " workers on port " +
                                std::to_string(listeners_[0]->port()));
}

Status ReducerServer::add_strand(const View& view) {
  const size_t index = strands_.size();
  if (index > 0) {
    if (Status status = loops_.add(); !status.ok()) return status;
  }
  auto context = std::make_unique<TcpContext>(loops_.at(index), config_.token, view.job.checksum);
  context->strand = static_cast<uint16_t>(index);
  context->fabric = fabric_;
  context->owns_lent_frames = true;
  context->message_patience = config_.timeout;
  context->crypto = crypto_;
  ReducerStrand::Config config{own_name(view), config_.start_timeout, config_.timeout};
  auto strand = std::make_unique<ReducerStrand>(std::move(config), std::move(context), view, log_,
                                                strand_callbacks(index, view.job.is_elastic()));
  loops_.run_on(index, [strand = strand.get()] { strand->start(); });
  const std::lock_guard lock(strands_mutex_);
  strands_.push_back(std::move(strand));
  return {};
}

// What a strand says is heard on the server's thread.
ReducerStrand::Callbacks ReducerServer::strand_callbacks(size_t index, bool is_elastic) {
  const auto hear = [this, index](EventLoop::Task task) { index == 0 ? task() : loop_->post(std::move(task)); };
  return {
      .on_fault =
          [this, hear, is_elastic](const Status& why) {
            hear([this, why, is_elastic] {
              tell_fault(why, is_elastic);
              on_strands([why](ReducerStrand& strand) { strand.fail(why); });
              close_down(why);
            });
          },
      .on_quiet = [this, hear] { hear([this] { note_quiet(); }); },
      .on_lost =
          [this, hear](const Lost& lost) {
            hear([this, lost] { member_->send(OutFrame::control(FrameType::kLost, encode(lost))); });
          },
      .on_breach =
          [this, hear](const Accusation& breach) {
            hear([this, breach] { member_->send(OutFrame::control(FrameType::kAccuse, encode(breach))); });
          },
      .on_settled = [this, hear,
                     index](const Settled& settled) { hear([this, index, settled] { note_settled(index, settled); }); },
  };
}

// Before this reducer leaves, which would look like the cause to a coordinator that hears of nothing else. That of an
// elastic job would only take the reducer for lost.
void ReducerServer::tell_fault(const Status& why, bool is_elastic) {
  if (!closing_ && !is_elastic) member_->send(OutFrame::control(FrameType::kFault, encode(why)));
}

// Tells the coordinator once all strands say so of one view.
void ReducerServer::note_settled(size_t index, const Settled& settled) {
  settled_.resize(strands_.size());
  settled_[index] = settled;
  Settled all = settled;
  for (const std::optional<Settled>& each : settled_) {
    if (!each.has_value() || each->view != settled.view) return;
    all.has_states = all.has_states || each->has_states;
  }
  member_->send(OutFrame::control(FrameType::kSettled, {}, header_of(all)));
}

// A connection goes to the strand that its peer asks for.
Status ReducerServer::open_doors() {
  const auto hand_over = [this](size_t index, Fd socket, const TcpAddress& peer, const std::shared_ptr<void>& admission,
                                std::chrono::milliseconds patience) {
    const auto handed = std::make_shared<Fd>(std::move(socket));
    loops_.run_on(index, [strand = strands_[index].get(), handed, peer, admission, patience] {
      strand->accept(std::move(*handed), peer, admission, patience);
    });
  };
  door_ = std::make_unique<StrandDoor>(*loop_, strands_.size(), hand_over);
  for (const auto& listener : listeners_) {
    Status status = listener->start([this](Fd socket, const TcpAddress& peer, const std::shared_ptr<void>& admission) {
      door_->enter(std::move(socket), peer, admission);
    });
    if (!status.ok()) return status;
  }
  return {};
}

void ReducerServer::on_strands(const std::function<void(ReducerStrand&)>& task) {
  for (size_t index = 0; index < strands_.size(); ++index) {
    loops_.run_on(index, [task, strand = strands_[index].get()] { task(*strand); });
  }
}

std::string ReducerServer::own_name(const View& view) const {
  return "reducer " + std::to_string(view.own_index) + " (host " + config_.host_name + ")";
}

Metrics ReducerServer::metrics() const {
  Metrics total = snapshot(*counters_);
  const std::lock_guard lock(strands_mutex_);
  for (const auto& strand : strands_) {
    Metrics metrics = strand->metrics();
    if (strand != strands_.front()) metrics.joined_count = 0;  // the same workers
    add(total, metrics);
  }
  return total;
}

// --- Late workers.

void ReducerServer::find_late(std::function<void(LateWorkers)> then) {
  if (strands_.empty()) return then({});
  loops_.ask<LateWorkers>([this](size_t index) { return strands_[index]->late_workers(); },
                          [then = std::move(then)](const std::vector<LateWorkers>& found) { then(merge(found)); });
}

void ReducerServer::watch_late() {
  loop_->after(std::max(std::min(kLateInterval, config_.timeout / 8), milliseconds(1)), [this] {
    find_late([this](LateWorkers late) {
      const std::lock_guard lock(mutex_);
      late_workers_ = std::move(late);
    });
    watch_late();
  });
}

void ReducerServer::answer_state() {
  find_late([this](LateWorkers late) {
    ProcessState state = process_state(strands_.empty() ? 0 : strands_[0]->view_number(), metrics());
    state.late_workers = std::move(late);
    member_->send(OutFrame::control(FrameType::kState, encode(state)));
  });
}

std::vector<ProcessState::LateWorker> ReducerServer::late_workers() {
  const std::lock_guard lock(mutex_);
  return late_workers_;
}

// --- The end.

// The job is over. The workers know, or will hear it from the coordinator, and close their connections. Closing one
// earlier would look like the death of this reducer.
void ReducerServer::close_down(const Status& how) {
  if (std::exchange(closing_, true)) return;
  end_ = how;
  if (!how.ok()) loop_->after_running(kFaultFlush, [this] { finish(end_); });
  if (strands_.empty()) return finish(end_);
  on_strands([how](ReducerStrand& strand) { strand.close_down(how); });
}

void ReducerServer::note_quiet() {
  if (++quiet_strand_count_ == strands_.size()) finish(end_);
}

// The workers have left for the next view already, and nobody is to hear more of this one.
void ReducerServer::note_lost(const Lost& lost) {
  {
    const std::lock_guard lock(mutex_);
    lost_number_ = lost.reducer;
  }
  finish({Code::kReducerLost, lost.why});
}

void ReducerServer::finish(const Status& how) {
  {
    const std::lock_guard lock(mutex_);
    if (!result_.has_value()) result_ = how;
  }
  ended_.notify_all();
  loop_->stop();
}

// The loop has ended. The sockets close now, not with this object, so that no peer waits for it.
void ReducerServer::hang_up() {
  member_->stop();
  for (const auto& listener : listeners_) listener->stop();
  on_strands([](ReducerStrand& strand) { strand.hang_up(); });
  loops_.stop();
}

std::optional<Status> ReducerServer::wait(milliseconds patience) {
  std::unique_lock lock(mutex_);
  ended_.wait_for(lock, patience, [this] { return result_.has_value(); });
  return result_;
}

std::optional<uint32_t> ReducerServer::lost_number() {
  const std::lock_guard lock(mutex_);
  return lost_number_;
}

void ReducerServer::stop() {
  if (loop_ != nullptr) loop_->post([this] { finish({}); });
}

}  // namespace jaxhetero
