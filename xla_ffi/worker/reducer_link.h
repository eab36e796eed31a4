// A worker's connection to one reducer of the view: pushes the chunks of all rounds that run there, in their turn and
// under one self-clocked window, and checks the totals that come back.
//
// A strand owns the links, one for each reducer, and a new set for each view. Chunks are sent from the round's
// own memory, which stays valid until its total is here. The strand's thread only; nothing blocks.
#pragma once

#include <chrono>
#include <map>
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
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/window.h"

namespace jaxhetero {

class ReducerLink {
 public:
  // `job` outlives the link.
  ReducerLink(const View::Reducer& reducer, const TcpAddress& address, const JobShape& job);

  void connect(TcpContext& context, ConnectionOwner& owner, std::chrono::milliseconds patience);
  void close();
  // Sends `why` as the last frame. No more bytes move between the network and any bucket.
  void close_with(const Status& why);
  void send(OutFrame frame) { connection_->send(std::move(frame)); }
  void offer_memory() { connection_->offer_memory(); }

  // Pushes a segment from now on. Round and segment stay at their addresses until the segment is done or the link ends.
  void start_segment(Round& round, Segment& segment);
  // Pushes the chunks that the window has room for and whose inputs are ready.
  void push_chunks();
  // If the link stalls, pushes one chunk of a starved round, one that has none under way; at each further stall, of
  // twice as many rounds. Called every few tens of milliseconds.
  void feed_starved(EventLoop::Clock::time_point now);
  // Ok if the header is that of the segment's next total.
  [[nodiscard]] Status check_result(const Round& round, const Segment& segment, const FrameHeader& header) const;
  // The segment's next total is here; pushes the chunks that it makes room for.
  void finish_result(const Round& round, Segment& segment, const FrameHeader& header, EventLoop::Clock::time_point now);
  // Memory for the payload of a frame that goes to no bucket; control() returns it. The next call overwrites it.
  std::vector<iovec> take_control(size_t bytes);

  [[nodiscard]] bool has(const Connection& connection) const { return connection_.get() == &connection; }
  [[nodiscard]] bool is_open() const { return is_open_; }
  void set_open() { is_open_ = true; }
  [[nodiscard]] uint32_t number() const { return number_; }
  [[nodiscard]] const std::string& name() const { return name_; }  // "reducer 1 (host b, 10.0.0.2:4000)"
  [[nodiscard]] const Bytes& control() const { return control_; }

 private:
  [[nodiscard]] size_t window_bytes(const Round& round, const Segment& segment) const;
  size_t push_chunk(const Round& round, Segment& segment);

  const JobShape& job_;
  const uint32_t number_;
  const std::string name_;
  const TcpAddress address_;
  std::shared_ptr<TcpConnection> connection_;
  bool is_open_ = false;
  std::map<Round::Turn, std::pair<const Round*, Segment*>> unfinished_;
  Window window_;
  EventLoop::Clock::time_point last_result_at_;  // or the start of the first segment after the link was idle
  size_t feed_count_ = 1;                        // rounds to feed at the next stall
  Bytes control_;
};

}  // namespace jaxhetero
