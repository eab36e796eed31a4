// The part of the coordinator of an elastic job that lets workers come and leave at gates: see gate.h.
#include <algorithm>
#include <iterator>
#include <ranges>
#include <set>
#include <string>
#include <utility>

#include "xla_ffi/membership/elastic_coordinator.h"
#include "xla_ffi/membership/names.h"

namespace jaxhetero {

// The reducer inside a worker that waits to be let in comes with that worker.
Status ElasticCoordinator::on_ready(Guest& guest) {
  if (guest.phase != Guest::Phase::kCandidate) return Coordinator::on_ready(guest);
  guest.is_present = true;
  consider_meeting();
  return {};
}

// A candidate's program waits at a gate, or a member that has come has got the state.
Status ElasticCoordinator::on_presence(Guest& guest, const Presence& presence) {
  if (guest.phase == Guest::Phase::kCandidate) {
    guest.is_present = true;
  } else if (guest.is_member() && phase_ == Phase::kStarted && presence.view == view_.number) {
    const auto rank = static_cast<uint32_t>(guest.registration.rank);
    if (std::erase(view_.joining, rank) == 0 || !view_.joining.empty()) return {};
    to_members(OutFrame::control(FrameType::kGo, {}, header_of(Presence{view_.number})));
  }
  consider_meeting();
  return {};
}

void ElasticCoordinator::on_wish_to_leave(const Guest& guest) {
  if (!guest.is_member()) return;
  const auto rank = static_cast<uint32_t>(guest.registration.rank);
  const bool is_new = leavers_.insert(rank).second;
  consider_meeting();
  if (!is_new || ranks_to_leave().contains(rank)) return;
  log_.add(Severity::kWarning, named(guest.registration) +
                                   " wants to leave, and stays until others have come, or what its reducer keeps of "
                                   "optimizers is backed up: without it the job would have fewer workers than it "
                                   "needs, no reducer, or less of that");
}

bool ElasticCoordinator::may_come_in(const Guest& guest) {
  const auto rank = static_cast<uint32_t>(guest.registration.rank);
  const bool waits = guest.phase == Guest::Phase::kCandidate && guest.is_worker() && guest.is_present;
  if (!waits || view_.has_member(rank)) return false;
  const Guest* const inside = find_inside(rank);
  return rank >= job_.colocated_count || (inside != nullptr && inside->is_present);
}

// The reducer inside a candidate.
ElasticCoordinator::Guest* ElasticCoordinator::find_inside(uint32_t rank) {
  const auto found = std::ranges::find_if(guests_, [rank](const auto& entry) {
    const Guest& guest = entry.second;
    return guest.phase == Guest::Phase::kCandidate && guest.is_reducer() &&
           guest.registration.rank == static_cast<int32_t>(rank);
  });
  return found == guests_.end() ? nullptr : &found->second;
}

// As many as the job can do without, with the reducers inside them; or all members.
std::set<uint32_t> ElasticCoordinator::ranks_to_leave() const {
  std::set<uint32_t> ranks;
  for (const uint32_t rank : leavers_) {
    if (view_.has_member(rank)) ranks.insert(rank);
  }
  if (ranks.size() == view_.members.size()) return ranks;
  const auto stays = [&ranks](const View::Reducer& reducer) {
    return reducer.colocated_rank < 0 || !ranks.contains(static_cast<uint32_t>(reducer.colocated_rank));
  };
  const auto can_go = [&] {
    return view_.members.size() - ranks.size() >= job_.least_worker_count && std::ranges::any_of(view_.reducers, stays);
  };
  keep_backups(ranks);
  while (!ranks.empty() && !can_go()) ranks.erase(std::prev(ranks.end()));
  return ranks;
}

// Whether reducers keep something of optimizers.
bool ElasticCoordinator::keep_states() const {
  return !view_.states.empty() || std::ranges::any_of(guests_, [](const auto& entry) {
    return entry.second.settled.has_value() && entry.second.settled->has_states;
  });
}

bool ElasticCoordinator::are_states_backed_up() const {
  return std::ranges::all_of(view_.reducers, [this](const View::Reducer& reducer) {
    const Guest* const guest = find_reducer(reducer.number);
    return guest != nullptr && guest->settled.has_value() && guest->settled->view == view_.number;
  });
}

// The reducers inside workers that leave go one by one, each once all that it keeps has a backup.
void ElasticCoordinator::keep_backups(std::set<uint32_t>& ranks) const {
  if (!keep_states()) return;
  bool may_go = are_states_backed_up();
  for (const View::Reducer& reducer : view_.reducers) {
    if (reducer.colocated_rank < 0 || !ranks.contains(static_cast<uint32_t>(reducer.colocated_rank))) continue;
    if (!std::exchange(may_go, false)) ranks.erase(static_cast<uint32_t>(reducer.colocated_rank));
  }
}

void ElasticCoordinator::consider_meeting() {
  if (phase_ != Phase::kStarted || meeting_.has_value() || !view_.joining.empty()) return;
  const bool has_comers = std::ranges::any_of(guests_, [this](const auto& entry) { return may_come_in(entry.second); });
  if (!has_comers && ranks_to_leave().empty()) return;
  meeting_ = Gathering{(uint64_t{view_.number} << 32) + ++meeting_count_, {}, {}};
  to_members(OutFrame::control(FrameType::kMeet, {}, header_of(Meeting{meeting_->number})));
}

void ElasticCoordinator::on_answer(const Guest& guest, const Meeting& answer) {
  if (!guest.is_member() || phase_ != Phase::kStarted || !meeting_.has_value() || answer.number != meeting_->number)
    return;
  meeting_->gates[static_cast<uint32_t>(guest.registration.rank)] = answer.gate;
  if (meeting_->gates.size() < view_.members.size()) return;
  const uint64_t furthest = std::ranges::max(meeting_->gates | std::views::values);
  to_members(OutFrame::control(FrameType::kMeet, {}, header_of(Meeting{meeting_->number, furthest, true})));
}

void ElasticCoordinator::on_met(const Guest& guest, const Meeting& meeting) {
  if (!guest.is_member() || phase_ != Phase::kStarted || !meeting_.has_value() || meeting.number != meeting_->number)
    return;
  meeting_->met.insert(static_cast<uint32_t>(guest.registration.rank));
  if (meeting_->met.size() < view_.members.size()) return;
  if (ranks_to_leave().size() == view_.members.size()) return end_in_order();
  std::string names;
  for (const auto& [connection, candidate] : guests_) {
    if (may_come_in(candidate)) append_list(names, named(candidate.registration) + " joins");
  }
  for (const uint32_t rank : ranks_to_leave()) append_list(names, "rank " + std::to_string(rank) + " leaves");
  going_ = ranks_to_leave();
  change_view(names);
  has_met_ = true;
}

// The members that have not come to where all meet, or, before that is known, have not said where they stand.
std::vector<uint32_t> ElasticCoordinator::ranks_awaited() const {
  std::vector<uint32_t> ranks;
  if (!meeting_.has_value()) return ranks;
  const bool is_set = meeting_->gates.size() == view_.members.size();
  for (const View::Member& member : view_.members) {
    const bool is_there = is_set ? meeting_->met.contains(member.rank) : meeting_->gates.contains(member.rank);
    if (!is_there) ranks.push_back(member.rank);
  }
  return ranks;
}

// All members stand at the same gate, and have ended their programs.
void ElasticCoordinator::let_in_and_out() {
  const std::set<int32_t> leaving(going_.begin(), going_.end());
  for (auto& [connection, guest] : guests_) {
    if (!may_come_in(guest)) continue;
    const auto rank = static_cast<uint32_t>(guest.registration.rank);
    guest.phase = Guest::Phase::kRegistered;
    guest.heartbeat.heard();
    leavers_.erase(rank);
    view_.worker_hosts[rank] = guest.registration.host_name;
    view_.worker_endpoints[rank] = {guest.registration.address, guest.registration.port};
    view_.joining.push_back(rank);
    Guest* const inside = find_inside(rank);
    if (inside == nullptr) continue;
    inside->phase = Guest::Phase::kReady;
    inside->heartbeat.heard();
    add_to_view(*inside, view_.number);
  }
  std::ranges::sort(view_.joining);
  release(leaving);
  note_members();
  view_.is_short = view_.is_short && view_.members.size() < job_.least_worker_count;
}

void ElasticCoordinator::to_members(const OutFrame& frame) {
  for (auto& [connection, guest] : guests_) {
    if (guest.is_worker() && guest.is_member()) connection->send(OutFrame(frame));
  }
}

}  // namespace jaxhetero
