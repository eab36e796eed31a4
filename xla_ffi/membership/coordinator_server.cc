#include "xla_ffi/membership/coordinator_server.h"

#include <utility>
#include <vector>

#include "xla_ffi/transport/tcp_address.h"

namespace jaxhetero {

CoordinatorServer::~CoordinatorServer() {
  stop();
  if (thread_.joinable()) thread_.join();
}

Status CoordinatorServer::start() {
  Result<std::vector<TcpAddress>> addresses = resolve_all(config_.coordinator);
  if (!addresses.ok()) return addresses.status();
  Result<std::shared_ptr<const CryptoLibrary>> crypto = CryptoLibrary::open_if(config_.encrypt);
  if (!crypto.ok()) return crypto.status();
  Result<std::unique_ptr<EventLoop>> loop = EventLoop::create();
  if (!loop.ok()) return loop.status();
  loop_ = std::move(*loop);
  context_ = std::make_unique<TcpContext>(*loop_, config_.token);
  context_->crypto = std::move(*crypto);
  coordinator_ =
      std::make_unique<ElasticCoordinator>(*context_, config_.version, log_, config_.lost_after, config_.rejoin_timeout,
                                           [this](const Status& how) { finish(how); });
  if (Status status = coordinator_->write_history(config_.history_file); !status.ok()) return status;
  if (Status status = coordinator_->bind(*addresses); !status.ok()) return status;
  loop_->post([this] {
    // A process counts as lost after four fifths of this time: see Heartbeat.
    const Status status = coordinator_->start(config_.start_timeout, config_.lost_after * 5 / 4);
    if (!status.ok()) finish(status);
  });
  thread_ = std::thread([this] {
    loop_->run();
    coordinator_.reset();
  });
  return {};
}

void CoordinatorServer::finish(const Status& how) {
  {
    const std::lock_guard lock(mutex_);
    if (!result_.has_value()) result_ = how;
  }
  ended_.notify_all();
  loop_->stop();
}

std::optional<Status> CoordinatorServer::wait(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  ended_.wait_for(lock, patience, [this] { return result_.has_value(); });
  return result_;
}

void CoordinatorServer::stop() {
  if (thread_.joinable()) loop_->post([this] { finish({}); });
}

}  // namespace jaxhetero
