// The part of the communicator that follows views, and rates that change.
#include <algorithm>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "xla_ffi/worker/communicator.h"

namespace jaxhetero {

namespace {

using std::chrono::milliseconds;

// What the strands have timed, together.
Goodput goodput_of(Goodput goodput, const std::vector<WorkerStrand::LinkTimes>& of_strands) {
  WorkerStrand::LinkTimes times;
  for (const WorkerStrand::LinkTimes& each : of_strands) {
    goodput.round_count = std::max(goodput.round_count, each.round_count);
    times.add(each);
  }
  for (Goodput::Link& link : goodput.links) {
    const Goodput::Link& timed = times.links[link.reducer];
    link.bytes = timed.bytes;
    link.us = timed.us;
  }
  goodput.in_step.bytes = times.bytes;
  goodput.in_step.us = times.us;
  uint64_t all_counts = 0;
  for (const auto& [reducer, count] : times.awaited_counts) all_counts += count;
  for (const auto& [reducer, count] : times.awaited_counts) {
    if (2 * count > all_counts) goodput.in_step.awaited = static_cast<int32_t>(reducer);
  }
  return goodput;
}

}  // namespace

// --- Views.

// The coordinator names the reducers of the next view: at the start, and again after every halt().
void Communicator::join(const View& view) {
  if (has_ended()) return;
  if (view.reducers.empty()) return fail({Code::kInvalidArgument, "this job has no reducer"});
  view_ = view;
  gate_.enter(view);
  if (view.is_candidate) return await_admission(view);
  is_candidate_ = false;
  if (!view.counts.empty() && std::ranges::find(view.joining, config_.rank) != view.joining.end()) {
    earlier_ = view.counts;
  }
  if (wants_to_leave_) member_->send(OutFrame::control(FrameType::kLeave, {}));
  joined_strand_count_ = 0;
  has_said_goodbye_ = false;
  has_accused_at_gate_ = false;
  {
    const std::lock_guard lock(strands_mutex_);
    members_ = view.ranks();
  }
  place_.set({view.job_id, config_.rank});
  counters_->live_reducer_count = view.reducers.size();
  counters_->live_worker_count = config_.job.is_elastic() ? view.members.size() : config_.job.worker_count;
  planner_.enter(view);
  channels_->enter(view);
  while (strands_.size() < view.strand_count) {
    if (const Status status = add_strand(); !status.ok()) return fail(status);
  }
  for (size_t index = 0; index < strands_.size(); ++index) {
    Result<std::vector<TcpAddress>> addresses = reducers_of(index, view);
    if (!addresses.ok()) return fail(addresses.status());
    loops_.run_on(index, [strand = strands_[index].get(), view, addresses = *addresses, plans = planner_.plans()] {
      strand->join(view, addresses, plans);
    });
  }
}

// The job has started before. This worker may compile its programs, and is let in where the others meet next.
void Communicator::await_admission(const View& view) {
  is_candidate_ = true;
  place_.set({view.job_id, config_.rank});
  channels_->enter(view);
  note_ready({});
  say_candidacy();
  if (wants_to_leave_) end_in_order();
}

void Communicator::say_candidacy() {
  const std::optional<Presence> candidacy = is_candidate_ ? gate_.candidacy() : std::nullopt;
  if (candidacy) member_->send(OutFrame::control(FrameType::kPresent, {}, header_of(*candidacy)));
}

Result<std::optional<Gate::Turn>> Communicator::wait_at_gate(milliseconds patience) {
  if (gate_.arrive()) loop_->post([this] { say_candidacy(); });
  return gate_.wait(patience);
}

void Communicator::say_met() {
  const std::optional<Meeting> meeting = gate_.meet();
  if (!meeting) return;
  loop_->post([this, meeting] { member_->send(OutFrame::control(FrameType::kMet, {}, header_of(*meeting))); });
}

void Communicator::say_present(uint32_t view) {
  const std::optional<Presence> presence = gate_.take_state(view);
  if (!presence) return;
  loop_->post([this, presence] { member_->send(OutFrame::control(FrameType::kPresent, {}, header_of(*presence))); });
}

void Communicator::ask_to_leave() {
  loop_->post([this] {
    wants_to_leave_ = true;
    if (is_candidate_) return gate_.end({});
    member_->send(OutFrame::control(FrameType::kLeave, {}));
  });
}

// Where a strand reaches each reducer of the view. The interfaces take turns.
Result<std::vector<TcpAddress>> Communicator::reducers_of(size_t strand, const View& view) {
  std::vector<TcpAddress> addresses;
  for (const View::Reducer& reducer : view.reducers) {
    const size_t rail = strand % (1 + reducer.more_addresses.size());
    Result<TcpAddress> address = resolve(rail == 0 ? reducer.address : reducer.more_addresses[rail - 1], reducer.port);
    if (!address.ok()) {
      const std::string name = "reducer " + std::to_string(reducer.number) + " (host " + reducer.host_name + ")";
      return Status(Code::kInvalidArgument, name + ": " + address.status().message());
    }
    addresses.push_back(*address);
  }
  return addresses;
}

void Communicator::note_joined(uint32_t view) {
  if (has_ended() || view != view_.number || ++joined_strand_count_ < strands_.size()) return;
  halted_ = false;
  const auto now = EventLoop::Clock::now();
  record_view(now);
  if (phase_ != Phase::kStarting) {
    const auto halted_for = std::chrono::duration_cast<milliseconds>(now - halted_at_);
    const std::string workers = config_.job.is_elastic() ? std::to_string(view_.members.size()) + " workers and " : "";
    log_.add(Severity::kWarning, "going on with " + workers + std::to_string(view_.reducers.size()) +
                                     " reducers after " + std::to_string(halted_for.count()) + " ms");
  }
  if (phase_ == Phase::kStarting && !planner_.has_started_probe()) probe_rates();
  note_idle();
}

void Communicator::record_view(EventLoop::Clock::time_point begun) {
  ViewRecord record{view_.number, std::exchange(halted_why_, ""), view_.ranks(), {}, begun, begun};
  if (!record.why.empty()) record.halted = halted_at_;
  if (!config_.job.is_elastic()) {
    record.workers.resize(config_.job.worker_count);
    std::iota(record.workers.begin(), record.workers.end(), 0u);
  }
  for (const View::Reducer& reducer : view_.reducers) record.reducers.push_back(reducer.number);
  timeline_.add(std::move(record));
}

void Communicator::halt(const Halt& halt) {
  if (has_ended()) return;
  log_.add(Severity::kWarning, halt.why);
  ++counters_->view_count;
  if (!halted_) halted_at_ = EventLoop::Clock::now();
  halted_ = true;
  halted_why_ += (halted_why_.empty() ? "" : "; ") + halt.why;
  view_.number = halt.view;
  gate_.halt();
  if (config_.job.is_elastic()) return report(halt.view);
  // The coordinator learns how many rounds of each op are complete, if none runs.
  loops_.ask<OpCounts>([this](size_t index) { return strands_[index]->halt(); },
                       [this, number = halt.view](const std::vector<OpCounts>& counts) {
                         report_progress(FrameType::kProgress, number, counts);
                       });
}

// First all strands stand still: what one of them holds of a round counts only with what the others hold.
void Communicator::report(uint32_t view) {
  const auto pause = [this](size_t index) {
    strands_[index]->pause();
    return std::monostate();
  };
  loops_.ask<std::monostate>(pause, [this, view](const std::vector<std::monostate>& /*all*/) {
    using Ops = std::vector<Report::Op>;
    loops_.ask<Ops>([this](size_t index) { return strands_[index]->report(); },
                    [this, view](const std::vector<Ops>& of_strands) {
                      if (has_ended() || view != view_.number) return;
                      Report report;
                      report.view = view;
                      report.gate = gate_.next();
                      report.has_state = gate_.has_state();
                      report.planned_view = planner_.view_number();
                      if (uses_states_) report.states = planner_.encoded_states();
                      for (const Ops& ops : of_strands) report.ops.insert(report.ops.end(), ops.begin(), ops.end());
                      for (const View::Count& earlier : earlier_) {  // of those that have not been begun here
                        const auto begun = std::ranges::find(report.ops, earlier.op, &Report::Op::op);
                        if (begun == report.ops.end())
                          report.ops.push_back({earlier.op, earlier.rounds, false, false, earlier.group});
                      }
                      member_->send(OutFrame::control(FrameType::kReport, encode(report)));
                    });
  });
}

// The job goes on without this worker. One that is leaving has nothing more to do in it.
void Communicator::note_lost(const Lost& lost) {
  if (phase_ == Phase::kLeaving && is_idle()) return end_in_order();
  fail({Code::kWorkerLost, lost.why});
}

// The coordinator learns which ops the program has left behind, and answers with on_forget once every worker has
// completed the same rounds of them.
void Communicator::watch() {
  if (has_ended()) return;
  if (config_.job.is_elastic()) {
    on_strands([](WorkerStrand& strand) { strand.forget_still(); });
    if (const Status stall = watch_gate(); !stall.ok()) return fail(stall);
  } else if (config_.job.failover && phase_ == Phase::kRunning && !halted_) {
    loops_.ask<OpCounts>(
        [this](size_t index) { return strands_[index]->take_still(); },
        [this](const std::vector<OpCounts>& counts) { report_progress(FrameType::kStill, view_.number, counts); });
  }
  if (planner_.plans().follows != Follows::kNothing && phase_ == Phase::kRunning && !halted_) report_goodput();
  if (const Status stall = channels_->check(EventLoop::Clock::now()); !stall.ok()) return fail(stall);
  loop_->after(kStrandWatchInterval, [this] { watch(); });
}

// As rounds have deadlines, so have gates: the coordinator lets the job go on without those for whom most of the others
// wait. While a state is handed over, its messages have deadlines of their own.
Status Communicator::watch_gate() {
  if (lacks_coordinator_ || !channels_->is_idle()) gate_.restart_delay();
  const std::optional<Gate::Delay> delay = gate_.delay(EventLoop::Clock::now());
  if (!delay.has_value()) return {};
  const std::string waited = std::to_string(duration_cast<milliseconds>(delay->waited).count()) + " ms";
  if (delay->is_own) {
    // Before the others give up to send to it.
    if (delay->waited < Heartbeat::patience(config_.timeout)) return {};
    return {Code::kRoundTimeout, own_name() +
                                     " has been let into the job, and its program has not taken the state of " +
                                     "the others for " + waited + "; is it stuck?"};
  }
  const milliseconds patience = delay->is_first ? std::max(config_.timeout, config_.start_timeout) : config_.timeout;
  if (delay->waited < patience) return {};
  const std::string why = own_name() + ": has waited for " + waited + " at the gate where all are to meet";
  if (!std::exchange(has_accused_at_gate_, true)) {
    member_->send(OutFrame::control(FrameType::kAccuse, encode(Accusation{view_.number, {}, why})));
  }
  if (delay->waited < 2 * patience) return {};
  return {Code::kRoundTimeout, why + ", and most of the others have not come there either"};
}

// --- Rates that change.

// Rounds that run go on, and those that wait begin once the coordinator has named the new rates, or another view.
void Communicator::hold(const Hold& hold) {
  if (has_ended() || hold.view != view_.number) return;
  loops_.ask<OpCounts>([this](size_t index) { return strands_[index]->hold(); },
                       [this, number = hold.view](const std::vector<OpCounts>& counts) {
                         report_progress(FrameType::kBegun, number, counts);
                       });
}

void Communicator::follow(const NewRates& rates) {
  if (has_ended() || rates.view != view_.number) return;
  planner_.follow(rates);
  ++counters_->rate_change_count;
  on_strands([plans = planner_.plans(), begins = rates.begins](WorkerStrand& strand) { strand.follow(plans, begins); });
}

void Communicator::tell_goodput(Goodput goodput) {
  loop_->post([this, goodput = std::move(goodput)]() mutable {
    if (has_ended() || halted_) return;
    goodput.view = view_.number;
    member_->send(OutFrame::control(FrameType::kGoodput, encode(goodput)));
  });
}

void Communicator::report_goodput() {
  using LinkTimes = WorkerStrand::LinkTimes;
  loops_.ask<LinkTimes>([this](size_t index) { return strands_[index]->take_link_times(); },
                        [this, planned = planner_.planned()](const std::vector<LinkTimes>& of_strands) {
                          if (has_ended() || planned.view != view_.number) return;
                          const Goodput goodput = goodput_of(planned, of_strands);
                          if (goodput.round_count == 0) return;
                          member_->send(OutFrame::control(FrameType::kGoodput, encode(goodput)));
                        });
}

void Communicator::answer_state() {
  loops_.ask<ProcessState>([this](size_t index) { return strands_[index]->state(); },
                           [this](const std::vector<ProcessState>& states) {
                             ProcessState state = process_state(view_.number, metrics());
                             const auto slowest = std::ranges::max_element(states, {}, &ProcessState::waited_ms);
                             state.round = slowest->round;
                             state.waited_ms = slowest->waited_ms;
                             member_->send(OutFrame::control(FrameType::kState, encode(state)));
                           });
}

}  // namespace jaxhetero
