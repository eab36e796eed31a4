// The part of the coordinator that answers visitors.
#include <algorithm>
#include <chrono>
#include <utility>

#include "xla_ffi/membership/coordinator.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

constexpr milliseconds kAnswerPatience{1000};

}  // namespace

// Visitors that come while the members are being asked get the same answer.
Status Coordinator::on_ask(Guest& visitor) {
  visitor.is_visitor = true;
  if (std::exchange(has_visitors_, true)) return {};
  for (auto& [connection, guest] : guests_) {
    guest.answer.reset();
    if (guest.is_member()) connection->send(OutFrame::control(FrameType::kAsk, {}));
  }
  visit_ends_ = context_.loop.after(kAnswerPatience, [this] { tell_state(); });
  return {};
}

Status Coordinator::on_state(Guest& guest) {
  Result<ProcessState> state = decode_process_state(guest.control);
  if (!state.ok()) return state.status();
  guest.answer = std::move(*state);
  const auto is_awaited = [](const auto& entry) {
    return entry.second.is_member() && !entry.second.answer.has_value();
  };
  if (has_visitors_ && std::ranges::none_of(guests_, is_awaited)) tell_state();
  return {};
}

void Coordinator::tell_state() {
  has_visitors_ = false;
  context_.loop.cancel(visit_ends_);
  JobState job = state();
  Bytes answer = encode(job);
  if (answer.size() > kMaxControlBytes) {  // thousands of processes with long names
    for (JobState::Process& process : job.processes) process.state = {};
    answer = encode(job);
  }
  for (auto& [connection, guest] : guests_) {
    if (!guest.is_visitor) continue;
    connection->send(OutFrame::control(FrameType::kState, answer));
    connection->close_after_flush();
  }
}

void Coordinator::tell_members(JobState& job) const {
  job.most_workers = job_.worker_count;
  if (!job.has_started) return;
  const auto has_none = [this](const View::Member& member) { return member.rank >= job_.colocated_count; };
  const auto without = static_cast<uint32_t>(std::ranges::count_if(view_.members, has_none));
  job.reducer_count = job_.reducer_count + job.worker_count - without;
  if (job.worker_count >= job_.least_worker_count) return;
  job.missing = std::to_string(job_.least_worker_count - job.worker_count) + " more workers at the gates";
}

JobState Coordinator::state() const {
  JobState job;
  job.job_id = view_.job_id;
  job.view = view_.number;
  job.has_started = phase_ > Phase::kReducersToldMembers;
  job.worker_count = view_.members.empty() ? workers_at_start(job_) : static_cast<uint32_t>(view_.members.size());
  job.reducer_count = total_reducer_count(job_);
  if (!job.has_started) job.missing = missing();
  if (job_.is_elastic()) tell_members(job);
  for (const auto& [connection, guest] : guests_) {
    if (!guest.is_registered()) continue;
    const Registration& who = guest.registration;
    const auto silent_ms = duration_cast<milliseconds>(guest.heartbeat.silence()).count();
    job.processes.push_back({
        who.role,
        who.rank,
        who.number,
        who.host_name,
        connection->peer(),
        guest.is_member(),
        guest.phase == Guest::Phase::kCandidate,
        guest.answer.has_value(),
        static_cast<uint32_t>(silent_ms),
        guest.answer.value_or(ProcessState()),
        rate_percent(who),
    });
  }
  return job;
}

}  // namespace jaxhetero
