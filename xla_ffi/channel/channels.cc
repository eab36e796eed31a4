#include "xla_ffi/channel/channels.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/base/buffers.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

// When a connection ends, the coordinator mostly knows why: its word is awaited for so long.
constexpr milliseconds kGrace{1000};

// Of an elastic job.
Status over() { return {Code::kWorkerLost, "the view is over of which that is"}; }

}  // namespace

Channels::Channels(Config config, std::unique_ptr<TcpContext> context, EventLog& log, Callbacks callbacks)
    : config_(std::move(config)),
      context_(std::move(context)),
      log_(log),
      callbacks_(std::move(callbacks)),
      patience_{std::max(config_.timeout, config_.start_timeout), config_.timeout} {
  context_->lends = false;  // messages lie in the program's own memory
}

Status Channels::bind() {
  Result<TcpAddress> address = resolve(config_.host, 0);
  if (!address.ok()) return address.status();
  Result<std::unique_ptr<TcpListener>> listener = TcpListener::bind(context_->loop, *address, "the other workers");
  if (!listener.ok()) return listener.status();
  listener_ = std::move(*listener);
  endpoint_ = {config_.host.empty() ? "" : address->host(), listener_->port()};
  return {};
}

// Not before: who joins must be of this job.
void Channels::enter(const View& view) {
  const bool is_first = view_.worker_hosts.empty();
  view_ = view;
  if (!is_first) return begin_anew();
  const Status status = listener_->start([this](Fd socket, const TcpAddress& peer, std::shared_ptr<void> admission) {
    auto connection = TcpConnection::accept(*context_, std::move(socket), peer, *this, std::move(admission));
    lines_[connection.get()].connection = connection;
  });
  if (!status.ok()) callbacks_.on_failure(status);
}

// In an elastic job, connections and transfers are of one view, as those of reducers are: a rank may be another
// worker's in the next.
void Channels::begin_anew() {
  if (!view_.job.is_elastic()) return;
  std::vector<uint32_t> ranks;
  for (const auto& [rank, peer] : peers_) ranks.push_back(rank);
  for (const uint32_t rank : ranks) let_go(rank, over());
  for (auto& [connection, line] : lines_) {
    if (line.early.has_value() && line.early->view == view_.number) let_in(line, line.early->rank);
  }
}

// Its transfers fail, and a later one begins anew.
void Channels::let_go(uint32_t rank, const Status& why) {
  const auto found = peers_.find(rank);
  if (found == peers_.end()) return;
  std::vector<std::shared_ptr<TcpConnection>> connections;
  std::erase_if(lines_, [&](const auto& entry) {
    if (entry.second.peer != &found->second) return false;
    connections.push_back(entry.second.connection);
    return true;
  });
  // First the network lets go of the program's memory, then the program gets it back.
  for (const auto& connection : connections) connection->close();
  found->second.sender.give_up(why);
  found->second.receiver.give_up(why);
  peers_.erase(found);
}

Metrics Channels::metrics() const {
  Metrics metrics = snapshot(*context_->counters);
  metrics.channel_sent_bytes = metrics.sent_bytes;
  metrics.channel_received_bytes = metrics.received_bytes;
  return metrics;
}

// --- Messages, from the program's post to their end.

std::shared_ptr<Transfer> Channels::post(Transfer::Direction direction, Transfer::Message message,
                                         Transfer::Done done) {
  message.text.resize(std::min(message.text.size(), kMaxNameBytes));
  const auto transfer = std::make_shared<Transfer>(direction, std::move(message), std::move(done));
  const uint32_t peer = transfer->message().peer;
  if (peer >= config_.worker_count || peer == config_.rank) {
    transfer->fail({Code::kInvalidArgument, config_.own_name + " has no channels with rank " + std::to_string(peer) +
                                                "; give the rank of another of the " +
                                                std::to_string(config_.worker_count) + " workers"});
    return transfer;
  }
  std::shared_ptr<Transfer> request = transfer;
  if (const Status closed = inbox_.add(request); closed.ok()) {
    context_->loop.post([this] { take_inbox(); });
  } else {
    transfer->fail(closed);
  }
  return transfer;
}

void Channels::take_inbox() {
  for (const auto& transfer : inbox_.take_all()) start(transfer);
}

void Channels::start(const std::shared_ptr<Transfer>& transfer) {
  if (has_ended_) return transfer->fail(inbox_.why_closed());
  if (view_.worker_hosts.empty()) {
    return transfer->fail({Code::kNotInitialized, "the message was posted before the job has started"});
  }
  // The tag is the number of the view then.
  if (view_.job.is_elastic() && transfer->message().tag != view_.number) return transfer->fail(over());
  const uint32_t rank = transfer->message().peer;
  Peer& peer = peer_of(rank);
  if (transfer->direction() == Transfer::Direction::kReceive) {
    std::optional<OutFrame> credit = peer.receiver.add(transfer, Clock::now());
    if (credit.has_value() && peer.in != nullptr) peer.in->send(std::move(*credit));
    return;
  }
  if (const Status status = peer.sender.add(transfer, Clock::now()); !status.ok()) return callbacks_.on_failure(status);
  if (peer.out == nullptr && peer.broken.ok()) connect(peer, rank);
  send_messages(peer);
}

