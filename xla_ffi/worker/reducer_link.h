// A worker's connection to one reducer of the view: pushes the chunks of all rounds that run there, as its push rule
// says, and checks the totals that come back.
//
// A strand owns the links, one for each reducer, and a new set for each view. Chunks are sent from the round's
// own memory, which stays valid until its total is here. The strand's thread only; nothing blocks.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/chunk_coder.h"
#include "xla_ffi/worker/push_rule.h"
#include "xla_ffi/worker/round.h"

namespace jaxhetero {

class ReducerLink final : private ChunkSender {
 public:
  // `job` outlives the link.
  ReducerLink(const View::Reducer& reducer, const TcpAddress& address, const JobShape& job);

  void connect(TcpContext& context, ConnectionOwner& owner, std::chrono::milliseconds patience);
  void close();
  // Sends `why` as the last frame, if it is an error. No more bytes move between the network and any bucket.
  void close_with(const Status& why);
  void send(OutFrame frame) { connection_->send(std::move(frame)); }
  void offer_carrier() { connection_->offer_carrier(); }

  // See PushRule.
  void start_segment(Round& round, Segment& segment) { rule_.start_segment(round, segment, *this); }
  void push_chunks() { rule_.push_chunks(*this); }
  void end_round(const Round& round) { rule_.end_round(round); }
  void feed_starved(EventLoop::Clock::time_point now) { rule_.feed_starved(now, *this); }
  void finish_result(const Round& round, Segment& segment, const FrameHeader& header,
                     EventLoop::Clock::time_point now) {
    total_bytes_ += header.count * item_bytes(round.request.spec.dtype);
    rule_.finish_result(round, segment, header, now, *this);
  }
  // Chunks of the program's rounds that leave this host are coded from now on, or are not.
  void set_coding(bool codes) { codes_ = codes; }
  // Fills the chunk's place in the round with the elements of the code that control() has.
  Status decode_result(const Round& round, const FrameHeader& header);
  // Ok if the header is that of the segment's next total.
  [[nodiscard]] Status check_result(const Round& round, const Segment& segment, const FrameHeader& header) const;
  // Memory for the payload of a frame that goes to no bucket; control() returns it. The next call overwrites it.
  std::vector<iovec> take_control(size_t bytes);

  [[nodiscard]] bool has(const Connection& connection) const { return connection_.get() == &connection; }
  [[nodiscard]] bool is_open() const { return is_open_; }
  void set_open() { is_open_ = true; }
  [[nodiscard]] uint32_t number() const { return number_; }
  [[nodiscard]] const std::string& name() const { return name_; }  // "reducer 1 (host b, 10.0.0.2:4000)"
  [[nodiscard]] bool has_sent_all() const { return !connection_ || connection_->has_flushed(); }
  [[nodiscard]] bool shares_memory() const { return connection_->shares_memory(); }
  [[nodiscard]] const Bytes& control() const { return control_; }
  [[nodiscard]] uint64_t total_bytes() const { return total_bytes_; }  // of totals that have come

 private:
  Sent send_chunk(const Round& round, const FrameHeader& header) override;
  [[nodiscard]] OutFrame coded(const Round& round, FrameHeader header, const Leaves& inputs, size_t offset);

  const uint32_t number_;
  const std::string name_;
  const TcpAddress address_;
  std::shared_ptr<TcpConnection> connection_;
  bool is_open_ = false;
  PushRule rule_;
  bool codes_ = false;
  ChunkCoder coder_;
  std::shared_ptr<Counters> counters_;
  Bytes control_;
  uint64_t total_bytes_ = 0;
};

}  // namespace jaxhetero
