// Peers that speak our protocol and misbehave.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cc/job.h"
#include "tests/cc/loop_thread.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/membership/member.h"
#include "xla_ffi/transport/tcp_listener.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/worker/shard_plan.h"

namespace jaxhetero {

// A worker without a Communicator: it takes part in the start, and then does what a test says.
class FakeWorker final : public ConnectionOwner {
 public:
  FakeWorker(const Job& job, uint32_t rank, bool joins = true) : config_(job.worker_config(rank)), joins_(joins) {
    Registration registration;
    registration.role = Role::kWorker;
    registration.rank = static_cast<int32_t>(rank);
    registration.job = config_.job;
    registration.version = config_.version;
    registration.host_name = config_.host_name;
    member_ =
        std::make_unique<Member>(context_, *resolve_all(config_.coordinator), registration, log_, config_.timeout);
    thread_.call([&] {
      member_->start(kPatience, {.on_view = [this](const View& view) { join(view); },
                                 .on_halt = {},
                                 .on_forget = {},
                                 .on_leaving = {},
                                 .on_goodbye = {},
                                 .on_failure = [this](const Status& why) { note_end(why); }});
    });
  }
  ~FakeWorker() override { thread_.stop(); }

  void wait_ready() { ASSERT_EQ(ready_.get_future().wait_for(kPatience), std::future_status::ready); }

