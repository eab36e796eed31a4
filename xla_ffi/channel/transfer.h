// One message of a channel, as one of its two workers has posted it: to send it, or to receive it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"

namespace jaxhetero {

// Any thread.
class Transfer {
 public:
  enum class Direction : uint8_t { kSend, kReceive };

  struct Message {
    uint32_t peer = 0;     // the rank of the other worker
    uint32_t channel = 0;  // the number of the channel, among those from the one worker to the other
    uint64_t tag = 0;      // the sort of the message, which both workers must give alike
    std::string text;      // the same for people: "activations of stage 2, microbatch 5"
    Leaves memory;         // others own it; it is read or written until the transfer is done
  };

  // Called once, with how the transfer ended: on the thread that ends it, which it must not block.
  using Done = std::function<void(const Status&)>;

  // With `done`, somebody waits for the transfer from the beginning.
  Transfer(Direction direction, Message message, Done done = {});

  [[nodiscard]] Direction direction() const { return direction_; }
  [[nodiscard]] const Message& message() const { return message_; }
  [[nodiscard]] size_t bytes() const { return message_.memory.bytes(); }
  // "activations of stage 2, microbatch 5" (channel 3)
  [[nodiscard]] std::string name() const;

  [[nodiscard]] bool is_done() const;
  // How it ended; nothing if it has not after `patience`.
  [[nodiscard]] std::optional<Status> wait(std::chrono::milliseconds patience);
  // Whether anybody has waited for it yet.
  [[nodiscard]] bool is_awaited() const;

  // These end the transfer, whose memory is not touched any more. Only the first call counts.
  void succeed() { end({}); }
  // Adds to the message which transfer this was.
  void fail(const Status& why);

 private:
  void end(const Status& how);

  const Direction direction_;
  const Message message_;
  mutable std::mutex mutex_;
  mutable std::condition_variable ended_;
  std::optional<Status> result_;  // guarded by mutex_
  bool is_awaited_;               // guarded by mutex_
  Done done_;                     // guarded by mutex_
};

}  // namespace jaxhetero
