// One strand of a reducer: an event loop on a thread of its own, which takes the connections of one strand of every
// worker, and moves frames between them and a ReducerStateMachine. Strands share nothing on the way of a byte.
//
// The server owns the strands, and tells all of them of failures and of the end.
#pragma once

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
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/reducer/backup_keeper.h"
#include "xla_ffi/reducer/backups.h"
#include "xla_ffi/reducer/partners.h"
#include "xla_ffi/reducer/state_machine.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/elastic_messages.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

// On the thread of its loop, but for the constructor. Nothing blocks.
class ReducerStrand final : private ConnectionOwner {
 public:
  struct Config {
    std::string own_name;  // the reducer's name: "reducer 1 (host b)"
    std::chrono::milliseconds start_timeout{0};
    std::chrono::milliseconds timeout{0};
  };
  // Called on the strand's thread.
  struct Callbacks {
    std::function<void(const Status&)> on_fault;  // the job has failed, and this strand's workers have been told
    std::function<void()> on_quiet;            // called once, when no worker is connected any more after close_down()
    std::function<void(const Lost&)> on_lost;  // a reducer that backs this one up is lost
    std::function<void(const Accusation&)> on_breach = {};  // a worker of an elastic job has broken the protocol
    std::function<void(const Settled&)> on_settled;         // what this strand keeps is backed up
  };

  // `log` outlives the strand. The reducer has heard of the job in `view`.
  ReducerStrand(Config config, std::unique_ptr<TcpContext> context, const View& view, EventLog& log,
                Callbacks callbacks);

  // Starts the timers.
  void start();
  // Takes a socket that was just accepted: see TcpConnection::accept().
  void accept(Fd socket, const TcpAddress& peer, std::shared_ptr<void> admission, std::chrono::milliseconds patience);

  // Tells the workers that the job has failed.
  void fail(const Status& why);
  // Waits for the workers to close their connections.
  void close_down(const Status& how);
  // Closes all connections.
  void hang_up();

  // Any thread.
  [[nodiscard]] Metrics metrics() const { return snapshot(*context_->counters); }

  // Of the workers, by rank, for messages.
  void name_hosts(const std::vector<std::string>& hosts);
  [[nodiscard]] uint32_t view_number() const { return view_.number; }
  // The workers that rounds wait for, those first for which one has waited longest.
  [[nodiscard]] std::vector<ProcessState::LateWorker> late_workers() const {
    return reducer_->late_workers(context_->loop.now_ms());
  }

 private:
  struct Peer {
    std::shared_ptr<TcpConnection> connection;
    std::optional<uint32_t> rank;          // set once it has joined
    std::unique_ptr<BackupKeeper> keeper;  // set for a reducer that this one backs up
    uint32_t partner_view = 0;             // the view that the partner is in; of an elastic job
    Bytes control;                         // the payload of its latest frame that is no chunk
    int64_t control_bytes = 0;             // bytes in frames that are no data of the program
    int64_t data_bytes = 0;                // the most that has passed beyond those
  };

  void on_open(Connection&) override {}
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override;
  Status on_frame(Connection& connection, const FrameHeader& header) override;
  Result<bool> on_lent(Connection& connection, const FrameHeader& header,
                       const std::shared_ptr<const std::byte>& payload) override;
  void on_close(Connection& connection, const Status& why) override;

  [[nodiscard]] Status check(const Join& join) const;
  Status join(Peer& peer);
  Status describe_op(const Peer& peer, const FrameHeader& header);
  Status take_step(const Peer& peer, const FrameHeader& header);
  Status take_plan(const Peer& peer);
  Status serve_partner(Peer& peer, const FrameHeader& header);
  Status greet_partner(Peer& peer);
  void note_reply(const FrameHeader& header);
  void lose_partner(uint32_t partner, const std::string& why);
  void copy_next();
  void note_settled();
  void note_first_state();
  void count_rounds();
  void enter_view(const Join& join);
  void check_all_joined();
  void watch_rounds();
  [[nodiscard]] std::vector<bool> find_moving();
  void deliver();
  void note_quiet();

  const Config config_;
  const std::unique_ptr<TcpContext> context_;
  EventLog& log_;
  const Callbacks callbacks_;

  View view_;
  const std::shared_ptr<KeptOptimizers> kept_;
  Partners partners_;
  std::optional<uint32_t> planned_view_;          // the view whose plan of states is here
  std::optional<Backups::Copy> copying_;          // the copy that is under way
  std::optional<Settled> settled_;                // the latest report
  std::unique_ptr<ReducerStateMachine> reducer_;  // the state machine of the view
  std::vector<uint32_t> members_;                 // the members of the view of an elastic job
  std::map<const Connection*, Peer> peers_;
  std::vector<TcpConnection*> by_rank_;  // indexed by rank; null until the worker has joined
  size_t joined_count_ = 0;
  uint64_t plan_ = 0;  // ShardPlan::digest() of the workers that have joined
  std::vector<Outgoing> outgoing_;
  RefusalLog refusals_;
  bool has_told_fault_ = false;
  bool closing_ = false;
  bool is_quiet_ = false;
  Status end_;                        // the reason of the end, once it closes down
  uint64_t earlier_round_count_ = 0;  // the rounds of earlier views
};

}  // namespace jaxhetero
