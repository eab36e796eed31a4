#include "xla_ffi/reducer/strand.h"

#include <algorithm>
#include <utility>

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kMaxPatience{5000};              // the longest wait before a late worker is named
constexpr uint64_t kCopyElements = uint64_t{16} << 10;  // the most elements of a state in a frame

}  // namespace

ReducerStrand::ReducerStrand(Config config, std::unique_ptr<TcpContext> context, const View& view, EventLog& log,
                             Callbacks callbacks)
    : config_(std::move(config)),
      context_(std::move(context)),
      log_(log),
      callbacks_(std::move(callbacks)),
      view_(view),
      kept_(std::make_shared<KeptOptimizers>(view.own_index, view.job.is_elastic())),
      partners_(*context_, {view.job_id, view.own_index, 0, 0, 0}, config_.timeout,
                {[this](uint32_t, const FrameHeader& header) { note_reply(header); },
                 [this](uint32_t partner, const std::string& why) { lose_partner(partner, why); }}),
      reducer_(std::make_unique<ReducerStateMachine>(
          ReducerStateMachine::Job{view.worker_hosts, view.job, view.ranks(), view.own_index}, context_->lent_memory,
          kept_)),
      members_(view.ranks()),
      by_rank_(view.worker_hosts.size(), nullptr) {}

void ReducerStrand::start() {
  if (view_.number == 0) context_->loop.after(config_.start_timeout, [this] { check_all_joined(); });
  watch_rounds();
}

void ReducerStrand::accept(Fd socket, const TcpAddress& peer, std::shared_ptr<void> admission, milliseconds patience) {
  auto connection = TcpConnection::accept(*context_, std::move(socket), peer, *this, std::move(admission), patience);
  peers_[connection.get()].connection = connection;
}

void ReducerStrand::name_hosts(const std::vector<std::string>& hosts) {
  if (hosts.size() != view_.worker_hosts.size()) return;
  view_.worker_hosts = hosts;
  reducer_->name_hosts(hosts);
}

// --- Frames of workers.

void ReducerStrand::check_all_joined() {
  if (joined_count_ == by_rank_.size() || view_.number > 0 || closing_) return;
  std::string missing;
  for (uint32_t rank = 0; rank < by_rank_.size(); ++rank) {
    if (by_rank_[rank] == nullptr) missing += (missing.empty() ? "" : ", ") + reducer_->worker_name(rank);
  }
  reducer_->fail({Code::kStartTimeout, "these workers did not join " + config_.own_name + " in time: " + missing},
                 outgoing_);
  deliver();
}

Status ReducerStrand::on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) {
  Peer& peer = peers_[&connection];
  if (header.type == FrameType::kPush) {
    if (!peer.rank.has_value()) return {Code::kProtocol, "it pushed before it joined"};
    Result<std::span<std::byte>> memory = reducer_->start_push(*peer.rank, header, context_->loop.now_ms(), outgoing_);
    deliver();
    if (!memory.ok()) return memory.status();
    into = as_pieces(*memory);
    return {};
  }
  peer.control.resize(header.payload_bytes);
  into = as_pieces(peer.control);
  return {};
}

