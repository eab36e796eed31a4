// The messages that come from one peer, over all channels. A message that the program has posted memory for is a credit
// to the peer. Its bytes go straight into that memory, and nothing else that the peer sends goes anywhere.
//
// Pure: frames in, frames out. The loop's thread only.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/channel/message_queue.h"
#include "xla_ffi/channel/transfer.h"
#include "xla_ffi/transport/connection.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {

class Receiver {
 public:
  using Clock = MessageQueue::Clock;

  // The name is for error messages: "rank 1 (host b)".
  explicit Receiver(std::string peer_name) : peer_name_(std::move(peer_name)) {}

  // The program posts the memory for a message. Returns the frame that gives the peer the credit; it is for the
  // connection to the peer, if there is one already. None if too much is posted: then the transfer has failed.
  std::optional<OutFrame> add(std::shared_ptr<Transfer> transfer, Clock::time_point now);
  // The same frames again, for a connection that has just been made.
  [[nodiscard]] std::vector<OutFrame> credits() const;

  // A kMessage with this header comes: appends the memory for its payload. kProtocol if it is not the next part of a
  // message that is posted.
  Status start(const FrameHeader& header, std::vector<iovec>& into) const;
  // Its payload is there.
  void finish(const FrameHeader& header, Clock::time_point now);

  [[nodiscard]] bool is_empty() const { return open_count_ == 0; }
  // What makes no progress, and since when; nothing if all does.
  [[nodiscard]] std::optional<std::string> find_late(Clock::time_point now, const ChannelPatience& patience);
  void give_up(const Status& why);

 private:
  const std::string peer_name_;
  std::unordered_map<uint32_t, MessageQueue> channels_;
  size_t open_count_ = 0;  // messages
};

}  // namespace jaxhetero
