// The part of the coordinator of an elastic job that was started anew: the members of the job come back to it.
#include <algorithm>
#include <string>
#include <utility>

#include "xla_ffi/membership/elastic_coordinator.h"
#include "xla_ffi/membership/names.h"

namespace jaxhetero {
namespace {

// Whether both are there, and are one process: others that had the number before were there since another view.
template <typename Items, typename Number>
bool are_same(const Items& items, const Items& others, uint32_t number, Number number_of) {
  const auto item = std::ranges::find(items, number, number_of);
  const auto other = std::ranges::find(others, number, number_of);
  return item != items.end() && other != others.end() && item->since == other->since;
}

// Whether the process that has come back takes part in this view.
bool is_in(const View& view, const Return& back) {
  const Registration& who = back.registration;
  if (who.role == Role::kWorker) {
    return are_same(view.members, back.view.members, static_cast<uint32_t>(who.rank), &View::Member::rank);
  }
  return are_same(view.reducers, back.view.reducers, static_cast<uint32_t>(who.number), &View::Reducer::number);
}

}  // namespace

Status ElasticCoordinator::on_return(Guest& guest) {
  Result<Return> back = decode_return(guest.control);
  if (!back.ok()) return back.status();
  Registration& who = back->registration;
  if (who.version != version_) {
    refuse(*guest.connection,
           {Code::kVersionMismatch, named(who) + " runs jaxhetero " + who.version + ", the coordinator runs " +
                                        version_ + "; install the same version everywhere"});
    return {};
  }
  if (who.address.empty()) who.address = guest.connection->peer_host();
  if (who.role == Role::kReducer) give_number(who);
  guest.registration = who;
  if (phase_ == Phase::kFailed) {
    refuse(*guest.connection, fault_);
    return {};
  }
  if (phase_ != Phase::kGathering) {  // the job has gone on without it
    let_go(guest, 0, named(who) + " came back too late");
    return {};
  }
  guest.phase = who.role == Role::kWorker ? Guest::Phase::kRegistered : Guest::Phase::kReady;
  view_.number = std::max(view_.number, back->heard_view + 1);
  const bool is_first = returns_.empty();
  returns_[guest.connection] = std::move(*back);
  if (is_first) await_members();
  const View* const newest = newest_view();
  if (newest != nullptr && have_all_returned(*newest)) resume();
  return {};
}

// Whoever has registered before is no member. The job lets it in once it goes on.
void ElasticCoordinator::await_members() {
  log_.add(Severity::kInfo, "members of a job come back that has had another coordinator before");
  for (auto& [connection, guest] : guests_) {
    if (guest.phase != Guest::Phase::kRegistered || returns_.contains(guest.connection)) continue;
    guest.phase = Guest::Phase::kConnected;
    early_.emplace_back(guest.connection, std::move(guest.registration));
  }
  context_.loop.after(lost_after_, [this] {
    if (phase_ == Phase::kGathering) resume();
  });
}

// That a worker tells; null if none has come back.
const View* ElasticCoordinator::newest_view() const {
  const View* newest = nullptr;
  for (const auto& [connection, back] : returns_) {
    const bool is_here = guests_.contains(connection.get());
    if (!is_here || back.registration.role != Role::kWorker) continue;
    if (newest == nullptr || back.view.number > newest->number) newest = &back.view;
  }
  return newest;
}

bool ElasticCoordinator::has_returned(const View& view, Role role, uint32_t number) const {
  return std::ranges::any_of(returns_, [&](const auto& entry) {
    const auto& [connection, back] = entry;
    const Registration& who = back.registration;
    const int32_t own = role == Role::kWorker ? who.rank : who.number;
    return guests_.contains(connection.get()) && who.role == role && own == static_cast<int32_t>(number) &&
           is_in(view, back);
  });
}

bool ElasticCoordinator::have_all_returned(const View& view) const {
  const auto is_here = [&](const View::Member& member) { return has_returned(view, Role::kWorker, member.rank); };
  const auto is_there = [&](const View::Reducer& reducer) {
    return has_returned(view, Role::kReducer, reducer.number);
  };
  return std::ranges::all_of(view.members, is_here) && std::ranges::all_of(view.reducers, is_there);
}

// The job goes on with those who are here of its newest view. Others, which an earlier view has dropped, hear so.
void ElasticCoordinator::resume() {
  const View* const newest = newest_view();
  if (newest == nullptr) return refuse_all({Code::kWorkerLost, "no worker has come back to the coordinator"});
  const uint32_t number = view_.number;
  const View view = *newest;
  view_ = view;
  view_.number = number;
  view_.commits.clear();
  view_.is_short = false;
  view_.is_settled = false;
  job_ = view_.job;
  std::erase_if(view_.members, [&](const View::Member& m) { return !has_returned(view, Role::kWorker, m.rank); });
  std::erase_if(view_.reducers, [&](const View::Reducer& reducer) {
    const bool is_inside = reducer.colocated_rank >= 0;
    return !has_returned(view, Role::kReducer, reducer.number) ||
           (is_inside && !view_.has_member(static_cast<uint32_t>(reducer.colocated_rank)));
  });
  const auto is_stale = [this](const Guest& guest) {
    const auto back = returns_.find(guest.connection);
    return back != returns_.end() && !is_in(view_, back->second);
  };
  let_go_all(is_stale, "it had been dropped before the coordinator was started again");
  returns_.clear();
  const std::string text = "too few have come back to the coordinator: " + std::to_string(view_.members.size()) +
                           " workers and " + std::to_string(view_.reducers.size()) + " reducers";
  if (view_.reducers.empty()) return refuse_all({Code::kReducerLost, text});
  phase_ = Phase::kStarted;
  if (view_.members.size() < job_.least_worker_count) await_more({Code::kWorkerLost, text});
  if (phase_ == Phase::kFailed) return;
  for (auto& [connection, guest] : guests_) guest.heartbeat.heard();
  Heartbeat::start(context_.loop, timeout_, [this] { return beat(); });
  change_view("the coordinator was started again");
}

}  // namespace jaxhetero
