#include "xla_ffi/membership/elastic_coordinator.h"

#include <algorithm>
#include <optional>

#include "xla_ffi/membership/commits.h"
#include "xla_ffi/membership/names.h"
#include "xla_ffi/transport/tcp_context.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLastWord{500};  // for it to be sent
// For how long workers that are done stay in the job: mostly, all are at about the same time.
constexpr milliseconds kLeaveTogether{1000};

// A number of a view that is greater than those of all earlier coordinators, as far as clocks and the pace of changes
// allow: quarters of a second since 2026. It lasts for 34 years.
uint32_t number_by_clock() {
  using std::chrono::days;
  using std::chrono::system_clock;
  const auto begin = std::chrono::sys_days(std::chrono::year(2026) / 1 / 1);
  return static_cast<uint32_t>(std::chrono::duration_cast<milliseconds>(system_clock::now() - begin).count() / 250);
}

// Whether the registration is that of this member, and not of another one that had its number before.
bool is_same(const Registration& registration, const View::Endpoint& endpoint) {
  return registration.port == endpoint.port;
}

}  // namespace

ElasticCoordinator::ElasticCoordinator(TcpContext& context, std::string version, EventLog& log, milliseconds lost_after,
                                       std::function<void(const Status&)> on_end)
    : Coordinator(context, JobShape(), std::move(version), log), lost_after_(lost_after), on_end_(std::move(on_end)) {
  view_.number = number_by_clock();
}

bool ElasticCoordinator::takes(const Guest& guest, FrameType type) const {
  switch (type) {
    case FrameType::kReturn:
      return !guest.is_registered();
    case FrameType::kReport:
      return guest.is_worker();
    case FrameType::kAccuse:
      return guest.is_registered();
    case FrameType::kProgress:
    case FrameType::kStill:
    case FrameType::kIdle:
      return false;
    default:
      return Coordinator::takes(guest, type);
  }
}

Status ElasticCoordinator::on_frame_of_elastic(Guest& guest, FrameType type) {
  if (type == FrameType::kReturn) return on_return(guest);
  guest.heartbeat.heard();
  return type == FrameType::kReport ? on_report(guest) : on_accusation(guest);
}

// Reducers wait for the first worker, who knows the settings.
Status ElasticCoordinator::admit(Guest& guest, Registration registration) {
  if (!returns_.empty()) {
    refuse(*guest.connection, {Code::kInvalidArgument, "this job has started already, with another coordinator"});
    return {};
  }
  if (job_.is_elastic()) return Coordinator::admit(guest, std::move(registration));
  if (registration.role == Role::kReducer) {
    early_.emplace_back(guest.connection.get(), std::move(registration));
    return {};
  }
  if (!registration.job.is_elastic()) {
    refuse(*guest.connection,
           {Code::kInvalidArgument, named(registration) + " has no setting `elastic`, and this coordinator is for "
                                                          "elastic jobs; in others rank 0 listens itself"});
    return {};
  }
  job_ = registration.job;
  for (auto& [connection, reducer] : std::exchange(early_, {})) {
    const auto found = guests_.find(connection);
    if (found == guests_.end()) continue;
    if (const Status status = Coordinator::admit(found->second, std::move(reducer)); !status.ok()) {
      refuse(*connection, status);
    }
  }
  return Coordinator::admit(guest, std::move(registration));
}

// --- Changes.

// Of a worker that has failed: nobody else has to.
void ElasticCoordinator::on_fault(const Guest& guest, const Status& why) {
  const Registration process = guest.registration;
  if (phase_ < Phase::kStarted) return refuse_all(why);
  if (phase_ == Phase::kStarted || phase_ == Phase::kChanging) lose(process, why.message());
}

void ElasticCoordinator::lose(const Registration& process, const std::string& why) {
  if (process.rank < 0) return lose_reducer(static_cast<uint32_t>(process.number), why);
  lose_worker(static_cast<uint32_t>(process.rank), named(process) + " was lost: " + why);
}

