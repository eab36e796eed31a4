// The messages of one channel that one of its workers has posted and that are not complete. They go in the order in
// which they were posted: the front one is under way, or waits for the other worker.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/channel/transfer.h"

namespace jaxhetero {

// How long the front message of a channel may make no progress. A worker may post messages long before it needs them,
// so the time counts only from when somebody waits, or when the message has begun to move.
struct ChannelPatience {
  // The patience with a channel's first message: workers compile at different speeds.
  std::chrono::milliseconds first{0};
  std::chrono::milliseconds later{0};
  bool is_for_all = false;  // messages that nobody waits for have the patience, too, because this worker leaves
};

// On the loop's thread.
class MessageQueue {
 public:
  using Clock = EventLoop::Clock;
  using Posted = std::deque<std::shared_ptr<Transfer>>;

  void add(std::shared_ptr<Transfer> transfer, Clock::time_point now) {
    if (posted_.empty()) progress_at_ = now;
    posted_.push_back(std::move(transfer));
  }

  [[nodiscard]] const Posted& posted() const { return posted_; }
  [[nodiscard]] bool is_empty() const { return posted_.empty(); }
  [[nodiscard]] const std::shared_ptr<Transfer>& front() const { return posted_.front(); }
  // The number of the front message, counted in the channel; and what of it has moved.
  [[nodiscard]] uint64_t number() const { return number_; }
  [[nodiscard]] size_t moved_bytes() const { return moved_bytes_; }
  [[nodiscard]] size_t left_bytes() const { return front()->bytes() - moved_bytes_; }

  void note_progress(size_t bytes, Clock::time_point now) {
    moved_bytes_ += bytes;
    progress_at_ = now;
  }

  // The front message is complete.
  void finish_front() {
    const std::shared_ptr<Transfer> complete = std::move(posted_.front());
    posted_.pop_front();
    ++number_;
    moved_bytes_ = 0;
    complete->succeed();
  }

  // How long the front message has made no progress, if that is longer than it may; else 0. Called a few times a
  // second.
  [[nodiscard]] std::chrono::milliseconds lateness(Clock::time_point now, const ChannelPatience& patience) {
    const bool counts = patience.is_for_all || moved_bytes_ > 0 || posted_.empty() || front()->is_awaited();
    if (!counts) progress_at_ = now;
    const auto most = number_ == 0 ? patience.first : patience.later;
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - progress_at_);
    return posted_.empty() || waited < most ? std::chrono::milliseconds(0) : waited;
  }

  void give_up(const Status& why) {
    for (const auto& transfer : std::exchange(posted_, {})) transfer->fail(why);
  }

 private:
  Posted posted_;
  uint64_t number_ = 0;
  size_t moved_bytes_ = 0;
  Clock::time_point progress_at_;  // the time of its latest bytes, or when it became the front message
};

}  // namespace jaxhetero
