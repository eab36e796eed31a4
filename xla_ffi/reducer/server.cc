#include "xla_ffi/reducer/server.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kMaxPatience{5000};  // before a late worker is named
constexpr milliseconds kFaultFlush{2000};

}  // namespace

ReducerServer::~ReducerServer() {
  stop();
  if (thread_.joinable()) thread_.join();
}

Status ReducerServer::start() {
  Result<TcpAddress> coordinator = resolve(config_.coordinator);
  if (!coordinator.ok()) return coordinator.status();
  Result<TcpAddress> address = resolve(config_.host, config_.port);
  if (!address.ok()) return address.status();
  Result<std::unique_ptr<EventLoop>> loop = EventLoop::create();
  if (!loop.ok()) return loop.status();
  loop_ = std::move(*loop);
  context_ = std::make_unique<TcpContext>(*loop_, config_.token);
  context_->counters = counters_;
  Result<std::unique_ptr<TcpListener>> listener = TcpListener::bind(*loop_, *address, "this reducer");
  if (!listener.ok()) return listener.status();
  listener_ = std::move(*listener);

  Registration registration;
  registration.role = Role::kReducer;
  registration.rank = config_.colocated_rank;
  registration.number = config_.number;
  registration.version = config_.version;
  registration.host_name = config_.host_name;
  registration.port = listener_->port();
  registration.address = config_.host.empty() ? "" : address->host();
  member_ = std::make_unique<Member>(*context_, *coordinator, std::move(registration), log_, config_.timeout);
  loop_->post([this] {
    member_->start(config_.start_timeout, {
                                              .on_view = [this](const View& view) { start_job(view); },
                                              .on_halt = {},
                                              .on_forget = {},
                                              .on_leaving = {},
                                              .on_goodbye = [this] { close_down({}); },
                                              .on_ask = [this] { return state(); },
                                              .on_lost = [this](const Lost& lost) { note_lost(lost); },
                                              .on_failure = [this](const Status& why) { close_down(why); },
                                          });
  });
  thread_ = std::thread([this] {
    loop_->run();
    hang_up();
  });
  return {};
}

void ReducerServer::start_job(const View& view) {
  if (reducer_) return;
  view_ = view;
  place_.set({view.job_id, view.own_index});
  reducer_ = std::make_unique<ReducerStateMachine>(
      ReducerStateMachine::Job{view_.worker_hosts, view_.job, view_.number > 0}, context_->lent_memory);
  context_->checksums = view.job.checksum;
  by_rank_.assign(view.worker_hosts.size(), nullptr);
  const Status status = listener_->start([this](Fd socket, const TcpAddress& peer, std::shared_ptr<void> admission) {
    auto connection = TcpConnection::accept(*context_, std::move(socket), peer, *this, std::move(admission));
    peers_[connection.get()].connection = connection;
  });
  if (!status.ok()) return finish(status);
  if (view_.number == 0) loop_->after(config_.start_timeout, [this] { check_all_joined(); });
  watch_rounds();
  member_->send(OutFrame::control(FrameType::kReady, {}));
  log_.add(Severity::kInfo, "reducer " + std::to_string(view.own_index) + " is ready for " +
                                std::to_string(view.worker_hosts.size()) + " workers on port " +
                                std::to_string(listener_->port()));
}

ProcessState ReducerServer::state() const {
  ProcessState state = process_state(view_.number, metrics());
  if (reducer_) state.late_workers = reducer_->late_workers(loop_->now_ms());
  return state;
}

std::string ReducerServer::own_name() const {
  return "reducer " + std::to_string(view_.own_index) + " (host " + config_.host_name + ")";
}

void ReducerServer::check_all_joined() {
  if (counters_->joined_count == by_rank_.size() || view_.number > 0 || closing_) return;
  std::string missing;
  for (uint32_t rank = 0; rank < by_rank_.size(); ++rank) {
    if (by_rank_[rank] == nullptr) missing += (missing.empty() ? "" : ", ") + reducer_->worker_name(rank);
  }
  reducer_->fail({Code::kStartTimeout, "these workers did not join " + own_name() + " in time: " + missing}, outgoing_);
  deliver();
}

Status ReducerServer::on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) {
  Peer& peer = peers_[&connection];
  if (header.type == FrameType::kPush) {
    if (!peer.rank.has_value()) return {Code::kProtocol, "it pushed before it joined"};
    Result<std::span<std::byte>> memory = reducer_->start_push(*peer.rank, header, loop_->now_ms(), outgoing_);
    deliver();
    if (!memory.ok()) return memory.status();
    into = as_pieces(*memory);
    return {};
  }
  peer.control.resize(header.payload_bytes);
  into = as_pieces(peer.control);
  return {};
}

