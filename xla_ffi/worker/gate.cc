#include "xla_ffi/worker/gate.h"

#include <algorithm>
#include <utility>

namespace jaxhetero {

bool Gate::arrive() {
  const std::lock_guard lock(mutex_);
  return !std::exchange(is_waiting_, true);
}

Result<std::optional<Gate::Turn>> Gate::wait(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  std::optional<Turn> found;
  changed_.wait_for(lock, patience, [&] {
    if (!why_.ok()) return true;
    found = turn();
    return found.has_value();
  });
  if (!why_.ok()) return why_;
  note_wait(!found.has_value() && is_member_ && !is_halted_ && view_.joining.empty() && !view_.is_short);
  if (found.has_value() && found->what == Turn::What::kPass) is_waiting_ = false;
  return found;
}

void Gate::note_wait(bool waits_for_others) {
  if (std::exchange(waits_for_others_, waits_for_others) != waits_for_others) waits_since_ = Clock::now();
}

std::optional<Gate::Delay> Gate::delay(Clock::time_point now) const {
  const std::lock_guard lock(mutex_);
  if (!is_member_ || is_halted_ || has_ended_ || (has_state_ && !waits_for_others_)) return {};
  return Delay{!has_state_, next_ == 0, now - waits_since_};
}

void Gate::restart_delay() {
  const std::lock_guard lock(mutex_);
  waits_since_ = Clock::now();
}

std::optional<Gate::Turn> Gate::turn() {
  Turn turn{Turn::What::kPass, next_, view_.number, view_.ranks(), view_.joining};
  if (has_ended_) {
    turn.what = Turn::What::kLeave;
    return turn;
  }
  if (!is_member_ || is_halted_) return {};
  if (!has_state_) {
    turn.what = Turn::What::kTake;
    return turn;
  }
  if (!view_.joining.empty() && !is_joining() && !has_given_) {
    turn.what = Turn::What::kGive;
    return turn;
  }
  if (meeting_.has_value() && meeting_->is_set && meeting_->gate == next_) {
    turn.what = Turn::What::kMeet;
    return turn;
  }
  if (next_ >= end_) return {};
  for (const View::Deal& deal : view_.deals) {
    if (deal.gate <= next_) turn.ranks = deal.ranks;
  }
  ++next_;
  return turn;
}

std::optional<Meeting> Gate::meet() {
  const std::lock_guard lock(mutex_);
  if (!meeting_.has_value() || !meeting_->is_set || meeting_->gate != next_) return {};
  return std::exchange(meeting_, std::nullopt);
}

void Gate::note_given(uint32_t view) {
  const std::lock_guard lock(mutex_);
  if (view == view_.number) has_given_ = true;
}

std::optional<Presence> Gate::take_state(uint32_t view) {
  const std::lock_guard lock(mutex_);
  if (view != view_.number || is_halted_) return {};
  has_state_ = true;
  return Presence{view};
}

void Gate::enter(const View& view) {
  const std::lock_guard lock(mutex_);
  view_ = view;
  const bool was_member = std::exchange(is_member_, !view.is_candidate);
  is_halted_ = false;
  has_given_ = false;
  waits_for_others_ = false;
  waits_since_ = Clock::now();
  meeting_.reset();
  end_ = kNoGate;
  if (!is_member_) return;
  if (is_joining() && !was_member) {
    has_state_ = false;
    next_ = view.gate;
  }
  if (!view.joining.empty() || view.is_short) end_ = next_;
  changed_.notify_all();
}

void Gate::halt() {
  const std::lock_guard lock(mutex_);
  is_halted_ = true;
  waits_for_others_ = false;
  end_ = next_;
  meeting_.reset();
}

std::optional<Meeting> Gate::meet(const Meeting& meeting) {
  const std::lock_guard lock(mutex_);
  if (is_halted_ || !is_member_) return {};
  if (!meeting.is_set) {
    meeting_ = meeting;
    end_ = next_;
    return Meeting{meeting.number, next_};
  }
  if (!meeting_.has_value() || meeting_->number != meeting.number) return {};
  meeting_ = meeting;
  end_ = meeting.gate;
  changed_.notify_all();
  return {};
}

void Gate::go(const Presence& presence) {
  const std::lock_guard lock(mutex_);
  if (is_halted_ || presence.view != view_.number) return;
  view_.joining.clear();
  meeting_.reset();
  end_ = view_.is_short ? next_ : kNoGate;
  changed_.notify_all();
}

void Gate::end(const Status& why) {
  const std::lock_guard lock(mutex_);
  has_ended_ = true;
  why_ = why;
  changed_.notify_all();
}

std::optional<Presence> Gate::candidacy() const {
  const std::lock_guard lock(mutex_);
  if (is_member_ || !is_waiting_) return {};
  return Presence{view_.number};
}

uint64_t Gate::next() const {
  const std::lock_guard lock(mutex_);
  return next_;
}

bool Gate::has_state() const {
  const std::lock_guard lock(mutex_);
  return has_state_;
}

bool Gate::is_joining() const { return std::ranges::find(view_.joining, rank_) != view_.joining.end(); }

}  // namespace jaxhetero
