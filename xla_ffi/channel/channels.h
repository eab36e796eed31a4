// Channels: messages from worker to worker, such as the activations that a stage of a pipeline sends to the next one.
//
// A channel leads from one worker to another and has a number. Its messages are matched by order: the first that the
// one posts to send is the first that the other posts to receive. All channels from one worker to another share a
// connection, which the sending worker makes when it first posts a message to that peer. A job whose program posts none
// has no such connections.
//
//   kJoin     the sending worker says who it is
//   kCredit   the receiving worker has memory for a message
//   kMessage  a part of that message
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "xla_ffi/base/counters.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/inbox.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/channel/receiver.h"
#include "xla_ffi/channel/sender.h"
#include "xla_ffi/channel/transfer.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/transport/tcp_listener.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

// Channels of this number and above are those of exchanges in compiled programs; see ffi/exchange_handler.cc.
inline constexpr uint32_t kFirstExchangeChannel = uint32_t{1} << 31;

// A worker's ends of its channels. On the thread of the loop, unless said otherwise; nothing blocks. The communicator
// owns it, and tells it of the view, of failures and of the end.
class Channels final : private ConnectionOwner {
 public:
  using Clock = EventLoop::Clock;

  struct Config {
    uint32_t rank = 0;
    uint32_t worker_count = 0;
    std::string own_name;  // "rank 3 (host b)"
    std::string host;  // the address to listen on; empty: every one, and peers use the one that the coordinator sees
    std::chrono::milliseconds start_timeout{0};
    std::chrono::milliseconds timeout{0};
  };
  struct Callbacks {
    std::function<void(const Status&)> on_failure;  // the job has failed, as found here or told by a peer
    std::function<void()> on_idle;                  // no transfer is open any more
  };

  // `log` outlives the channels.
  Channels(Config config, std::unique_ptr<TcpContext> context, EventLog& log, Callbacks callbacks);

  // Binds the listening socket. Before the loop runs.
  Status bind();
  // Where peers reach it.
  [[nodiscard]] const View::Endpoint& endpoint() const { return endpoint_; }

  // Posts a message. It is complete, and its memory free, once it is sent, or received. Any thread; never blocks.
  std::shared_ptr<Transfer> post(Transfer::Direction direction, Transfer::Message message, Transfer::Done done = {});
  // post() refuses from now on; what was posted goes on. Any thread.
  void close(const Status& why) { inbox_.close(why); }
  // Any thread.
  [[nodiscard]] Metrics metrics() const;

  // The job starts: these are its workers.
  void enter(const View& view);
  // Ok, or why the job fails: which transfer has made no progress for its patience, and with whom. Called a few times
  // a second.
  Status check(Clock::time_point now);
  // No transfer may go longer without progress than this from now on.
  void limit_patience(std::chrono::milliseconds most);
  [[nodiscard]] bool is_idle() const;

  // Closes the connections.
  void end_in_order();
  // Tells the peers `word`, if it is an error, closes the connections, and fails all transfers for `why`.
  void fail(const Status& why, const Status& word);
  // The loop has ended: fails the transfers that it has not seen.
  void refuse_inbox();

 private:
  struct Peer {
    uint32_t rank = 0;
    std::string name;  // "rank 1 (host b)"
    Sender sender;
    Receiver receiver;
    TcpConnection* out = nullptr;  // the connection for messages to the peer, which this worker makes
    TcpConnection* in = nullptr;   // the connection for messages from the peer, once it has joined
    bool is_out_open = false;
    Status broken = {};  // why a connection has ended; ok while none has
    Clock::time_point broken_at = {};

    [[nodiscard]] bool is_idle() const { return sender.is_empty() && receiver.is_empty(); }
  };
  struct Line {
    std::shared_ptr<TcpConnection> connection;
    Peer* peer = nullptr;            // none until it has joined
    Bytes control;                   // the payload of the frame that is coming in, if that is not a message
    std::optional<Join> early = {};  // of an elastic job: it waits until this worker is in its view as well
  };

  void take_inbox();
  void start(const std::shared_ptr<Transfer>& transfer);
  Peer& peer_of(uint32_t rank);
  void begin_anew();
  void let_in(Line& line, uint32_t rank);
  void let_go(uint32_t rank, const Status& why);
  void connect(Peer& peer, uint32_t rank);
  void send_messages(Peer& peer);

  void on_open(Connection& connection) override;
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override;
  Status on_frame(Connection& connection, const FrameHeader& header) override;
  void on_written(Connection& connection) override;
  void on_close(Connection& connection, const Status& why) override;
  [[nodiscard]] static bool takes(const Line& line, FrameType type);
  Status join(Line& line);
  [[nodiscard]] Status check_join(const Join& join) const;
  Status take_credit(Line& line, const FrameHeader& header);
  void note_idle();
  void stop_listening();

  const Config config_;
  const std::unique_ptr<TcpContext> context_;
  EventLog& log_;
  const Callbacks callbacks_;
  Inbox<std::shared_ptr<Transfer>> inbox_;
  std::unique_ptr<TcpListener> listener_;
  View::Endpoint endpoint_;

  View view_;
  ChannelPatience patience_;
  std::map<uint32_t, Peer> peers_;  // those that something was posted for or that have joined, keyed by rank
  std::map<const Connection*, Line> lines_;
  RefusalLog refusals_;
  bool has_ended_ = false;
};

}  // namespace jaxhetero