Status ReducerServer::on_frame(Connection& connection, const FrameHeader& header) {
  Peer& peer = peers_[&connection];
  if (header.type == FrameType::kJoin) return join(peer);
  if (!peer.rank.has_value()) return {Code::kProtocol, "it spoke before it joined"};
  Status status;
  switch (header.type) {
    case FrameType::kPush:
      status = reducer_->finish_push(*peer.rank, header, loop_->now_ms(), outgoing_);
      count_rounds();
      break;
    case FrameType::kDescribe:
      status = describe_op(peer, header);
      break;
    case FrameType::kFault:
      reducer_->fail(decode_fault(peer.control), outgoing_);
      break;
    case FrameType::kGoodbye:
      reducer_->leave(*peer.rank, {}, outgoing_);
      break;
    default:
      status = {Code::kProtocol, "it sent a frame of type " + std::to_string(int(header.type))};
  }
  deliver();
  return status;
}

Result<bool> ReducerServer::on_lent(Connection& connection, const FrameHeader& header,
                                    const std::shared_ptr<const std::byte>& payload) {
  const Peer& peer = peers_[&connection];
  if (header.type != FrameType::kPush || !peer.rank.has_value()) return false;
  Result<bool> taken = reducer_->take_lent(*peer.rank, header, payload, loop_->now_ms(), outgoing_);
  count_rounds();
  deliver();
  return taken;
}

void ReducerServer::count_rounds() {
  counters_->round_count = earlier_round_count_ + reducer_->completed_round_count();
}

Status ReducerServer::describe_op(const Peer& peer, const FrameHeader& header) {
  Result<OpDescription> description = decode_op_description(peer.control);
  if (!description.ok()) return description.status();
  return reducer_->describe_op(*peer.rank, header, std::move(*description), outgoing_);
}

Status ReducerServer::check(const Join& join) const {
  const std::string hint = "; is it of this job, and its rank its own?";
  if (join.job_id != view_.job_id) return {Code::kInvalidArgument, "it belongs to another job" + hint};
  if (join.rank >= by_rank_.size() || by_rank_[join.rank] != nullptr) {
    return {Code::kInvalidArgument,
            "it joined as rank " + std::to_string(join.rank) + ", which is taken or does not exist" + hint};
  }
  const auto first = std::ranges::find_if(by_rank_, [](const TcpConnection* c) { return c != nullptr; });
  if (first != by_rank_.end() && join.plan != plan_) {
    return {Code::kVersionMismatch, "its plan, which reducer sums what, is not that of " +
                                        reducer_->worker_name(static_cast<uint32_t>(first - by_rank_.begin()))};
  }
  return {};
}

Status ReducerServer::join(Peer& peer) {
  Result<Join> join = decode_join(peer.control);
  if (!join.ok()) return join.status();
  if (join->job_id == view_.job_id && join->view < view_.number)
    return {Code::kProtocol, "its view of the job is an earlier one"};
  if (join->job_id == view_.job_id && join->view > view_.number) enter_view(join->view);
  if (peer.rank.has_value()) return {Code::kProtocol, "it joined twice"};
  if (const Status refusal = check(*join); !refusal.ok()) {
    // The worker is told why, and so is the log: the worker may have been started with the settings of another job.
    refusals_.add(log_, Severity::kWarning, "refused " + peer.connection->peer() + ": " + refusal.message(),
                  loop_->now_ms());
    const Status word(refusal.code(), "refused by " + own_name() + ": " + refusal.message());
    peer.connection->send(OutFrame::control(FrameType::kFault, encode(word)));
    peer.connection->close_after_flush();
    return {};
  }
  peer.rank = join->rank;
  by_rank_[join->rank] = peer.connection.get();
  plan_ = join->plan;
  ++counters_->joined_count;
  if (!reducer_->fault().ok()) {
    peer.connection->send(OutFrame::control(FrameType::kFault, encode(reducer_->fault())));
    peer.connection->close_after_flush();
  }
  return {};
}

// A worker has joined with a later view: rounds that the old one left incomplete will be pushed anew.
void ReducerServer::enter_view(uint32_t number) {
  view_.number = number;
  earlier_round_count_ += reducer_->completed_round_count();
  for (TcpConnection*& connection : by_rank_) {
    if (connection == nullptr) continue;
    connection->close();
    peers_.erase(std::exchange(connection, nullptr));
  }
  counters_->joined_count = 0;
  context_->unread.clear();  // every worker left the old view before the coordinator announced this one
  reducer_ = std::make_unique<ReducerStateMachine>(ReducerStateMachine::Job{view_.worker_hosts, view_.job, true},
                                                   context_->lent_memory);
}