  void send(OutFrame frame, size_t reducer = 0) {
    thread_.call([&] { connections_.at(reducer)->send(std::move(frame)); });
  }
  // To every reducer.
  void describe(const TestRound& round) {
    FrameHeader header;
    header.op = round.op;
    const OpDescription description{round.spec(), "the fake's op"};
    for (size_t reducer = 0; reducer < connections_.size(); ++reducer) {
      send(OutFrame::control(FrameType::kDescribe, encode(description), header), reducer);
    }
  }
  // Joins now, if constructed with joins = false.
  void join_all() {
    thread_.call([&] {
      for (const auto& connection : connections_) send_join(*connection);
    });
  }
  uint64_t job_id() {
    return thread_.call([this] { return job_id_; });
  }
  // Connects to another worker, as if to send messages, and joins it. The number of the connection, for send().
  size_t connect_to_worker(uint32_t rank) {
    return thread_.call([=, this] {
      const View::Endpoint& endpoint = view_.worker_endpoints.at(rank);
      connections_.push_back(
          TcpConnection::connect(context_, *resolve(endpoint.address, endpoint.port), *this, kPatience));
      return connections_.size() - 1;
    });
  }
  // Once the connection is open.
  void send_when_open(OutFrame frame, size_t connection) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (!thread_.call([=, this] { return open_.contains(connections_.at(connection).get()); })) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      std::this_thread::sleep_for(milliseconds(1));
    }
    send(std::move(frame), connection);
  }
  // Whether a worker gives it so many credits before the patience ends.
  bool wait_credits(size_t count) {
    std::unique_lock lock(results_mutex_);
    return results_changed_.wait_for(lock, kPatience, [&] { return credits_.size() >= count; });
  }
  std::vector<FrameHeader> credits() {
    const std::lock_guard lock(results_mutex_);
    return credits_;
  }
  // Reports that it has completed so many rounds of the op, and is idle.
  void say_still(uint64_t op, uint64_t completed_count) {
    thread_.call(
        [&] { member_->send(OutFrame::control(FrameType::kStill, encode(Progress{0, {{op, completed_count}}}))); });
  }
  // As when the process is killed.
  void vanish() {
    thread_.call([&] {
      for (const auto& connection : connections_) connection->close();
      member_->stop();
    });
  }
  // Whether `count` totals of that reducer arrive before the patience ends.
  bool wait_results(size_t count, size_t reducer, milliseconds patience = kPatience) {
    std::unique_lock lock(results_mutex_);
    return results_changed_.wait_for(lock, patience, [&] { return result_counts_[reducer] >= count; });
  }
  // The first fault that a reducer told it, or how a connection ended without one.
  Status wait_end() {
    std::future<Status> end = end_.get_future();
    if (end.wait_for(kPatience) == std::future_status::ready) return end.get();
    return {};
  }

 private:
  void join(const View& view) {
    view_ = view;
    job_id_ = view.job_id;
    plan_ = ShardPlan(std::vector<uint32_t>(view.reducers.size(), 1)).digest();
    for (const View::Reducer& reducer : view.reducers) {
      connections_.push_back(
          TcpConnection::connect(context_, *resolve(reducer.address, reducer.port), *this, kPatience));
    }
  }
  void on_open(Connection& connection) override {
    if (joins_) send_join(connection);
    open_.insert(&connection);
    if (open_.size() == view_.reducers.size()) ready_.set_value();
  }
  Status on_header(Connection&, const FrameHeader& header, std::vector<iovec>& into) override {
    payload_.resize(header.payload_bytes);
    into = as_pieces(payload_);
    return {};
  }
  Status on_frame(Connection& connection, const FrameHeader& header) override {
    if (header.type == FrameType::kFault) note_end(decode_fault(payload_));
    if (header.type == FrameType::kResult) {
      const auto from = std::ranges::find_if(connections_, [&](const auto& c) { return c.get() == &connection; });
      const std::lock_guard lock(results_mutex_);
      ++result_counts_[static_cast<size_t>(from - connections_.begin())];
      results_changed_.notify_all();
    }
    if (header.type == FrameType::kCredit) {
      const std::lock_guard lock(results_mutex_);
      credits_.push_back(header);
      results_changed_.notify_all();
    }
    return {};
  }
  void on_close(Connection&, const Status& why) override { note_end(why); }

  void send_join(Connection& connection) {
    const auto at = std::ranges::find_if(connections_, [&](const auto& each) { return each.get() == &connection; });
    const auto number = static_cast<size_t>(at - connections_.begin());  // of a reducer; and it joins rank 0 alone
    const uint32_t to = number < view_.reducers.size() ? view_.reducers[number].number : 0;
    connection.send(OutFrame::control(FrameType::kJoin, encode(Join{job_id_, config_.rank, 0, plan_, to})));
  }
  void note_end(const Status& why) {
    if (!std::exchange(has_ended_, true)) end_.set_value(why);
  }

  const CommunicatorConfig config_;
  const bool joins_;
  LoopThread thread_;
  TcpContext context_{thread_.loop(), config_.token};
  EventLog log_;
  std::unique_ptr<Member> member_;
  View view_;
  uint64_t job_id_ = 0;
  uint64_t plan_ = 0;
  std::set<const Connection*> open_;
  bool has_ended_ = false;
  Bytes payload_;
  std::promise<void> ready_;
  std::promise<Status> end_;
  std::vector<std::shared_ptr<TcpConnection>> connections_;
  std::mutex results_mutex_;
  std::condition_variable results_changed_;
  std::map<size_t, size_t> result_counts_;  // by reducer
  std::vector<FrameHeader> credits_;
};

inline const auto kSomeBytes = std::make_shared<const Bytes>(100000);

// Of the whole bucket as one chunk.
inline FrameHeader push_header(const TestRound& round) {
  FrameHeader header;
  header.type = FrameType::kPush;
  header.op = round.op;
  header.count = static_cast<uint32_t>(round.spec().total_count);
  header.last = true;
  return header;
}

inline OutFrame push_frame(const FrameHeader& header, size_t bytes) {
  return OutFrame::of(header, std::span(*kSomeBytes).first(bytes), kSomeBytes);
}

