#include "xla_ffi/transport/trial.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr size_t kChunkBytes = size_t{256} << 10;  // the largest that the plan chooses by itself
constexpr uint64_t kQueuedChunks = 16;

// The two ends say when all that came before has come: a question and its answer.
OutFrame question() { return OutFrame::control(FrameType::kAsk, {}); }
OutFrame answer() { return OutFrame::control(FrameType::kState, {}); }

Status unexpected(const FrameHeader& header) {
  return {Code::kProtocol, "it sent a frame of type " + std::to_string(int(header.type)) + " and " +
                               std::to_string(header.payload_bytes) + " bytes in a trial"};
}

std::shared_ptr<FabricChoice> choice(const std::string& wanted, EventLog& log) {
  return std::make_shared<FabricChoice>(wanted, log);
}

}  // namespace

// --- The end that receives.

// Chunks go where the peer's earlier ones went: only their number counts.
class TrialServer::Owner final : public ConnectionOwner {
 public:
  void add(std::shared_ptr<TcpConnection> connection) {
    Connection* const key = connection.get();
    peers_.emplace(key, Peer{std::move(connection), {}});
  }

  void on_open(Connection&) override {}
  Status on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) override {
    if (header.type == FrameType::kAsk && header.payload_bytes == 0) return {};
    if (header.type != FrameType::kPush || header.payload_bytes > kChunkBytes) return unexpected(header);
    Bytes& memory = peers_.at(&connection).memory;
    memory.resize(header.payload_bytes);
    into = as_pieces(memory);
    return {};
  }
  Status on_frame(Connection& connection, const FrameHeader& header) override {
    if (header.type == FrameType::kAsk) connection.send(answer());
    return {};
  }
  Result<bool> on_lent(Connection&, const FrameHeader&, const std::shared_ptr<const std::byte>&) override {
    return true;
  }
  void on_close(Connection& connection, const Status&) override { peers_.erase(&connection); }

  void hang_up() {
    for (const auto& [key, peer] : std::exchange(peers_, {})) peer.connection->close();
  }

 private:
  struct Peer {
    std::shared_ptr<TcpConnection> connection;
    Bytes memory;
  };
  std::map<Connection*, Peer> peers_;
};

TrialServer::TrialServer(std::unique_ptr<EventLoop> loop, Bytes token)
    : loop_(std::move(loop)), context_(*loop_, std::move(token)), owner_(std::make_unique<Owner>()) {
  context_.shares_memory = false;
}

Result<std::unique_ptr<TrialServer>> TrialServer::start(const TcpAddress& address, Bytes token) {
  Result<std::unique_ptr<EventLoop>> loop = EventLoop::create();
  if (!loop.ok()) return loop.status();
  std::unique_ptr<TrialServer> self(new TrialServer(std::move(*loop), std::move(token)));
  self->context_.fabric = choice("", self->log_);
  Result<std::unique_ptr<TcpListener>> listener = TcpListener::bind(*self->loop_, address, "the trial");
  if (!listener.ok()) return listener.status();
  self->listener_ = std::move(*listener);
  const auto accept = [&server = *self](Fd socket, const TcpAddress& peer, std::shared_ptr<void> admission) {
    server.owner_->add(
        TcpConnection::accept(server.context_, std::move(socket), peer, *server.owner_, std::move(admission)));
  };
  if (Status status = self->listener_->start(accept); !status.ok()) return status;
  self->thread_ = std::thread([loop = self->loop_.get()] { loop->run(); });
  return self;
}

TrialServer::~TrialServer() {
  if (!thread_.joinable()) return;
  loop_->post([this] {
    listener_->stop();
    owner_->hang_up();
    loop_->stop();
  });
  thread_.join();
}

// --- The end that sends.

namespace {

// A first answer shows that the agreement on a fabric is over, and the second that all chunks have come.
class Sender final : public ConnectionOwner {
 public:
  Sender(TcpContext& context, EventLog& log, const TrialSettings& settings)
      : context_(context), log_(log), settings_(settings) {}

  // The offer of a fabric waits for the end of the turn, and the question follows it.
  void on_open(Connection& connection) override {
    static_cast<TcpConnection&>(connection).offer_carrier();
    context_.loop.at_end_of_turn(
        [this, &connection] { context_.loop.at_end_of_turn([&connection] { connection.send(question()); }); });
  }
  Status on_header(Connection&, const FrameHeader& header, std::vector<iovec>&) override {
    const bool is_answer = header.type == FrameType::kState && header.payload_bytes == 0;
    return is_answer ? Status() : unexpected(header);
  }
  Status on_frame(Connection& connection, const FrameHeader&) override {
    const auto now = EventLoop::Clock::now();
    if (begin_.has_value()) {
      const double seconds = std::chrono::duration<double>(now - *begin_).count();
      finish(TrialResult{provider_, static_cast<double>(sent_bytes_) / std::max(seconds, 1e-9)});
      return {};
    }
    if (const Status status = note_way(); !status.ok()) return status;
    begin_ = now;
    send_chunks(connection);
    return {};
  }
  void on_written(Connection& connection) override { send_chunks(connection); }
  void on_close(Connection&, const Status& why) override {
    finish(why.ok() ? Status(Code::kInternal, "it left") : why);
  }

  void finish(Result<TrialResult> result) {
    if (!result_.has_value()) result_ = std::move(result);
    context_.loop.stop();
  }
  [[nodiscard]] Result<TrialResult> result() const { return *result_; }

 private:
  Status note_way() {
    if (context_.fabric->providers().empty()) return {};
    if (const auto endpoint = context_.endpoint.lock(); endpoint && context_.counters->fabric_connection_count > 0) {
      provider_ = endpoint->provider();
      return {};
    }
    const std::optional<Event> why = log_.next(milliseconds(0));
    return {Code::kInternal, why.has_value() ? why->text : "bytes go over sockets, not over a fabric"};
  }

  void send_chunks(Connection& connection) {
    if (!begin_.has_value() || has_asked_) return;
    FrameHeader header;
    header.type = FrameType::kPush;
    while (connection.queued_frame_count() - connection.written_frame_count() < kQueuedChunks) {
      connection.send(OutFrame::of(header, *chunk_, chunk_));
      sent_bytes_ += chunk_->size();
    }
    if (EventLoop::Clock::now() - *begin_ < settings_.duration) return;
    has_asked_ = true;
    connection.send(question());
  }

  TcpContext& context_;
  EventLog& log_;
  const TrialSettings& settings_;
  const std::shared_ptr<const Bytes> chunk_ = std::make_shared<const Bytes>(kChunkBytes);
  std::optional<EventLoop::Clock::time_point> begin_;
  bool has_asked_ = false;
  uint64_t sent_bytes_ = 0;
  std::string provider_;
  std::optional<Result<TrialResult>> result_;
};

}  // namespace

Result<TrialResult> run_trial(const TcpAddress& server, const TrialSettings& settings) {
  Result<std::unique_ptr<EventLoop>> loop = EventLoop::create();
  if (!loop.ok()) return loop.status();
  EventLog log;
  TcpContext context(**loop, settings.token);
  context.source = settings.source;
  context.shares_memory = false;
  context.fabric = choice(settings.fabric, log);
  Sender sender(context, log, settings);
  const auto connection = TcpConnection::connect(context, server, sender, settings.patience);
  (*loop)->after(settings.duration + settings.patience,
                 [&sender] { sender.finish(Status(Code::kInternal, "no answer in time")); });
  (*loop)->run();
  connection->close();
  return sender.result();
}

}  // namespace jaxhetero