Channels::Peer& Channels::peer_of(uint32_t rank) {
  const auto found = peers_.find(rank);
  if (found != peers_.end()) return found->second;
  const std::string name = "rank " + std::to_string(rank) + " (host " + view_.worker_hosts[rank] + ")";
  return peers_.try_emplace(rank, Peer{rank, name, Sender(config_.own_name, name), Receiver(name)}).first->second;
}

void Channels::connect(Peer& peer, uint32_t rank) {
  const View::Endpoint& endpoint = view_.worker_endpoints[rank];
  const Result<TcpAddress> address = resolve(endpoint.address, endpoint.port);
  if (!address.ok()) {
    return callbacks_.on_failure({Code::kInvalidArgument, peer.name + ": " + address.status().message()});
  }
  const auto connection = TcpConnection::connect(*context_, address.value(), *this, config_.timeout);
  peer.out = connection.get();
  lines_[connection.get()] = {connection, &peer, {}};
}

void Channels::send_messages(Peer& peer) {
  if (!peer.is_out_open) return;
  while (std::optional<OutFrame> frame = peer.sender.next_frame(peer.out->queued_frame_count() + 1)) {
    peer.out->send(std::move(*frame));
  }
}

// The next parts go in another turn of the loop, so that other connections have theirs.
void Channels::on_written(Connection& connection) {
  Peer* const peer = lines_.at(&connection).peer;
  if (peer == nullptr || peer->out != &connection) return;
  const Status status = peer->sender.note_written(connection.delivered_frame_count(), Clock::now());
  if (!status.ok()) return callbacks_.on_failure(status);
  if (peer->sender.has_more()) {
    context_->loop.post([this, peer, line = &connection] {
      if (lines_.contains(line)) send_messages(*peer);
    });
  }
  note_idle();
}

bool Channels::is_idle() const {
  return std::ranges::all_of(peers_, [](const auto& entry) { return entry.second.is_idle(); });
}

void Channels::note_idle() {
  if (is_idle()) callbacks_.on_idle();
}

// --- Frames of peers.

void Channels::on_open(Connection& connection) {
  Line& line = lines_.at(&connection);
  if (line.peer == nullptr) return;
  line.peer->is_out_open = true;
  line.connection->offer_carrier();
  const Join join{view_.job_id, config_.rank, view_.number, 0, line.peer->rank};
  connection.send(OutFrame::control(FrameType::kJoin, encode(join)));
  send_messages(*line.peer);
}

bool Channels::takes(const Line& line, FrameType type) {
  if (line.peer == nullptr) return type == FrameType::kJoin;
  const bool is_out = line.peer->out == line.connection.get();
  return type == FrameType::kFault || type == (is_out ? FrameType::kCredit : FrameType::kMessage);
}

Status Channels::on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) {
  Line& line = lines_.at(&connection);
  if (!takes(line, header.type)) {
    return {Code::kProtocol, "it sent a frame of type " + std::to_string(int(header.type))};
  }
  if (header.type == FrameType::kMessage) return line.peer->receiver.start(header, into);
  if (header.payload_bytes > 1 + kMaxTextBytes) return {Code::kProtocol, "it sent a text that is too long"};
  line.control.resize(header.payload_bytes);
  into = as_pieces(line.control);
  return {};
}

Status Channels::on_frame(Connection& connection, const FrameHeader& header) {
  Line& line = lines_.at(&connection);
  switch (header.type) {
    case FrameType::kJoin:
      return join(line);
    case FrameType::kCredit:
      return take_credit(line, header);
    case FrameType::kMessage:
      line.peer->receiver.finish(header, Clock::now());
      note_idle();
      return {};
    default:
      if (view_.job.is_elastic()) return decode_fault(line.control);
      callbacks_.on_failure(decode_fault(line.control));
      return {};
  }
}

Status Channels::take_credit(Line& line, const FrameHeader& header) {
  Peer& peer = *line.peer;
  Status status = peer.sender.take_credit(header, decode_text(line.control), Clock::now());
  if (status.code() == Code::kMismatch) {
    callbacks_.on_failure(status);
    return {};
  }
  if (status.ok()) send_messages(peer);
  return status;
}

