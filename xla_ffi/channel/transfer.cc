#include "xla_ffi/channel/transfer.h"

#include <utility>

namespace jaxhetero {

Transfer::Transfer(Direction direction, Message message, Done done)
    : direction_(direction), message_(std::move(message)), is_awaited_(done != nullptr), done_(std::move(done)) {}

std::string Transfer::name() const {
  return "\"" + message_.text + "\" (channel " + std::to_string(message_.channel) + ")";
}

bool Transfer::is_done() const {
  const std::lock_guard lock(mutex_);
  return result_.has_value();
}

bool Transfer::is_awaited() const {
  const std::lock_guard lock(mutex_);
  return is_awaited_;
}

std::optional<Status> Transfer::wait(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  is_awaited_ = true;
  ended_.wait_for(lock, patience, [this] { return result_.has_value(); });
  return result_;
}

void Transfer::fail(const Status& why) {
  const char* const way = direction_ == Direction::kSend ? " to rank " : " from rank ";
  end({why.code(), why.message() + "; this ended the transfer of " + name() + way + std::to_string(message_.peer)});
}

void Transfer::end(const Status& how) {
  Done done;
  {
    const std::lock_guard lock(mutex_);
    if (result_.has_value()) return;
    result_ = how;
    done = std::exchange(done_, nullptr);
  }
  ended_.notify_all();
  if (done) done(how);
}

}  // namespace jaxhetero