void ElasticCoordinator::lose_worker(uint32_t rank, const std::string& why) {
  if (phase_ != Phase::kStarted && phase_ != Phase::kChanging) return;
  const auto member = std::ranges::find(view_.members, rank, &View::Member::rank);
  if (member == view_.members.end()) return;
  view_.members.erase(member);
  const auto is_inside = [rank](const View::Reducer& reducer) {
    return reducer.colocated_rank == static_cast<int32_t>(rank);
  };
  std::erase_if(view_.reducers, is_inside);
  let_go_all(
      [rank](const Guest& guest) { return guest.is_member() && guest.registration.rank == static_cast<int32_t>(rank); },
      why);
  if (view_.members.size() < job_.least_worker_count) {
    return refuse_all({Code::kWorkerLost, why + "; " + std::to_string(view_.members.size()) +
                                              " workers are left, and the job needs at least " +
                                              std::to_string(job_.least_worker_count)});
  }
  if (view_.reducers.empty()) return refuse_all({Code::kReducerLost, why + "; no reducer is left"});
  change_view(why);
}

// Letting go may change guests_.
void ElasticCoordinator::let_go_all(const std::function<bool(const Guest&)>& is_lost, const std::string& why) {
  std::vector<Connection*> lost;
  for (const auto& [connection, guest] : guests_) {
    if (is_lost(guest)) lost.push_back(connection);
  }
  for (Connection* const connection : lost) {
    const auto guest = guests_.find(connection);
    if (guest != guests_.end()) let_go(guest->second, 0, why);
  }
}

// Each loss makes a view of its own; the members answer the last one.
void ElasticCoordinator::lose_silent(const std::vector<Registration>& workers, const std::string& why) {
  for (const Registration& worker : workers) {
    lose_worker(static_cast<uint32_t>(worker.rank), named(worker) + " was lost: it " + why);
  }
}

void ElasticCoordinator::change_view(const std::string& why) {
  reports_.clear();
  accusers_.clear();
  Coordinator::change_view(why);
}

Status ElasticCoordinator::on_report(Guest& guest) {
  Result<Report> report = decode_report(guest.control);
  if (!report.ok()) return report.status();
  if (phase_ != Phase::kChanging || report->view != view_.number || guest.phase != Guest::Phase::kHalting) return {};
  guest.phase = Guest::Phase::kHalted;
  reports_[static_cast<uint32_t>(guest.registration.rank)] = std::move(*report);
  const auto is_halting = [](const auto& entry) { return entry.second.phase == Guest::Phase::kHalting; };
  if (std::ranges::none_of(guests_, is_halting)) decide();
  return {};
}

void ElasticCoordinator::decide() {
  Result<std::vector<View::Commit>> commits = decide_commits(reports_);
  if (!commits.ok()) return refuse_all(commits.status());
  view_.commits = std::move(*commits);
  // One that still has no rounds will say goodbye again.
  for (auto& [connection, guest] : guests_) {
    if (guest.phase == Guest::Phase::kHalted) guest.phase = Guest::Phase::kRegistered;
  }
  tell_view();
  view_.commits.clear();
}

void ElasticCoordinator::note_members() {
  std::vector<View::Member> members;
  for (const auto& [connection, guest] : guests_) {
    if (!guest.is_worker() || !guest.is_member()) continue;
    const auto rank = static_cast<uint32_t>(guest.registration.rank);
    const auto before = std::ranges::find(view_.members, rank, &View::Member::rank);
    members.push_back(before == view_.members.end() ? View::Member{rank, view_.number} : *before);
  }
  std::ranges::sort(members, {}, &View::Member::rank);
  view_.members = std::move(members);
}

// To reducers as well, who may have to tell another coordinator.
void ElasticCoordinator::tell_view() {
  Coordinator::tell_view();
  for (auto& [connection, guest] : guests_) {
    if (guest.phase != Guest::Phase::kReady) continue;
    view_.own_index = guest.number();
    connection->send(OutFrame::control(FrameType::kView, encode(view_)));
  }
}

// If nobody gives a sign of life, the fault is here, and the members do well without.
bool ElasticCoordinator::beat() {
  if (phase_ == Phase::kEnded || phase_ == Phase::kFailed) return false;
  std::optional<Registration> stopped;
  bool hears_any = false;
  for (const auto& [connection, guest] : guests_) {
    if (!guest.is_member()) continue;
    connection->send(OutFrame::control(FrameType::kAlive, {}));
    if (guest.heartbeat.stopped(timeout_)) {
      stopped = guest.registration;
    } else {
      hears_any = true;
    }
  }
  if (stopped.has_value() && hears_any) {
    lose(*stopped, "no sign of life for " + std::to_string(lost_after_.count()) + " ms");
  }
  return true;
}

