#include "xla_ffi/worker/op.h"

#include <utility>

#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {

void Op::add(RoundRequest request) {
  if (!spec_) spec_ = request.spec;
  waiting_.push_back(std::move(request));
}

// The program may call with other shapes than before: then the reducers are told anew.
void Op::set_spec(const OpSpec& spec) {
  if (spec_ == spec) return;
  spec_ = spec;
  described_.clear();
}

Round& Op::start_next_round() {
  running_ = std::make_unique<Round>();
  running_->request = std::move(waiting_.front());
  waiting_.pop_front();
  running_->number = started_count_++;
  set_spec(running_->request.spec);
  if (running_->request.narrows) {
    const OpSpec& spec = running_->request.spec;
    narrowed_->start_copy(running_->number, spec.total_count * item_bytes(spec.dtype));
    running_->keeps_in = narrowed_.get();
  }
  return *running_;
}

Round& Op::replay_round(uint64_t number) {
  running_ = std::make_unique<Round>();
  running_->number = number;
  running_->is_replay = true;
  running_->request = replay_;
  set_spec(replay_.spec);
  running_->request.inputs = kept_->leaves();
  return *running_;
}

void Op::keep_running_round() {
  Round& round = *running_;
  if (kept_->holds(round.number)) return;  // after a halt the round runs from the kept contribution
  const RoundRequest& request = round.request;
  replay_.op = request.op;
  replay_.priority = request.priority;
  replay_.sequence = request.sequence;
  replay_.description = request.description;
  replay_.spec = request.spec;
  replay_.stake = request.stake;
  replay_.step = request.step;
  replay_.is_internal = request.is_internal;
  if (request.narrows) return kept_.swap(narrowed_);
  if (request.inputs_owner) return kept_->hold(round.number, request.inputs, request.inputs_owner);
  kept_->start_copy(round.number, request.stake.operands.count * item_bytes(request.spec.dtype));
  round.keeps_in = kept_.get();
  for (const Segment& segment : round.segments) round.keep(segment, segment.shard.offset, segment.next_push);
}

std::unique_ptr<Round> Op::finish_round() {
  ended_at_ = EventLoop::Clock::now();
  return std::move(running_);
}

bool Op::becomes_still(EventLoop::Clock::time_point since) {
  if (running_ || !waiting_.empty() || ended_at_ > since || still_count_ == started_count_) return false;
  still_count_ = started_count_;
  return true;
}

void Op::forget(uint64_t completed_count) {
  if (running_ || !kept_->holds(completed_count - 1)) return;
  kept_->clear();
  narrowed_->clear();
}

std::unique_ptr<Round> Op::stop_round() {
  std::unique_ptr<Round> round = std::move(running_);
  if (round->is_replay) return round;
  if (round->keeps_in == kept_.get()) {  // totals may have overwritten the operands: only the copy is whole
    for (const Segment& segment : round->segments) round->keep(segment, segment.next_push, segment.end());
    round->request.inputs = kept_->leaves();
    round->request.narrows = false;
  }
  waiting_.push_front(std::move(round->request));
  --started_count_;
  return nullptr;
}

std::vector<RoundRequest> Op::give_up() {
  std::vector<RoundRequest> requests;
  if (running_) requests.push_back(std::move(running_->request));
  running_.reset();
  for (RoundRequest& request : waiting_) requests.push_back(std::move(request));
  waiting_.clear();
  return requests;
}

bool Op::is_new_to(uint32_t reducer) {
  if (reducer >= described_.size()) described_.resize(reducer + 1);
  const bool is_new = !described_[reducer];
  described_[reducer] = true;
  return is_new;
}

}  // namespace jaxhetero
