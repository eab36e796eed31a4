#include "xla_ffi/membership/elastic_coordinator.h"

#include <algorithm>
#include <optional>
#include <ranges>

#include "xla_ffi/membership/commits.h"
#include "xla_ffi/membership/names.h"
#include "xla_ffi/transport/tcp_context.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLastWord{500};  // for it to be sent
// For how long workers that are done stay in the job: mostly, all are at about the same time.
constexpr milliseconds kLeaveTogether{1000};
// Members look for their coordinator ten times a second: see Member.
constexpr milliseconds kMembersFirst{500};

// A number of a view that is greater than those of all earlier coordinators, as far as clocks and the pace of changes
// allow: quarters of a second since 2026. It lasts for 34 years.
uint32_t number_by_clock() {
  using std::chrono::days;
  using std::chrono::system_clock;
  const auto begin = std::chrono::sys_days(std::chrono::year(2026) / 1 / 1);
  return static_cast<uint32_t>(std::chrono::duration_cast<milliseconds>(system_clock::now() - begin).count() / 250);
}

}  // namespace

ElasticCoordinator::ElasticCoordinator(TcpContext& context, std::string version, EventLog& log, milliseconds lost_after,
                                       milliseconds rejoin_timeout, std::function<void(const Status&)> on_end)
    : Coordinator(context, JobShape(), std::move(version), log),
      lost_after_(lost_after),
      rejoin_timeout_(rejoin_timeout),
      on_end_(std::move(on_end)) {
  view_.number = number_by_clock();
}

