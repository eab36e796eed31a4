// The part of the coordinator that follows rates.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/membership/coordinator.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

constexpr uint32_t kSlowPercent = 75;  // as `jaxhetero status` has it

}  // namespace

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
  const auto rank = static_cast<uint32_t>(guest.registration.rank);
  goodput.in_step.us > 0 ? follow_waits(rank, goodput) : follow_links(rank, goodput);
  return {};
}

void Coordinator::follow_links(uint32_t rank, const Goodput& goodput) {
  std::optional<std::vector<NewRates::Rate>> rates = rate_watch_.note(rank, goodput);
  if (const std::optional<double> pace = rate_watch_.take_pace()) {
    const std::vector<uint32_t> awaited = awaited_workers();
    watch_workers(*pace, most_awaited(awaited, awaited.size()), false);
    note_slow_reducers();
  }
  if (!rates || rates->size() != view_.reducers.size()) return;
  worker_watch_.change_plan();
  log_.add(Severity::kInfo, describe(*rates));
  change_rates(std::move(*rates));
}

// Where reducers wait for a worker, its interface is slow: the plan can have less for the reducer inside it, if there
// is one. Where they do not, workers know for which reducer they wait.
void Coordinator::follow_waits(uint32_t rank, const Goodput& goodput) {
  if (!wait_watch_.add(rank, goodput)) return;
  const std::optional<uint32_t> worker = most_awaited(awaited_workers(), view_.reducers.size());
  std::optional<uint32_t> reducer;
  if (worker) {
    reducer = reducer_inside(*worker);
  } else if (has_answers()) {
    reducer = wait_watch_.awaited_reducer();
  }
  watch_workers(wait_watch_.pace(), reducer ? std::nullopt : worker, wait_watch_.may_try_less());
  const std::optional<WaitWatch::Trial> before = wait_watch_.trial();
  std::optional<std::vector<NewRates::Rate>> rates = wait_watch_.end_look(reducer, worker.has_value());
  note_slow_reducers();
  const bool changes = rates && rates->size() == view_.reducers.size();
  std::string text = describe_trial(before, changes);
  if (text.empty() && changes) text = describe(*rates);
  if (!text.empty()) log_.add(Severity::kInfo, std::move(text));
  if (changes) change_rates(std::move(*rates));
}

std::optional<uint32_t> Coordinator::reducer_inside(uint32_t rank) const {
  const auto found = std::ranges::find(view_.reducers, static_cast<int32_t>(rank), &View::Reducer::colocated_rank);
  return found == view_.reducers.end() ? std::nullopt : std::optional(found->number);
}

// Of each reducer that waits for one worker alone, for whom. The answers are to the question that followed the look
// before.
std::vector<uint32_t> Coordinator::awaited_workers() const {
  std::vector<uint32_t> awaited;
  for (const auto& [connection, guest] : guests_) {
    if (!guest.is_reducer() || !guest.is_member() || !guest.answer) continue;
    const std::vector<ProcessState::LateWorker>& late = guest.answer->late_workers;
    if (late.size() == 1 && late[0].rank < job_.worker_count) awaited.push_back(late[0].rank);
  }
  return awaited;
}

bool Coordinator::has_answers() const {
  return std::ranges::any_of(guests_, [](const auto& entry) {
    return entry.second.is_reducer() && entry.second.is_member() && entry.second.answer;
  });
}

// `asks`: for whom reducers wait, even though rounds are as fast as ever.
void Coordinator::watch_workers(double pace, std::optional<uint32_t> awaited, bool asks) {
  const std::optional<uint32_t> before = worker_watch_.slow();
  if (worker_watch_.note(pace, awaited)) tell_slow(before);
  if (has_visitors_) return;  // they have asked already
  for (auto& [connection, guest] : guests_) {
    if (!guest.is_reducer() || !guest.is_member()) continue;
    guest.answer.reset();
    if (asks || worker_watch_.is_low()) connection->send(OutFrame::control(FrameType::kAsk, {}));
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

std::string Coordinator::name_of_reducer(uint32_t number) const {
  const auto reducer = std::ranges::find(view_.reducers, number, &View::Reducer::number);
  return "reducer " + std::to_string(number) + " (host " + reducer->host_name + ")";
}

void Coordinator::note_slow_reducers() {
  std::vector<SlowReducer> slow;
  for (const View::Reducer& reducer : view_.reducers) {
    const uint32_t percent = percent_of_reducer(reducer.number);
    if (percent > 0 && percent < kSlowPercent) slow.push_back({reducer.number, percent});
  }
  const std::lock_guard lock(slow_mutex_);
  slow_reducers_ = std::move(slow);
}

std::vector<Coordinator::SlowReducer> Coordinator::slow_reducers() const {
  const std::lock_guard lock(slow_mutex_);
  return slow_reducers_;
}

uint32_t Coordinator::rate_percent(const Registration& process) const {
  if (process.role == Role::kWorker) return process.rank == slow_rank_ ? worker_watch_.percent() : 0;
  return percent_of_reducer(static_cast<uint32_t>(process.number));
}

uint32_t Coordinator::percent_of_reducer(uint32_t number) const {
  return std::max(rate_watch_.percent_of_reducer(number), wait_watch_.percent_of_reducer(number));
}

void Coordinator::change_rates(std::vector<NewRates::Rate> rates) {
  new_rates_ = {view_.number, std::move(rates), {}};
  begun_counts_.clear();
  for (auto& [connection, guest] : guests_) {
    if (!guest.is_worker() || !guest.is_member()) continue;
    guest.holds = false;
    connection->send(OutFrame::control(FrameType::kHold, {}, header_of(Hold{view_.number})));
  }
}

// That a trial begins or ends; empty if none does. `before`: the one before the look, if there was one.
std::string Coordinator::describe_trial(const std::optional<WaitWatch::Trial>& before, bool changes) const {
  if (const std::optional<WaitWatch::Trial>& trial = wait_watch_.trial(); trial && changes) {
    const std::string name = name_of_reducer(trial->reducer);
    return trial->has_less ? name + " has half of its share, to see whether rounds, which wait for it, are faster then"
                           : name + " has its first share again, to see whether it is as fast as before";
  }
  if (!before || wait_watch_.trial()) return "";
  const std::string name = name_of_reducer(before->reducer);
  if (!before->has_less) return changes ? "" : name + " is as fast as before";
  return changes ? "rounds are no faster: " + name + " has its share again"
                 : "rounds are faster: " + name + " keeps half of its share";
}

// "the rates of the interfaces have changed: reducer 3 (host c) carries 50 % of what the fastest does; the plan
// follows"
std::string Coordinator::describe(const std::vector<NewRates::Rate>& rates) const {
  std::string text;
  const uint32_t most = std::ranges::max(rates, {}, &NewRates::Rate::rate).rate;
  for (const NewRates::Rate& rate : rates) {
    if (rate.rate == most || text.size() > 1000) continue;
    text += (text.empty() ? "" : ", ") + name_of_reducer(rate.reducer) + " carries " +
            std::to_string((100 * rate.rate + most / 2) / most) + " %";
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