// A reducer that receives pushes, and answers as a test says.
class FakeReducer final : public ConnectionOwner {
 public:
  explicit FakeReducer(const Job& job) : config_(job.reducer_config(0)) {
    listener_ = std::move(*TcpListener::bind(thread_.loop(), *resolve("127.0.0.1", 0), "a test"));
    Registration registration;
    registration.role = Role::kReducer;
    registration.version = config_.version;
    registration.host_name = config_.host_name;
    registration.port = listener_->port();
    member_ =
        std::make_unique<Member>(context_, *resolve_all(config_.coordinator), registration, log_, config_.timeout);
    thread_.call([&] {
      const Status status =
          listener_->start([this](Fd socket, const TcpAddress& peer, std::shared_ptr<void> admission) {
            worker_ = TcpConnection::accept(context_, std::move(socket), peer, *this, std::move(admission));
          });
      EXPECT_TRUE(status.ok());
      member_->start(kPatience,
                     {.on_view = [this](const View&) { member_->send(OutFrame::control(FrameType::kReady, {})); },
                      .on_halt = {},
                      .on_forget = {},
                      .on_leaving = {},
                      .on_goodbye = {},
                      .on_failure = {}});
    });
  }
  ~FakeReducer() override { thread_.stop(); }

  // On the loop's thread, when a push has arrived.
  std::function<void(Connection&, const FrameHeader&)> on_push_;
  // Likewise, when the push's payload is lent by the worker. If this is not set, the payload is copied.
  std::function<void(const FrameHeader&, std::shared_ptr<const std::byte>)> on_lent_;

  void send(OutFrame frame) {
    thread_.call([&] { worker_->send(std::move(frame)); });
  }

 private:
  void on_open(Connection&) override {}
  Status on_header(Connection&, const FrameHeader& header, std::vector<iovec>& into) override {
    payload_.resize(header.payload_bytes);
    into = as_pieces(payload_);
    return {};
  }
  Status on_frame(Connection& connection, const FrameHeader& header) override {
    if (header.type == FrameType::kPush && on_push_) on_push_(connection, header);
    return {};
  }
  Result<bool> on_lent(Connection&, const FrameHeader& header,
                       const std::shared_ptr<const std::byte>& payload) override {
    if (on_lent_) on_lent_(header, payload);
    return on_lent_ != nullptr;
  }
  void on_close(Connection&, const Status&) override {}

  const ReducerServerConfig config_;
  LoopThread thread_;
  TcpContext context_{thread_.loop(), config_.token};
  EventLog log_;
  std::unique_ptr<TcpListener> listener_;
  std::unique_ptr<Member> member_;
  std::shared_ptr<TcpConnection> worker_;
  Bytes payload_;
};

// Rank 1 of 3 is a fake one.
class FakeWorkerTest : public testing::Test {
 protected:
  void start(const Shape& shape = {.workers = 3, .reducers = 2}, bool fake_joins = true) {
    job_ = std::make_unique<Job>(shape);
    job_->add_reducers(shape.reducers);
    job_->add_worker(0);
    job_->add_worker(2);
    fake_ = std::make_unique<FakeWorker>(*job_, 1, fake_joins);
    for (uint32_t rank : {0u, 2u}) {
      const Status ready = Job::wait_ready(*job_->workers[rank]);
      ASSERT_TRUE(ready.ok()) << ready.message();
    }
    ASSERT_NO_FATAL_FAILURE(fake_->wait_ready());
  }
  // The other two wait in a round.
  void begin(const TestRound& round) {
    for (uint32_t rank : {0u, 2u}) parts_.emplace_back(*job_->workers[rank], round, rank);
  }
  // Everybody fails with `words` in the error; workers that wait in a round also with `more`.
  void expect_failure(Code code, const std::vector<std::string>& words, const std::vector<std::string>& more = {}) {
    for (Part& part : parts_) {
      const Status status = part.wait();
      EXPECT_TRUE(failed_with(status, code, words));
      EXPECT_TRUE(failed_with(status, code, more));
    }
    for (const auto& reducer : job_->reducers) EXPECT_TRUE(failed_with(Job::wait_end(*reducer), code, words));
    for (uint32_t rank : {0u, 2u}) {
      EXPECT_TRUE(failed_with(job_->workers[rank]->shutdown(kPatience), code, words));
    }
  }

  std::unique_ptr<Job> job_;
  std::unique_ptr<FakeWorker> fake_;
  std::vector<Part> parts_;
};

}  // namespace jaxhetero