// A worker is stuck if most of the others say so. A reducer says that a worker has broken the protocol.
Status ElasticCoordinator::on_accusation(const Guest& guest) {
  Result<Accusation> accusation = decode_accusation(guest.control);
  if (!accusation.ok()) return accusation.status();
  if (phase_ != Phase::kStarted || accusation->view != view_.number || !guest.is_member()) return {};
  const auto accuser = static_cast<uint32_t>(guest.registration.rank);
  for (const uint32_t rank : accusation->ranks) {
    if (!view_.has_member(rank)) continue;
    std::set<uint32_t>& accusers = accusers_[rank];
    if (guest.is_worker()) accusers.insert(accuser);
    if (guest.is_worker() && 2 * accusers.size() <= view_.members.size() - 1) continue;
    const std::string name = "rank " + std::to_string(rank) + " (host " + view_.worker_hosts[rank] + ")";
    lose_worker(rank, name + " was lost: " + accusation->why);
    return {};
  }
  return {};
}

void ElasticCoordinator::refuse_all(const Status& why) {
  Coordinator::refuse_all(why);
  if (!on_end_) return;
  context_.loop.after(kLastWord, [on_end = std::exchange(on_end_, nullptr), why] { on_end(why); });
}

// --- Leaving.

void ElasticCoordinator::on_goodbye(Guest& guest, const Idle&) {
  if (guest.phase != Guest::Phase::kRegistered || phase_ != Phase::kStarted) return;
  guest.phase = Guest::Phase::kLeaving;
  const auto stays = [](const auto& entry) {
    return entry.second.is_worker() && entry.second.is_member() && entry.second.phase != Guest::Phase::kLeaving;
  };
  if (std::ranges::any_of(guests_, stays)) {
    context_.loop.after(kLeaveTogether, [this, number = view_.number] {
      if (phase_ == Phase::kStarted && view_.number == number) release_leavers();
    });
    return;
  }
  end([this] {
    if (on_end_) std::exchange(on_end_, nullptr)({});
  });
}

// Others have more to do. They go on without those who are done, however few are left.
void ElasticCoordinator::release_leavers() {
  std::set<int32_t> ranks;
  std::string names;
  for (const auto& [connection, guest] : guests_) {
    if (guest.phase != Guest::Phase::kLeaving) continue;
    ranks.insert(guest.registration.rank);
    append_list(names, named(guest.registration));
  }
  const auto goes = [&ranks](int32_t rank) { return ranks.contains(rank); };
  std::vector<View::Reducer> reducers = view_.reducers;
  std::erase_if(reducers, [&](const View::Reducer& reducer) { return goes(reducer.colocated_rank); });
  if (ranks.empty() || reducers.empty()) return;
  view_.reducers = std::move(reducers);
  std::erase_if(view_.members, [&](const View::Member& member) { return goes(static_cast<int32_t>(member.rank)); });
  std::vector<std::shared_ptr<TcpConnection>> released;  // closing may change guests_
  for (auto& [connection, guest] : guests_) {
    if (!guest.is_member() || !goes(guest.registration.rank)) continue;
    guest.phase = Guest::Phase::kReleased;
    released.push_back(guest.connection);
  }
  for (const auto& connection : released) {
    connection->send(OutFrame::control(FrameType::kGoodbye, {}));
    connection->close_after_flush();
  }
  change_view(names + " has left");
}

// --- Returning.