Status Channels::join(Line& line) {
  Result<Join> join = decode_join(line.control);
  if (!join.ok()) return join.status();
  if (const Status refusal = check_join(join.value()); !refusal.ok()) {
    refusals_.add(log_, Severity::kWarning, "refused " + line.connection->peer() + ": " + refusal.message(),
                  context_->loop.now_ms());
    const Status word(refusal.code(), "refused by " + config_.own_name + ": " + refusal.message());
    line.connection->send(OutFrame::control(FrameType::kFault, encode(word)));
    line.connection->close_after_flush();
    return {};
  }
  if (view_.job.is_elastic() && join->view < view_.number) return over();
  if (view_.job.is_elastic() && join->view > view_.number) {  // it has heard of the next view earlier
    line.early = *join;
    return {};
  }
  let_in(line, join->rank);
  return {};
}

void Channels::let_in(Line& line, uint32_t rank) {
  line.early.reset();
  line.peer = &peer_of(rank);
  line.peer->in = line.connection.get();
  for (OutFrame& credit : line.peer->receiver.credits()) line.connection->send(std::move(credit));
}

Status Channels::check_join(const Join& join) const {
  const std::string hint = "; is it of this job, and its rank its own?";
  if (join.job_id != view_.job_id) return {Code::kInvalidArgument, "it belongs to another job" + hint};
  if (join.to != config_.rank) {
    return {Code::kInvalidArgument, "it joined rank " + std::to_string(join.to) +
                                        "; does something on the way send its connections elsewhere?"};
  }
  const auto peer = peers_.find(join.rank);
  const bool is_of_next = view_.job.is_elastic() && join.view != view_.number;
  const bool is_taken =
      !is_of_next && peer != peers_.end() && (peer->second.in != nullptr || !peer->second.broken.ok());
  if (join.rank >= config_.worker_count || join.rank == config_.rank || is_taken) {
    return {Code::kInvalidArgument,
            "it joined as rank " + std::to_string(join.rank) + ", which is taken or does not exist" + hint};
  }
  return {};
}

// --- Stalls, losses and the end.

void Channels::on_close(Connection& connection, const Status& why) {
  const auto found = lines_.find(&connection);
  if (has_ended_ || found == lines_.end()) return;
  const Line line = std::move(found->second);
  lines_.erase(found);
  if (line.peer == nullptr) {
    const std::string text = "refused a connection from " + connection.peer() + ": " + why.message();
    if (!why.ok()) refusals_.add(log_, Severity::kInfo, text, context_->loop.now_ms());
    return;
  }
  Peer& peer = *line.peer;
  if (peer.out == &connection) {
    peer.out = nullptr;
    peer.is_out_open = false;
  } else {
    peer.in = nullptr;
  }
  peer.broken = why;
  peer.broken_at = Clock::now();
  if (view_.job.is_elastic()) {  // the job goes on without it
    let_go(peer.rank, {Code::kWorkerLost, peer.name + " was lost: " + why.message()});
    return note_idle();
  }
  // Only this worker knows that its peer broke the protocol. Whether it lives, the coordinator finds out.
  if (why.code() != Code::kInternal) {
    callbacks_.on_failure({Code::kWorkerLost, peer.name + " was lost: " + why.message()});
  }
}

Status Channels::check(Clock::time_point now) {
  std::map<uint32_t, Status> stuck;
  for (auto& [rank, peer] : peers_) {
    if (peer.is_idle()) continue;
    if (!peer.broken.ok() && now - peer.broken_at >= kGrace) {
      return {Code::kWorkerLost, peer.name + " was lost: " + peer.broken.message() + ", in a connection for channels"};
    }
    std::optional<std::string> late = peer.receiver.find_late(now, patience_);
    if (!late.has_value()) late = peer.sender.find_late(now, patience_);
    if (late.has_value()) {
      const Status why(Code::kRoundTimeout,
                       config_.own_name + ": " + *late + "; is it stuck, or does it run another program?");
      if (!view_.job.is_elastic()) return why;
      stuck[rank] = why;
    }
  }
  for (const auto& [rank, why] : stuck) let_go(rank, why);
  return {};
}

void Channels::limit_patience(milliseconds most) {
  patience_ = {std::min(patience_.first, most), std::min(patience_.later, most), true};
}

void Channels::stop_listening() {
  has_ended_ = true;
  listener_->stop();
}

void Channels::end_in_order() {
  stop_listening();
  for (const auto& [connection, line] : lines_) line.connection->close();
}

// First the network lets go of the program's memory, then the program gets it back.
void Channels::fail(const Status& why, const Status& word) {
  inbox_.close(why);
  stop_listening();
  for (const auto& [connection, line] : lines_) {
    if (word.ok()) {
      line.connection->close();
    } else {
      line.connection->close_with(OutFrame::control(FrameType::kFault, encode(word)));
    }
  }
  for (auto& [rank, peer] : peers_) {
    peer.sender.give_up(why);
    peer.receiver.give_up(why);
  }
  refuse_inbox();
}

void Channels::refuse_inbox() {
  for (const auto& transfer : inbox_.take_all()) transfer->fail(inbox_.why_closed());
}

}  // namespace jaxhetero