Status ReducerStrand::on_frame(Connection& connection, const FrameHeader& header) {
  Peer& peer = peers_[&connection];
  if (header.type == FrameType::kJoin) return join(peer);
  if (header.type == FrameType::kPartner || peer.keeper) return serve_partner(peer, header);
  if (!peer.rank.has_value()) return {Code::kProtocol, "it spoke before it joined"};
  Status status;
  switch (header.type) {
    case FrameType::kPush:
      status = reducer_->finish_push(*peer.rank, header, context_->loop.now_ms(), outgoing_);
      count_rounds();
      note_first_state();
      break;
    case FrameType::kDescribe:
      status = describe_op(peer, header);
      break;
    case FrameType::kHeld:
      status = reducer_->note_held(*peer.rank, header, outgoing_);
      break;
    case FrameType::kStep:
      status = take_step(peer, header);
      break;
    case FrameType::kPlan:
      status = take_plan(peer);
      break;
    case FrameType::kWaits:
      peer.control_bytes += static_cast<int64_t>(kHeaderBytes + header.payload_bytes);
      reducer_->note_waiting(*peer.rank, decode_text(peer.control), context_->loop.now_ms());
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

Result<bool> ReducerStrand::on_lent(Connection& connection, const FrameHeader& header,
                                    const std::shared_ptr<const std::byte>& payload) {
  const Peer& peer = peers_[&connection];
  if (header.type != FrameType::kPush || !peer.rank.has_value()) return false;
  Result<bool> taken = reducer_->take_lent(*peer.rank, header, payload, context_->loop.now_ms(), outgoing_);
  count_rounds();
  deliver();
  return taken;
}

void ReducerStrand::count_rounds() {
  context_->counters->round_count = earlier_round_count_ + reducer_->completed_round_count();
}

Status ReducerStrand::describe_op(const Peer& peer, const FrameHeader& header) {
  Result<OpDescription> description = decode_op_description(peer.control);
  if (!description.ok()) return description.status();
  return reducer_->describe_op(*peer.rank, header, std::move(*description), outgoing_);
}

Status ReducerStrand::take_plan(const Peer& peer) {
  Result<StatePlan> plan = decode_state_plan(peer.control);
  if (!plan.ok()) return plan.status();
  if (planned_view_ == view_.number) {
    if (*plan == kept_->backups.plan()) return {};
    reducer_->fail({Code::kMismatch, reducer_->worker_name(*peer.rank) +
                                         " and other workers disagree about which reducer keeps what of optimizers"},
                   outgoing_);
    return {};
  }
  planned_view_ = view_.number;
  if (view_.job.is_elastic()) {
    partners_.enter(*plan, view_.number, members_);
    if (copying_.has_value()) kept_->backups.take_back(*copying_);  // nobody knows whether it has come
  } else {
    partners_.enter(*plan);
  }
  kept_->backups.enter(*plan, kept_->states);
  copying_.reset();
  copy_next();
  return {};
}

Status ReducerStrand::take_step(const Peer& peer, const FrameHeader& header) {
  Result<StepInputs> inputs = decode_step_inputs(peer.control);
  if (!inputs.ok()) return inputs.status();
  return reducer_->take_step(*peer.rank, header, std::move(*inputs), outgoing_);
}

Status ReducerStrand::check(const Join& join) const {
  const std::string hint = "; is it of this job, and its rank its own?";
  if (join.job_id != view_.job_id) return {Code::kInvalidArgument, "it belongs to another job" + hint};
  if (join.to != view_.own_index) {
    return {Code::kInvalidArgument, "it joined reducer " + std::to_string(join.to) +
                                        "; does something on the way send its connections elsewhere?"};
  }
  if (join.rank >= by_rank_.size() || by_rank_[join.rank] != nullptr) {
    return {Code::kInvalidArgument,
            "it joined as rank " + std::to_string(join.rank) + ", which is taken or does not exist" + hint};
  }
  if (view_.job.is_elastic() && (join.members != members_ || !std::ranges::binary_search(members_, join.rank))) {
    return {Code::kVersionMismatch, "it has another view of who the members of the job are"};
  }
  const auto first = std::ranges::find_if(by_rank_, [](const TcpConnection* c) { return c != nullptr; });
  if (first != by_rank_.end() && join.plan != plan_) {
    return {Code::kVersionMismatch, "its plan, which reducer sums what, is not that of " +
                                        reducer_->worker_name(static_cast<uint32_t>(first - by_rank_.begin()))};
  }
  return {};
}

Status ReducerStrand::join(Peer& peer) {
  Result<Join> join = decode_join(peer.control);
  if (!join.ok()) return join.status();
  const bool is_for_us = join->job_id == view_.job_id && join->to == view_.own_index;
  if (is_for_us && join->view < view_.number) return {Code::kProtocol, "its view of the job is an earlier one"};
  if (is_for_us && join->view > view_.number) enter_view(*join);
  if (peer.rank.has_value()) return {Code::kProtocol, "it joined twice"};
  if (const Status refusal = check(*join); !refusal.ok()) {
    // The worker is told why, and so is the log: the worker may have been started with the settings of another job.
    refusals_.add(log_, Severity::kWarning, "refused " + peer.connection->peer() + ": " + refusal.message(),
                  context_->loop.now_ms());
    const Status word(refusal.code(), "refused by " + config_.own_name + ": " + refusal.message());
    peer.connection->send(OutFrame::control(FrameType::kFault, encode(word)));
    peer.connection->close_after_flush();
    return {};
  }
  peer.rank = join->rank;
  by_rank_[join->rank] = peer.connection.get();
  plan_ = join->plan;
  context_->counters->joined_count = ++joined_count_;
  if (!reducer_->fault().ok()) {
    peer.connection->send(OutFrame::control(FrameType::kFault, encode(reducer_->fault())));
    peer.connection->close_after_flush();
  }
  return {};
}

// A worker has joined with a later view: rounds that the old one left incomplete will be pushed anew.
void ReducerStrand::enter_view(const Join& join) {
  view_.number = join.view;
  members_ = join.members;
  earlier_round_count_ += reducer_->completed_round_count();
  for (TcpConnection*& connection : by_rank_) {
    if (connection == nullptr) continue;
    connection->close();
    peers_.erase(std::exchange(connection, nullptr));
  }
  context_->counters->joined_count = joined_count_ = 0;
  context_->unread.clear();  // every worker left the old view before the coordinator announced this one
  reducer_ = std::make_unique<ReducerStateMachine>(
      ReducerStateMachine::Job{view_.worker_hosts, view_.job, members_, view_.own_index}, context_->lent_memory, kept_);
}

// --- Partners.

// A frame of a reducer that this one backs up.
Status ReducerStrand::serve_partner(Peer& peer, const FrameHeader& header) {
  if (header.type == FrameType::kPartner) return greet_partner(peer);
  // The job goes on without the partner, or the partner will do this again in the next view.
  if (peer.partner_view != (view_.job.is_elastic() ? view_.number : 0)) return {};
  FrameHeader reply = header;
  reply.payload_bytes = 0;
  if (header.type == FrameType::kBackUp) {
    reply.type = FrameType::kBackedUp;
    if (Status status = peer.keeper->back_up(header, peer.control); !status.ok()) return status;
  } else if (header.type == FrameType::kCopy) {
    reply.type = FrameType::kCopied;
    const Result<StateCopy> copy = decode_state_copy(peer.control);
    if (!copy.ok()) return copy.status();
    if (Status status = peer.keeper->take_copy(copy.value()); !status.ok()) return status;
  } else if (header.type == FrameType::kDescribe) {
    const Result<OpDescription> description = decode_op_description(peer.control);
    return description.ok() ? peer.keeper->describe_op(header.op, description.value()) : description.status();
  } else if (header.type == FrameType::kStep) {
    Result<StepInputs> inputs = decode_step_inputs(peer.control);
    return inputs.ok() ? peer.keeper->take_step(header, std::move(*inputs)) : inputs.status();
  } else {
    return {Code::kProtocol, "it sent a frame of type " + std::to_string(int(header.type))};
  }
  peer.connection->send(OutFrame::control(reply.type, {}, reply));
  return {};
}

// In an elastic job, at the beginning of each view. This reducer may hear of the view from it first.
Status ReducerStrand::greet_partner(Peer& peer) {
  Result<Join> join = decode_join(peer.control);
  if (!join.ok()) return join.status();
  const bool is_elastic = view_.job.is_elastic();
  if (join->job_id != view_.job_id || peer.rank.has_value() || (peer.keeper && !is_elastic)) {
    return {Code::kProtocol, "it is no reducer of this job"};
  }
  if (join->to != view_.own_index) {
    return {Code::kProtocol,
            "it wants reducer " + std::to_string(join->to) + " to back it up, not " + config_.own_name};
  }
  peer.keeper = std::make_unique<BackupKeeper>(kept_->states);
  if (!is_elastic) return {};
  if (join->view > view_.number) enter_view(*join);
  peer.partner_view = join->view;
  FrameHeader reply;
  reply.round = join->view;
  peer.connection->send(OutFrame::control(FrameType::kPartner, {}, reply));
  return {};
}

void ReducerStrand::note_reply(const FrameHeader& header) {
  if (header.type == FrameType::kBackedUp) {
    reducer_->note_backed_up(header, outgoing_);
    return deliver();
  }
  copying_.reset();
  copy_next();
}

// The coordinator makes a new view, in which others back this reducer up.
void ReducerStrand::lose_partner(uint32_t partner, const std::string& why) {
  kept_->backups.forget(partner);
  if (copying_.has_value() && copying_->reducer == partner) copying_.reset();
  if (!closing_) callbacks_.on_lost({view_.number, partner, config_.own_name + ": " + why});
}

// Of what a backup lacks, a piece at a time, while rounds go on.
void ReducerStrand::copy_next() {
  if (copying_.has_value() || closing_) return;
  if (view_.job.is_elastic() && planned_view_ != view_.number) return;  // the plan of the view is still to come
  const std::optional<Backups::Copy> piece = kept_->backups.next_to_copy(kept_->states, kCopyElements);
  if (!piece.has_value()) return note_settled();
  copying_ = piece;
  KeptState& state = *kept_->states.find(piece->state);
  const KeptState::Stamp stamp = *state.runs(piece->part).front().stamp;
  StateCopy copy{.number = piece->state,
                 .count = state.count(),
                 .slot_count = state.slot_count(),
                 .is_backed_up = state.is_backed_up(),
                 .part = piece->part,
                 .version = stamp.version,
                 .op = stamp.op,
                 .round = stamp.round,
                 .has_gradient = state.has_gradient(),
                 .has_earlier = state.can_undo(),
                 .values = {}};
  for (const std::span<float> array : arrays_of(state, piece->part, copy.has_gradient)) {
    const auto values = std::as_bytes(array);
    copy.values.insert(copy.values.end(), values.begin(), values.end());
  }
  kept_->backups.note(*piece);
  partners_.send(piece->reducer, OutFrame::control(FrameType::kCopy, encode(copy)));
}

// What was settled as long as there was nothing to keep is to be looked at again.
void ReducerStrand::note_first_state() {
  if (settled_.has_value() && !settled_->has_states && !kept_->states.all().empty()) copy_next();
}

// All backups have what they are to have.
void ReducerStrand::note_settled() {
  if (!planned_view_.has_value()) return;
  const Settled settled{*planned_view_, !kept_->states.all().empty(), !kept_->backups.plan().candidates().empty()};
  if (settled == settled_) return;
  settled_ = settled;
  callbacks_.on_settled(settled);
}

// Sends the frames of the state machine. After a fault they are the last ones: all connections are flushed and closed,
// and a worker that joins later is told the fault then.
void ReducerStrand::deliver() {
  for (Outgoing& frame : outgoing_) {
    if (frame.is_for_partner) {
      partners_.send(frame.rank, OutFrame::of(frame.header, frame.payload, std::move(frame.owner)));
      continue;
    }
    TcpConnection* connection = by_rank_[frame.rank];
    if (connection == nullptr) continue;
    if (frame.header.type != FrameType::kResult) {
      peers_[connection].control_bytes += static_cast<int64_t>(kHeaderBytes + frame.payload.size());
    }
    context_->counters->saved_bytes += frame.saved_bytes;
    connection->send(OutFrame::of(frame.header, frame.payload, std::move(frame.owner)));
  }
  outgoing_.clear();
  if (closing_ || reducer_->fault().ok() || std::exchange(has_told_fault_, true)) return;
  for (const auto& [key, peer] : peers_) {
    if (peer.rank.has_value()) peer.connection->close_after_flush();
  }
  callbacks_.on_fault(reducer_->fault());
}

// --- The end.

void ReducerStrand::fail(const Status& why) {
  reducer_->fail(why, outgoing_);
  deliver();
}

void ReducerStrand::close_down(const Status& how) {
  if (std::exchange(closing_, true)) return;
  end_ = how;
  partners_.close();
  note_quiet();
}

void ReducerStrand::on_close(Connection& connection, const Status& why) {
  const auto found = peers_.find(&connection);
  if (found == peers_.end()) return;
  const Peer peer = std::move(found->second);
  peers_.erase(found);
  if (peer.keeper) return;  // the coordinator finds out whether that reducer lives
  if (!peer.rank.has_value()) {
    const std::string text = "refused a connection from " + connection.peer() + ": " + why.message();
    if (!why.ok()) refusals_.add(log_, Severity::kInfo, text, context_->loop.now_ms());
  } else if (by_rank_[*peer.rank] == peer.connection.get()) {
    by_rank_[*peer.rank] = nullptr;
    // The coordinator finds out whether a worker lives; but only this reducer knows that it broke the protocol.
    const bool is_breach = !why.ok() && why.code() != Code::kInternal;
    if (is_breach && view_.job.is_elastic()) {
      callbacks_.on_breach({view_.number, {*peer.rank}, config_.own_name + ": " + why.message()});
    } else if (is_breach) {
      reducer_->leave(*peer.rank, why, outgoing_);
    }
    deliver();
  }
  note_quiet();
}

void ReducerStrand::note_quiet() {
  if (!closing_ || is_quiet_) return;
  // Workers that have not joined yet are to hear why the job failed.
  if (!end_.ok() && joined_count_ < by_rank_.size()) return;
  const auto has_joined = [](const auto& entry) { return entry.second.rank.has_value(); };
  if (std::ranges::any_of(peers_, has_joined)) return;
  is_quiet_ = true;
  callbacks_.on_quiet();
}

void ReducerStrand::hang_up() {
  partners_.close();
  for (const auto& [key, peer] : peers_) peer.connection->close();
}

// --- Late workers.

void ReducerStrand::watch_rounds() {
  const milliseconds patience = std::min(kMaxPatience, config_.timeout / 4);
  context_->loop.after(std::max(patience / 2, milliseconds(1)), [this, patience] {
    reducer_->report_late(context_->loop.now_ms(), patience.count(), outgoing_, find_moving());
    deliver();
    watch_rounds();
  });
}

// The workers, by rank, that have sent or taken bytes of a bucket since the last look: more bytes have passed than ever
// before, beyond those of control frames.
std::vector<bool> ReducerStrand::find_moving() {
  std::vector<bool> moving(by_rank_.size());
  for (size_t rank = 0; rank < by_rank_.size(); ++rank) {
    if (by_rank_[rank] == nullptr) continue;
    Peer& peer = peers_[by_rank_[rank]];
    const int64_t data_bytes = static_cast<int64_t>(by_rank_[rank]->passed_bytes()) - peer.control_bytes;
    moving[rank] = data_bytes > std::exchange(peer.data_bytes, std::max(peer.data_bytes, data_bytes));
  }
  return moving;
}

}  // namespace jaxhetero
