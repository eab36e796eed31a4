#include "xla_ffi/worker/schedule.h"

namespace jaxhetero {

void Schedule::begin_behind(const std::vector<View::Count>& counts) {
  for (const View::Count& count : counts) earlier_[count.op] = count;
}

Op& Schedule::add(RoundRequest request) {
  const auto earlier = earlier_.find(request.op);
  const uint64_t count = earlier == earlier_.end() ? 0 : earlier->second.rounds;
  Op& op = ops_.try_emplace(request.op, lent_memory_, count).first->second;
  op.add(std::move(request));
  ++waiting_count_;
  return op;
}

Round& Schedule::start_next_round(Op& op) {
  --waiting_count_;
  return note_started(op.start_next_round());
}

Round& Schedule::replay_round(Op& op, uint64_t number) { return note_started(op.replay_round(number)); }

Round& Schedule::note_started(Round& round) {
  round.times.started_at = round.times.progress_at = Clock::now();
  ++running_count_;
  return round;
}

std::unique_ptr<Round> Schedule::finish_round(Op& op) {
  --running_count_;
  return op.finish_round();
}

std::vector<std::unique_ptr<Round>> Schedule::stop_rounds() {
  std::vector<std::unique_ptr<Round>> replays;
  running_count_ = 0;
  for (auto& [op_id, op] : ops_) {
    if (op.running() == nullptr) continue;
    if (std::unique_ptr<Round> replay = op.stop_round()) {
      replays.push_back(std::move(replay));
    } else {
      ++waiting_count_;
    }
  }
  return replays;
}

std::vector<RoundRequest> Schedule::give_up() {
  std::vector<RoundRequest> requests;
  for (auto& [op_id, op] : ops_) {
    for (RoundRequest& request : op.give_up()) requests.push_back(std::move(request));
  }
  return requests;
}

Op* Schedule::find(uint64_t op_id) {
  const auto found = ops_.find(op_id);
  return found == ops_.end() ? nullptr : &found->second;
}

Round* Schedule::running_round(uint64_t op_id, uint64_t number) {
  const Op* op = find(op_id);
  Round* round = op == nullptr ? nullptr : op->running();
  return round != nullptr && round->number == number ? round : nullptr;
}

std::vector<Progress::OpProgress> Schedule::progress() const {
  std::vector<Progress::OpProgress> progress;
  for (const auto& [op_id, op] : ops_) progress.push_back({op_id, op.started_count(), op.group_size()});
  return progress;
}

std::vector<Progress::OpProgress> Schedule::take_still(Clock::time_point since) {
  std::vector<Progress::OpProgress> still;
  for (auto& [op_id, op] : ops_) {
    if (op.becomes_still(since)) still.push_back({op_id, op.started_count(), op.group_size()});
  }
  return still;
}

void Schedule::forget(const Progress& completed) {
  for (const Progress::OpProgress& progress : completed.ops) {
    if (Op* op = find(progress.op); op != nullptr) op->forget(progress.completed_count);
  }
}

size_t Schedule::kept_bytes() const {
  size_t bytes = 0;
  for (const auto& [op_id, op] : ops_) bytes += op.kept_bytes();
  return bytes;
}

const Round* Schedule::most_patient_round() const {
  const Round* found = nullptr;
  for (const auto& [op_id, op] : ops_) {
    const Round* round = op.running();
    if (round == nullptr) continue;
    if (found == nullptr || round->times.progress_at < found->times.progress_at) found = round;
  }
  return found;
}

}  // namespace jaxhetero
