// The messages that go to one peer, over all channels. A message goes once the program has posted it and the peer has
// given the credit for it: then the peer has its memory at hand, so that no message waits on the connection for
// another.
//
// Pure: frames in, frames out. The loop's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "xla_ffi/base/status.h"
#include "xla_ffi/channel/message_queue.h"
#include "xla_ffi/channel/transfer.h"
#include "xla_ffi/transport/connection.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {

// Credits that one worker may have given another for messages that have not come.
inline constexpr size_t kMostCredits = 65536;

class Sender {
 public:
  using Clock = MessageQueue::Clock;

  // Names for error messages: "rank 1 (host b)".
  Sender(std::string own_name, std::string peer_name)
      : own_name_(std::move(own_name)), peer_name_(std::move(peer_name)) {}

  // The program posts a message. kMismatch if the peer's credit is for another one.
  Status add(std::shared_ptr<Transfer> transfer, Clock::time_point now);
  // The peer gives a credit, in a frame with this header; `text` is what it says of the message. kMismatch if that is
  // not the message which the program has posted; kProtocol if the peer may not give it.
  Status take_credit(const FrameHeader& header, std::string text, Clock::time_point now);

  // The frame to send now, with this number on its connection; none if no message may go, or enough frames wait to be
  // written. Channels take turns.
  std::optional<OutFrame> next_frame(uint64_t frame_number);
  [[nodiscard]] bool has_more() const { return !ready_.empty(); }
  // So many frames are written. Ends the messages of which that was all. Fails like add().
  Status note_written(uint64_t frame_count, Clock::time_point now);

  [[nodiscard]] bool is_empty() const { return open_count_ == 0; }
  // What makes no progress, and since when; nothing if all does.
  [[nodiscard]] std::optional<std::string> find_late(Clock::time_point now, const ChannelPatience& patience);
  void give_up(const Status& why);

 private:
  struct Credit {
    uint64_t bytes;
    uint64_t tag;
    std::string text;
  };
  struct Channel {
    MessageQueue queue;
    std::deque<Credit> credits;  // the credits for the front message and those behind it
    size_t sent_bytes = 0;       // the part of the front message that is in frames, which may not be written yet
  };
  struct UnwrittenFrame {
    uint64_t frame_number;
    uint32_t channel;
    size_t bytes;
    bool is_last;  // the last frame of its message
  };

  Status start_front(uint32_t number, Channel& channel);

  const std::string own_name_;
  const std::string peer_name_;
  std::unordered_map<uint32_t, Channel> channels_;
  std::deque<uint32_t> ready_;            // channels whose front message has a credit, and bytes that were not sent
  std::deque<UnwrittenFrame> unwritten_;  // frames that are not written
  size_t credit_count_ = 0;
  size_t open_count_ = 0;  // messages
};

}  // namespace jaxhetero