Status ElasticCoordinator::on_return(Guest& guest) {
  Result<Return> back = decode_return(guest.control);
  if (!back.ok()) return back.status();
  if (back->registration.version != version_) {
    refuse(*guest.connection, {Code::kVersionMismatch, named(back->registration) + " runs jaxhetero " +
                                                           back->registration.version + ", the coordinator runs " +
                                                           version_ + "; install the same version everywhere"});
    return {};
  }
  guest.registration = back->registration;
  if (guest.registration.address.empty()) guest.registration.address = guest.connection->peer_host();
  if (phase_ == Phase::kFailed) {
    refuse(*guest.connection, fault_);
    return {};
  }
  if (guest.registration.role == Role::kReducer) give_number(guest.registration);
  if (phase_ != Phase::kGathering) {  // the job has gone on without it
    let_go(guest, 0, named(guest.registration) + " came back too late");
    return {};
  }
  guest.phase = guest.registration.role == Role::kWorker ? Guest::Phase::kRegistered : Guest::Phase::kReady;
  view_.number = std::max(view_.number, back->heard_view + 1);
  if (returns_.empty()) {
    log_.add(Severity::kInfo, "members of a job come back that has had another coordinator before");
    context_.loop.after(lost_after_, [this] {
      if (phase_ == Phase::kGathering) resume();
    });
  }
  returns_[guest.connection.get()] = std::move(*back);
  const View* const newest = newest_view();
  if (newest != nullptr && have_all_returned(*newest)) resume();
  return {};
}

// That a worker tells; null if none has come back. Reducers do not hear of every view.
const View* ElasticCoordinator::newest_view() const {
  const View* newest = nullptr;
  for (const auto& [connection, back] : returns_) {
    const bool is_here = guests_.contains(connection);
    if (!is_here || back.registration.role != Role::kWorker) continue;
    if (newest == nullptr || back.view.number > newest->number) newest = &back.view;
  }
  return newest;
}

Coordinator::Guest* ElasticCoordinator::returned_worker(const View& view, uint32_t rank) {
  for (auto& [connection, guest] : guests_) {
    const bool has_rank = guest.is_worker() && guest.registration.rank == static_cast<int32_t>(rank);
    if (has_rank && is_same(guest.registration, view.worker_endpoints[rank])) return &guest;
  }
  return nullptr;
}

Coordinator::Guest* ElasticCoordinator::returned_reducer(const View::Reducer& reducer) {
  for (auto& [connection, guest] : guests_) {
    const bool has_number = guest.is_reducer() && guest.number() == reducer.number;
    if (has_number && is_same(guest.registration, {reducer.address, reducer.port})) return &guest;
  }
  return nullptr;
}

bool ElasticCoordinator::have_all_returned(const View& view) {
  return std::ranges::all_of(view.members,
                             [&](const View::Member& m) { return returned_worker(view, m.rank) != nullptr; }) &&
         std::ranges::all_of(view.reducers, [&](const View::Reducer& r) { return returned_reducer(r) != nullptr; });
}

// The job goes on with those who are here of its newest view. Others, which an earlier view has dropped, hear so.
void ElasticCoordinator::resume() {
  const View* const newest = newest_view();
  if (newest == nullptr) return refuse_all({Code::kWorkerLost, "no worker has come back to the coordinator"});
  const uint32_t number = view_.number;
  view_ = *newest;
  view_.number = number;
  view_.commits.clear();
  job_ = view_.job;
  std::erase_if(view_.members, [&](const View::Member& m) { return returned_worker(view_, m.rank) == nullptr; });
  std::erase_if(view_.reducers, [&](const View::Reducer& reducer) {
    const bool is_inside = reducer.colocated_rank >= 0;
    return returned_reducer(reducer) == nullptr ||
           (is_inside && !view_.has_member(static_cast<uint32_t>(reducer.colocated_rank)));
  });
  const auto is_stale = [this](const Guest& guest) {
    const auto has_number = [&](const View::Reducer& reducer) { return returned_reducer(reducer) == &guest; };
    const auto rank = static_cast<uint32_t>(guest.registration.rank);
    if (guest.is_worker()) return !view_.has_member(rank) || returned_worker(view_, rank) != &guest;
    return guest.is_registered() && std::ranges::none_of(view_.reducers, has_number);
  };
  let_go_all(is_stale, "it had been dropped before the coordinator was started again");
  returns_.clear();
  if (view_.members.size() < job_.least_worker_count || view_.reducers.empty()) {
    return refuse_all(
        {Code::kWorkerLost, "too few have come back to the coordinator: " + std::to_string(view_.members.size()) +
                                " workers and " + std::to_string(view_.reducers.size()) + " reducers"});
  }
  phase_ = Phase::kStarted;
  for (auto& [connection, guest] : guests_) guest.heartbeat.heard();
  Heartbeat::start(context_.loop, timeout_, [this] { return beat(); });
  change_view("the coordinator was started again");
}

}  // namespace jaxhetero
