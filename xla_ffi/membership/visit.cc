#include "xla_ffi/membership/visit.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/transport/connection.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/transport/tcp_context.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero {
namespace {

class Visitor final : public ConnectionOwner {
 public:
  explicit Visitor(EventLoop& loop) : loop_(loop) {}

  void on_open(Connection& connection) override { connection.send(OutFrame::control(FrameType::kAsk, {})); }

  Status on_header(Connection&, const FrameHeader& header, std::vector<iovec>& into) override {
    if (header.type == FrameType::kGoodbye) return {Code::kInternal, "the job has just ended"};
    if (header.type != FrameType::kState && header.type != FrameType::kFault) {
      return {Code::kProtocol, "it sent a frame of type " + std::to_string(int(header.type))};
    }
    payload_.resize(header.payload_bytes);
    into = as_pieces(payload_);
    return {};
  }

  Status on_frame(Connection&, const FrameHeader& header) override {
    if (header.type == FrameType::kFault) {
      finish(decode_fault(payload_));
      return {};
    }
    Result<JobState> state = decode_job_state(payload_);
    if (!state.ok()) return state.status();
    finish(std::move(state));
    return {};
  }

  void on_close(Connection&, const Status& why) override {
    finish(why.ok() ? Status(Code::kInternal, "it left") : why);
  }

  void finish(Result<JobState> result) {
    if (!result_.has_value()) result_ = std::move(result);
    loop_.stop();
  }

  [[nodiscard]] Result<JobState> result() const { return *result_; }

 private:
  EventLoop& loop_;
  Bytes payload_;
  std::optional<Result<JobState>> result_;
};

Result<JobState> visit_at(const TcpAddress& coordinator, const Bytes& token, bool encrypt,
                          std::chrono::milliseconds patience) {
  Result<std::shared_ptr<const CryptoLibrary>> crypto = CryptoLibrary::open_if(encrypt);
  if (!crypto.ok()) return crypto.status();
  Result<std::unique_ptr<EventLoop>> loop = EventLoop::create();
  if (!loop.ok()) return loop.status();
  TcpContext context(**loop, token);
  context.crypto = std::move(*crypto);
  Visitor visitor(**loop);
  const auto connection = TcpConnection::connect(context, coordinator, visitor, patience);
  (*loop)->after(2 * patience, [&visitor] { visitor.finish(Status(Code::kInternal, "no answer")); });
  (*loop)->run();
  connection->close();
  return visitor.result();
}

}  // namespace

Result<JobState> visit(const std::vector<TcpAddress>& coordinator, const Bytes& token, bool encrypt,
                       std::chrono::milliseconds patience) {
  Result<JobState> job = visit_at(coordinator.front(), token, encrypt, patience);
  for (size_t i = 1; i < coordinator.size() && job.status().code() == Code::kInternal; ++i) {
    job = visit_at(coordinator[i], token, encrypt, patience);
  }
  return job;
}

}  // namespace jaxhetero