// Sends the frames of the state machine. After a fault they are the last ones: all connections are flushed and closed,
// and a worker that joins later is told the fault then.
void ReducerServer::deliver() {
  for (Outgoing& frame : outgoing_) {
    TcpConnection* connection = by_rank_[frame.rank];
    if (connection == nullptr) continue;
    if (frame.header.type != FrameType::kResult) {
      peers_[connection].control_bytes += static_cast<int64_t>(kHeaderBytes + frame.payload.size());
    }
    connection->send(OutFrame::of(frame.header, frame.payload, std::move(frame.owner)));
  }
  outgoing_.clear();
  if (closing_ || reducer_->fault().ok()) return;
  for (const auto& [key, peer] : peers_) {
    if (peer.rank.has_value()) peer.connection->close_after_flush();
  }
  close_down(reducer_->fault());
}

// The job is over. The workers know, or will hear it from the coordinator, and close their connections. Closing one
// earlier would look like the death of this reducer.
void ReducerServer::close_down(const Status& how) {
  if (std::exchange(closing_, true)) return;
  end_ = how;
  if (!how.ok()) loop_->after(kFaultFlush, [this] { finish(end_); });
  end_if_done();
}

// The workers have left for the next view already, and nobody is to hear more of this one.
void ReducerServer::note_lost(const Lost& lost) {
  {
    const std::lock_guard lock(mutex_);
    lost_number_ = lost.reducer;
  }
  finish({Code::kReducerLost, lost.why});
}

void ReducerServer::on_close(Connection& connection, const Status& why) {
  const auto found = peers_.find(&connection);
  if (found == peers_.end()) return;
  const Peer peer = std::move(found->second);
  peers_.erase(found);
  if (!peer.rank.has_value()) {
    const std::string text = "refused a connection from " + connection.peer() + ": " + why.message();
    if (!why.ok()) refusals_.add(log_, Severity::kInfo, text, loop_->now_ms());
  } else if (by_rank_[*peer.rank] == peer.connection.get()) {
    by_rank_[*peer.rank] = nullptr;
    // The coordinator finds out whether a worker lives; but only this reducer knows that it broke the protocol.
    if (!why.ok() && why.code() != Code::kInternal) reducer_->leave(*peer.rank, why, outgoing_);
    deliver();
  }
  if (closing_) end_if_done();
}

void ReducerServer::end_if_done() {
  // Workers that have not joined yet are to hear why the job failed.
  if (!end_.ok() && counters_->joined_count < by_rank_.size()) return;
  const auto has_joined = [](const auto& entry) { return entry.second.rank.has_value(); };
  if (std::ranges::none_of(peers_, has_joined)) finish(end_);
}

void ReducerServer::watch_rounds() {
  const milliseconds patience = std::min(kMaxPatience, config_.timeout / 4);
  loop_->after(std::max(patience / 2, milliseconds(1)), [this, patience] {
    reducer_->report_late(loop_->now_ms(), patience.count(), outgoing_, find_moving());
    deliver();
    {
      const std::lock_guard lock(mutex_);
      late_workers_ = reducer_->late_workers(loop_->now_ms());
    }
    watch_rounds();
  });
}

// The workers, by rank, that have sent or taken bytes of a bucket since the last look: more bytes have passed than ever
// before, beyond those of control frames.
std::vector<bool> ReducerServer::find_moving() {
  std::vector<bool> moving(by_rank_.size());
  for (size_t rank = 0; rank < by_rank_.size(); ++rank) {
    if (by_rank_[rank] == nullptr) continue;
    Peer& peer = peers_[by_rank_[rank]];
    const int64_t data_bytes = static_cast<int64_t>(by_rank_[rank]->passed_bytes()) - peer.control_bytes;
    moving[rank] = data_bytes > std::exchange(peer.data_bytes, std::max(peer.data_bytes, data_bytes));
  }
  return moving;
}

void ReducerServer::finish(const Status& how) {
  {
    const std::lock_guard lock(mutex_);
    if (!result_.has_value()) result_ = how;
  }
  ended_.notify_all();
  loop_->stop();
}

// The loop has ended. The sockets close now, not with this object, so that no peer waits for it.
void ReducerServer::hang_up() {
  member_->stop();
  listener_->stop();
  for (const auto& [key, peer] : peers_) peer.connection->close();
}

std::optional<Status> ReducerServer::wait(milliseconds patience) {
  std::unique_lock lock(mutex_);
  ended_.wait_for(lock, patience, [this] { return result_.has_value(); });
  return result_;
}

std::optional<uint32_t> ReducerServer::lost_number() {
  const std::lock_guard lock(mutex_);
  return lost_number_;
}

std::vector<ProcessState::LateWorker> ReducerServer::late_workers() {
  const std::lock_guard lock(mutex_);
  return late_workers_;
}

void ReducerServer::stop() {
  if (loop_) loop_->post([this] { finish({}); });
}

}  // namespace jaxhetero
