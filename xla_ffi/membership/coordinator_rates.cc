// The part of the coordinator that follows rates.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/membership/coordinator.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

// Not while workers leave: a plan for the last rounds is of no use.
bool Coordinator::can_change_rates() const {
  const auto has_left = [](const auto& entry) {
    const Guest& guest = entry.second;
    return guest.is_worker() && (guest.phase == Guest::Phase::kLeaving || guest.phase == Guest::Phase::kReleased);
  };
  return phase_ == Phase::kStarted && !new_rates_ && !is_asking_ && !has_released_ &&
         std::ranges::none_of(guests_, has_left);
}

Status Coordinator::on_goodput(const Guest& guest, Goodput goodput) {
  if (goodput.view != view_.number || !can_change_rates()) return {};
  std::erase_if(goodput.links, [this](const Goodput::Link& link) {
    return std::ranges::find(view_.reducers, link.reducer, &View::Reducer::number) == view_.reducers.end();
  });
  std::optional<std::vector<NewRates::Rate>> rates =
      rate_watch_.note(static_cast<uint32_t>(guest.registration.rank), goodput);
  if (const std::optional<double> pace = rate_watch_.take_pace()) watch_workers(*pace);
  if (rates && rates->size() == view_.reducers.size()) change_rates(std::move(*rates));
  return {};
}

// The answers are to the question that followed the look before.
void Coordinator::watch_workers(double pace) {
  std::vector<uint32_t> awaited;
  for (const auto& [connection, guest] : guests_) {
    if (!guest.is_reducer() || !guest.is_member() || !guest.answer) continue;
    const std::vector<ProcessState::LateWorker>& late = guest.answer->late_workers;
    if (late.size() == 1 && late[0].rank < job_.worker_count) awaited.push_back(late[0].rank);
  }
  const std::optional<uint32_t> before = worker_watch_.slow();
  if (worker_watch_.note(pace, awaited)) tell_slow(before);
  if (has_visitors_) return;  // they have asked already
  for (auto& [connection, guest] : guests_) {
    if (!guest.is_reducer() || !guest.is_member()) continue;
    guest.answer.reset();
    if (worker_watch_.is_low()) connection->send(OutFrame::control(FrameType::kAsk, {}));
  }
}

void Coordinator::tell_slow(std::optional<uint32_t> before) {
  const std::optional<uint32_t> now = worker_watch_.slow();
  slow_rank_ = now ? static_cast<int32_t>(*now) : -1;
  const std::string pace = std::to_string(worker_watch_.percent()) + " % of the best rate so far";
  if (before) log_.add(Severity::kInfo, name_of_worker(*before) + " is no longer slow: rounds run at " + pace);
  if (!now) return;
  log_.add(Severity::kWarning, name_of_worker(*now) + " has become slow: all rounds wait for what it sends, at " +
                                   pace + "; no other plan helps");
}

std::string Coordinator::name_of_worker(uint32_t rank) const {
  return "rank " + std::to_string(rank) + " (host " + view_.worker_hosts[rank] + ")";
}

uint32_t Coordinator::rate_percent(const Registration& process) const {
  if (process.role == Role::kWorker) return process.rank == slow_rank_ ? worker_watch_.percent() : 0;
  return rate_watch_.percent_of_reducer(static_cast<uint32_t>(process.number));
}

void Coordinator::change_rates(std::vector<NewRates::Rate> rates) {
  log_.add(Severity::kInfo, describe(rates));
  new_rates_ = {view_.number, std::move(rates), {}};
  worker_watch_.change_plan();
  begun_counts_.clear();
  for (auto& [connection, guest] : guests_) {
    if (!guest.is_worker() || !guest.is_member()) continue;
    guest.holds = false;
    connection->send(OutFrame::control(FrameType::kHold, {}, header_of(Hold{view_.number})));
  }
}

// "the rates of the interfaces have changed: reducer 3 (host c) carries 50 % of what the fastest does; the plan
// follows"
std::string Coordinator::describe(const std::vector<NewRates::Rate>& rates) const {
  std::string text;
  for (const NewRates::Rate& rate : rates) {
    if (rate.rate == NewRates::kFullRate || text.size() > 1000) continue;
    const auto reducer = std::ranges::find(view_.reducers, rate.reducer, &View::Reducer::number);
    text += (text.empty() ? "" : ", ") + ("reducer " + std::to_string(rate.reducer)) + " (host " + reducer->host_name +
            ") carries " + std::to_string(100 * rate.rate / NewRates::kFullRate) + " %";
  }
  const std::string what = text.empty() ? "all reducers carry about the same" : text + " of what the fastest does";
  return "the rates of the interfaces have changed: " + what + "; the plan follows";
}

// The answer to a hold of an earlier view is of no use any more.
Status Coordinator::on_begun(Guest& guest, const Progress& begun) {
  if (!new_rates_ || begun.view != view_.number || guest.holds) return {};
  guest.holds = true;
  for (const Progress::OpProgress& op : begun.ops) {
    uint64_t& most = begun_counts_[op.op];
    most = std::max(most, op.completed_count);
  }
  name_rounds();
  return {};
}

// Once all workers hold.
void Coordinator::name_rounds() {
  const auto is_awaited = [](const auto& entry) {
    return entry.second.is_worker() && entry.second.is_member() && !entry.second.holds;
  };
  if (!new_rates_ || std::ranges::any_of(guests_, is_awaited)) return;
  for (const auto& [op, count] : begun_counts_) new_rates_->begins.push_back({op, count});
  for (auto& [connection, guest] : guests_) {
    if (!guest.is_worker() || !guest.is_member()) continue;
    connection->send(OutFrame::control(FrameType::kNewRates, encode(*new_rates_)));
  }
  new_rates_.reset();
  begun_counts_.clear();
}

}  // namespace jaxhetero