bool ElasticCoordinator::takes(const Guest& guest, FrameType type) const {
  switch (type) {
    case FrameType::kReturn:
      return !guest.is_registered();
    case FrameType::kReport:
    case FrameType::kMeet:
    case FrameType::kMet:
      return guest.is_worker();
    // Whoever is admitted later says it again then.
    case FrameType::kPresent:
    case FrameType::kLeave:
      return guest.is_worker() || is_early(guest);
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

bool ElasticCoordinator::is_early(const Guest& guest) const {
  return std::ranges::any_of(early_, [&guest](const auto& entry) { return entry.first == guest.connection; });
}

Status ElasticCoordinator::on_frame_of_elastic(Guest& guest, const FrameHeader& header) {
  if (header.type == FrameType::kReturn) return on_return(guest);
  guest.heartbeat.heard();
  switch (header.type) {
    case FrameType::kReport:
      return on_report(guest);
    case FrameType::kMeet:
      on_answer(guest, decode_meeting(header));
      return {};
    case FrameType::kMet:
      on_met(guest, decode_meeting(header));
      return {};
    case FrameType::kPresent: {
      const Result<Presence> presence = decode_presence(header);
      return presence.ok() ? on_presence(guest, presence.value()) : presence.status();
    }
    case FrameType::kLeave:
      on_wish_to_leave(guest);
      return {};
    default:
      return on_accusation(guest);
  }
}

Status ElasticCoordinator::start(milliseconds patience, milliseconds timeout) {
  context_.loop.after(kMembersFirst, [this] {
    may_start_ = true;
    consider_start();
  });
  return Coordinator::start(patience, timeout);
}

// Some come too early: reducers before the first worker, who knows the settings; workers beyond those that the job
// starts with; and all others while the members of a job come back to a coordinator that was started anew.
Status ElasticCoordinator::admit(Guest& guest, Registration registration) {
  const bool is_worker = registration.role == Role::kWorker;
  if (is_worker && !registration.job.is_elastic()) {
    refuse(*guest.connection,
           {Code::kInvalidArgument, named(registration) + " has no setting `elastic`, and this coordinator is for "
                                                          "elastic jobs; in others rank 0 listens itself"});
    return {};
  }
  const bool is_extra =
      registration.rank >= static_cast<int32_t>((is_worker ? registration.job : job_).first_worker_count);
  const bool is_unknown = !is_worker && !job_.is_elastic();
  if (phase_ < Phase::kStarted && (is_extra || is_unknown || !returns_.empty())) {
    early_.emplace_back(guest.connection, std::move(registration));
    return {};
  }
  if (job_.is_elastic()) return Coordinator::admit(guest, std::move(registration));
  job_ = registration.job;
  const Status status = Coordinator::admit(guest, std::move(registration));
  admit_early();
  return status;
}

// Those who are still too early wait on.
void ElasticCoordinator::admit_early() {
  for (auto& [connection, registration] : std::exchange(early_, {})) {
    const auto found = guests_.find(connection.get());
    if (found == guests_.end()) continue;
    const Status status = admit(found->second, std::move(registration));
    if (!status.ok()) refuse(*connection, status);
  }
}

// Not before the members of an earlier coordinator's job have had the time to come back: others would begin another.
void ElasticCoordinator::consider_start() {
  if (may_start_ && phase_ == Phase::kGathering && returns_.empty() && job_.is_elastic()) Coordinator::consider_start();
}

// --- Changes.

// Of a worker that has failed: nobody else has to.
void ElasticCoordinator::on_fault(const Guest& guest, const Status& why) {
  const Registration process = guest.registration;
  if (!guest.is_member()) return;
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
  if (view_.reducers.empty()) return refuse_all({Code::kReducerLost, why + "; no reducer is left"});
  if (view_.members.size() < job_.least_worker_count) {
    await_more({Code::kWorkerLost, why + "; " + std::to_string(view_.members.size()) +
                                       " workers are left, and the job needs at least " +
                                       std::to_string(job_.least_worker_count)});
  }
  if (phase_ != Phase::kFailed) change_view(why);
}

// Too few are left: they wait at their gates for others, for a while.
void ElasticCoordinator::await_more(const Status& why) {
  if (view_.members.empty() || rejoin_timeout_.count() == 0) return refuse_all(why);
  if (std::exchange(view_.is_short, true)) return;
  log_.add(Severity::kWarning, why.message() + "; waiting " + std::to_string(rejoin_timeout_.count()) + " ms for more");
  context_.loop.after(rejoin_timeout_, [this, why, number = ++shortage_count_] {
    const bool is_over = phase_ == Phase::kEnded || phase_ == Phase::kFailed;
    if (view_.is_short && number == shortage_count_ && !is_over) refuse_all(why);
  });
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
  meeting_.reset();
  has_met_ = false;
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
  view_.joining.clear();
  note_states();
  for (const auto& [rank, report] : reports_) {
    if (!report.has_state) view_.joining.push_back(rank);
  }
  std::erase_if(reports_, [](const auto& entry) { return !entry.second.has_state; });
  if (reports_.empty()) return refuse_all({Code::kWorkerLost, "no worker is left that has the state of the job"});
  Result<std::vector<View::Commit>> commits = decide_commits(reports_);
  if (!commits.ok()) return refuse_all(commits.status());
  view_.commits = std::move(*commits);
  // One that still has no rounds will say goodbye again.
  for (auto& [connection, guest] : guests_) {
    if (guest.phase == Guest::Phase::kHalted) guest.phase = Guest::Phase::kRegistered;
  }
  if (std::exchange(has_met_, false)) let_in_and_out();
  note_members();
  note_complete();
  deal(std::ranges::max(reports_ | std::views::values, {}, &Report::gate).gate);
  tell_view();
  view_.commits.clear();
  view_.counts.clear();
  consider_meeting();
}

// Who keeps what of optimizers follows from one view after the other. Reducers may have heard of the latest one that
// any member has entered.
void ElasticCoordinator::note_states() {
  const auto newest = std::ranges::max_element(reports_ | std::views::values, {}, [](const Report& report) {
    return report.states.empty() ? 0 : report.planned_view;
  });
  view_.states = (*newest).states;
}

// From this gate on, steps are dealt to the members. Earlier ones stay as they were dealt: some have passed those
// gates.
void ElasticCoordinator::deal(uint64_t gate) {
  view_.gate = gate;
  const uint64_t least = std::ranges::min(reports_ | std::views::values, {}, &Report::gate).gate;
  std::vector<View::Deal>& deals = view_.deals;
  std::erase_if(deals, [gate](const View::Deal& deal) { return deal.gate >= gate; });
  deals.push_back({gate, view_.ranks()});
  while (deals.size() > 1 && deals[1].gate <= least) deals.erase(deals.begin());
  if (view_.joining.empty()) return;
  for (const auto& [number, op] : complete_) view_.counts.push_back({number, op.given_count, op.group});
}

// All members will have been given the same.
void ElasticCoordinator::note_complete() {
  for (const auto& [rank, report] : reports_) {
    for (const Report::Op& op : report.ops) {
      Report::Op& known = complete_[op.op];
      const std::string name = op.name.empty() ? known.name : op.name;
      known = {op.op, op.given_count, false, false, op.group, {}, name};
    }
  }
  for (const View::Commit& commit : view_.commits) complete_[commit.op].given_count = commit.round + 1;
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
  if (view_.deals.empty()) view_.deals = {{0, view_.ranks()}};
}

// To reducers as well, who may have to tell another coordinator, and to those who wait to be let in.
void ElasticCoordinator::tell_view() {
  note_members();
  if (const Status status = history_.note(view_, complete_); !status.ok()) {
    log_.add(Severity::kWarning, status.message());
  }
  Coordinator::tell_view();
  for (auto& [connection, guest] : guests_) {
    if (guest.phase != Guest::Phase::kReady && guest.phase != Guest::Phase::kCandidate) continue;
    view_.own_index = guest.is_reducer() ? guest.number() : static_cast<uint32_t>(guest.registration.rank);
    view_.is_candidate = guest.phase == Guest::Phase::kCandidate;
    connection->send(OutFrame::control(FrameType::kView, encode(view_)));
  }
  admit_early();
}

// If nobody gives a sign of life, the fault is here, and the members do well without. So it is if this process has
// stood still itself: members answer its beats, and few of them have said anything else meanwhile. Then all count anew.
bool ElasticCoordinator::beat() {
  if (phase_ == Phase::kEnded || phase_ == Phase::kFailed) return false;
  const bool has_stood_still = own_beat_.silence() > timeout_ / 2;
  own_beat_.heard();
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
  if (stopped.has_value() && hears_any && !has_stood_still) {
    lose(*stopped, "no sign of life for " + std::to_string(lost_after_.count()) + " ms");
  } else if (stopped.has_value()) {
    for (auto& [connection, guest] : guests_) guest.heartbeat.heard();
  }
  return true;
}

// A worker is stuck if most of the others say so. A reducer says that a worker has broken the protocol.
Status ElasticCoordinator::on_accusation(const Guest& guest) {
  Result<Accusation> accusation = decode_accusation(guest.control);
  if (!accusation.ok()) return accusation.status();
  if (phase_ != Phase::kStarted || accusation->view != view_.number || !guest.is_member()) return {};
  const auto accuser = static_cast<uint32_t>(guest.registration.rank);
  for (const uint32_t rank : accusation->ranks.empty() ? ranks_awaited() : accusation->ranks) {
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
  if (std::ranges::any_of(guests_, stays)) return release_later();
  end_in_order();
}

void ElasticCoordinator::release_later() {
  context_.loop.after(kLeaveTogether, [this, number = view_.number] {
    if (phase_ == Phase::kStarted && view_.number == number) release_leavers();
  });
}

// Whoever has to stay until then may leave.
void ElasticCoordinator::note_settled() {
  Coordinator::note_settled();
  if (phase_ != Phase::kStarted || !are_states_backed_up()) return;
  const auto leaves = [](const auto& entry) { return entry.second.phase == Guest::Phase::kLeaving; };
  if (std::ranges::any_of(guests_, leaves)) release_later();
  consider_meeting();
}

void ElasticCoordinator::end_in_order() {
  end([this] {
    if (on_end_) std::exchange(on_end_, nullptr)({});
  });
}

// --- Leaving in order.

// Others have more to do. They go on without those who are done, however few are left.
void ElasticCoordinator::release_leavers() {
  std::set<uint32_t> done;
  for (const auto& [connection, guest] : guests_) {
    if (guest.phase == Guest::Phase::kLeaving) done.insert(static_cast<uint32_t>(guest.registration.rank));
  }
  keep_backups(done);
  std::set<int32_t> ranks;
  std::string names;
  for (const auto& [connection, guest] : guests_) {
    const int32_t rank = guest.registration.rank;
    if (guest.phase != Guest::Phase::kLeaving || !done.contains(static_cast<uint32_t>(rank))) continue;
    ranks.insert(rank);
    append_list(names, named(guest.registration));
  }
  if (release(ranks)) change_view(names + " has left");
}

// Returns whether they are gone: with the last reducers inside, they stay.
bool ElasticCoordinator::release(const std::set<int32_t>& ranks) {
  const auto goes = [&ranks](int32_t rank) { return ranks.contains(rank); };
  std::vector<View::Reducer> reducers = view_.reducers;
  std::erase_if(reducers, [&](const View::Reducer& reducer) { return goes(reducer.colocated_rank); });
  if (ranks.empty() || reducers.empty()) return false;
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
  return true;
}

}  // namespace jaxhetero
