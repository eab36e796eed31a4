// What the others learn when one of them fails, or does what it should not.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <future>
#include <latch>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cc/job.h"
#include "tests/cc/loop_thread.h"
#include "xla_ffi/enrolment.h"
#include "xla_ffi/shard_plan.h"
#include "xla_ffi/tcp_listener.h"

namespace jaxhetero {
namespace {

// --- Peers that are not what they should be: our frames, but another will.

// A worker without a Communicator: it takes part in the start, and then does what a test wants.
class FakeWorker final : public ConnectionOwner {
 public:
  FakeWorker(const Job& job, uint32_t rank, bool joins = true) : config_(job.worker_config(rank)), joins_(joins) {
    Registration registration;
    registration.role = Role::kWorker;
    registration.rank = static_cast<int32_t>(rank);
    registration.job = config_.job;
    registration.version = config_.version;
    registration.host_name = config_.host_name;
    enrolment_ =
        std::make_unique<Enrolment>(context_, *resolve(config_.coordinator), registration, log_, config_.timeout);
    thread_.call([&] {
      enrolment_->start(kPatience, {.on_members = [this](const Members& members) { join(members); },
                                    .on_halt = {},
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
  // For one who did not join by himself: now.
  void join_all() {
    thread_.call([&] {
      for (const auto& connection : connections_) send_join(*connection);
    });
  }
  uint64_t job_id() {
    return thread_.call([this] { return job_id_; });
  }
  // As when the process is killed.
  void vanish() {
    thread_.call([&] {
      for (const auto& connection : connections_) connection->close();
      enrolment_->stop();
    });
  }
  // Whether so many totals of that reducer are here before the patience ends.
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
  void join(const Members& members) {
    job_id_ = members.job_id;
    plan_ = ShardPlan(std::vector<uint32_t>(members.reducers.size(), 1)).digest();
    for (const Members::Reducer& reducer : members.reducers) {
      connections_.push_back(
          TcpConnection::connect(context_, *resolve(reducer.address, reducer.port), *this, kPatience));
    }
  }
  void on_open(Connection& connection) override {
    if (joins_) send_join(connection);
    if (++open_count_ == connections_.size()) ready_.set_value();
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
    return {};
  }
  void on_close(Connection&, const Status& why) override { note_end(why); }

  void send_join(Connection& connection) {
    connection.send(OutFrame::control(FrameType::kJoin, encode(Join{job_id_, config_.rank, 0, plan_})));
  }
  void note_end(const Status& why) {
    if (!std::exchange(has_ended_, true)) end_.set_value(why);
  }

  const CommunicatorConfig config_;
  const bool joins_;
  LoopThread thread_;
  TcpContext context_{thread_.loop(), config_.token};
  EventLog log_;
  std::unique_ptr<Enrolment> enrolment_;
  uint64_t job_id_ = 0;
  uint64_t plan_ = 0;
  size_t open_count_ = 0;
  bool has_ended_ = false;
  Bytes payload_;
  std::promise<void> ready_;
  std::promise<Status> end_;
  std::vector<std::shared_ptr<TcpConnection>> connections_;
  std::mutex results_mutex_;
  std::condition_variable results_changed_;
  std::map<size_t, size_t> result_counts_;  // by reducer
};

const auto kSomeBytes = std::make_shared<const Bytes>(100000);

FrameHeader push_header(const TestRound& round, uint32_t rank) {
  FrameHeader header;
  header.type = FrameType::kPush;
  header.rank = rank;
  header.op = round.op;
  header.spec = round.spec();
  header.count = static_cast<uint32_t>(header.spec.total_count);
  header.last = true;
  return header;
}

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
  // With these words for all, and those for the workers that wait in a round.
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

TEST_F(FakeWorkerTest, IsNamedToAllWhenItIsKilled) {
  ASSERT_NO_FATAL_FAILURE(start());
  begin({});
  fake_->vanish();
  expect_failure(Code::kWorkerLost, {"rank 1 (host host-1) was lost"},
                 {"running: test op 1 round 0", "last completed: none"});
}

TEST_F(FakeWorkerTest, IsNamedToAllWhenItIsKilledBetweenRounds) {
  ASSERT_NO_FATAL_FAILURE(start());
  fake_->vanish();
  expect_failure(Code::kWorkerLost, {"rank 1 (host host-1) was lost"});
}

// Much is on its way in both directions at that moment; the cause must not drown in what it causes.
TEST_F(FakeWorkerTest, IsNamedToAllWhenItIsKilledInTheMiddleOfMuch) {
  ASSERT_NO_FATAL_FAILURE(start({.workers = 3, .reducers = 2, .chunk_bytes = 1 << 22, .window_chunks = 8}));
  for (uint64_t op = 0; op < 2; ++op) begin({.op = op, .leaf_counts = {6 << 20}});
  fake_->vanish();
  expect_failure(Code::kWorkerLost, {"rank 1 (host host-1) was lost"});
}

TEST_F(FakeWorkerTest, IsNamedToAllWhenItIsLate) {
  ASSERT_NO_FATAL_FAILURE(start({.workers = 3, .reducers = 2, .start_timeout = kShort, .timeout = milliseconds(1000)}));
  begin({});
  expect_failure(Code::kRoundTimeout, {"still waiting for rank 1 (host host-1)", "test op 1 round 0", "no progress"});
  std::optional<Event> event;
  while ((event = job_->workers[0]->next_event(milliseconds(0))) && event->severity != Severity::kWarning) {
  }
  ASSERT_TRUE(event.has_value());
  EXPECT_TRUE(has(event->text, "waiting for rank 1 (host host-1)")) << event->text;
}

// The shards of a round are pushed in step, so that no interface is done before the others: while the totals of one
// reducer fail to come, fewer than two windows of another's do.
TEST_F(FakeWorkerTest, IsNotRunAwayFrom) {
  const Shape shape{.workers = 3, .reducers = 2, .chunk_bytes = 1024, .window_chunks = 3};
  ASSERT_NO_FATAL_FAILURE(start(shape));
  const TestRound round{.leaf_counts = {8192}};
  begin(round);
  const std::vector<Shard> shards = ShardPlan({1, 1}).cut(round.op, 8192, 4);
  ASSERT_EQ(shards.size(), 2);
  auto push = [&, next = std::map<uint32_t, uint64_t>()](const Shard& shard) mutable {
    FrameHeader header = push_header(round, 1);
    header.offset = shard.begin + 256 * next[shard.reducer]++;
    header.count = 256;
    header.last = header.offset + header.count == shard.begin + shard.count;
    header.payload_bytes = 1024;
    fake_->send(OutFrame::of(header, std::span(*kSomeBytes).first(1024), kSomeBytes), shard.reducer);
  };
  for (uint32_t reducer : {0u, 1u}) {
    FrameHeader header;
    header.op = round.op;
    fake_->send(OutFrame::control(FrameType::kDescribe, bytes_of("the fake's op"), header), reducer);
  }
  const size_t most = 2 * shape.window_chunks;
  for (size_t chunk = 1; chunk <= most; ++chunk) {
    push(shards[0]);
    ASSERT_TRUE(fake_->wait_results(chunk, shards[0].reducer));
  }
  push(shards[0]);
  EXPECT_FALSE(fake_->wait_results(most + 1, shards[0].reducer, milliseconds(300)));
  push(shards[1]);
  EXPECT_TRUE(fake_->wait_results(most + 1, shards[0].reducer));
}

// The job may fail while somebody is still on his way in. He shall hear why, and not be left with a closed connection.
TEST_F(FakeWorkerTest, IsToldWhatFailedBeforeItJoined) {
  ASSERT_NO_FATAL_FAILURE(start({.workers = 3, .reducers = 2}, /*fake_joins=*/false));
  begin({});
  job_->workers[2].reset();
  EXPECT_TRUE(failed_with(parts_[0].wait(), Code::kWorkerLost, {"rank 2 (host host-2)"}));
  fake_->join_all();
  EXPECT_TRUE(failed_with(fake_->wait_end(), Code::kWorkerLost, {"rank 2 (host host-2)"}));
}

// Who has the token but does not belong here reads why, as does who looks after the reducer; the others go on.
struct Stray {
  Join join;  // its job_id is added to the right one
  Code code;
  std::string reason;
};

class StrayWorkerTest : public FakeWorkerTest, public testing::WithParamInterface<Stray> {};

TEST_P(StrayWorkerTest, IsRefusedAndToldWhy) {
  ASSERT_NO_FATAL_FAILURE(start({.workers = 3, .reducers = 2}, /*fake_joins=*/false));
  const auto& [stray, code, reason] = GetParam();
  Join join = stray;
  join.job_id += fake_->job_id();
  fake_->send(OutFrame::control(FrameType::kJoin, encode(join)));
  EXPECT_TRUE(failed_with(fake_->wait_end(), code, {"refused by a reducer", reason}));
  std::string logged;
  const auto is_it = [&](const Event& event) { return has(logged = event.text, reason); };
  for (const auto& reducer : job_->reducers) {
    std::optional<Event> event;
    while ((event = reducer->next_event(milliseconds(100))) && !is_it(*event)) {
    }
    if (event.has_value()) break;
  }
  EXPECT_TRUE(has(logged, "refused 127.0.0.1:")) << logged;
  for (const auto& worker : job_->workers) {
    if (worker) {
      EXPECT_TRUE(worker->wait_ready(milliseconds(0)).value_or(Status(Code::kInternal, "?")).ok());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, StrayWorkerTest,
    testing::Values(Stray{{1, 1}, Code::kInvalidArgument, "it belongs to another job"},
                    Stray{{0, 0}, Code::kInvalidArgument, "it joined as rank 0, which is taken"},
                    Stray{{0, 3}, Code::kInvalidArgument, "it joined as rank 3, which is taken or does not"},
                    Stray{{0, 1, 0, 7}, Code::kVersionMismatch, "its plan, which reducer sums what, is not that of"}));

// What a worker does against the protocol ends it, and its peers learn that it was the one.
struct Misdeed {
  std::string name;
  std::function<OutFrame(const TestRound&)> frame;
  std::string word;
};

class MisdeedTest : public FakeWorkerTest, public testing::WithParamInterface<Misdeed> {};

TEST_P(MisdeedTest, IsBlamedOnWhoDidIt) {
  ASSERT_NO_FATAL_FAILURE(start());
  const TestRound round;
  begin(round);
  for (size_t reducer : {0, 1}) fake_->send(GetParam().frame(round), reducer);
  expect_failure(Code::kWorkerLost, {"rank 1 (host host-1) was lost: ", GetParam().word});
  EXPECT_FALSE(fake_->wait_end().ok());
}

OutFrame push_frame(const FrameHeader& header, size_t bytes) {
  return OutFrame::of(header, std::span(*kSomeBytes).first(bytes), kSomeBytes);
}

INSTANTIATE_TEST_SUITE_P(All, MisdeedTest,
                         testing::Values(Misdeed{"pushes_what_it_never_described",
                                                 [](const TestRound& round) {
                                                   TestRound other = round;
                                                   other.op = 99;
                                                   other.leaf_counts = {10};
                                                   return push_frame(push_header(other, 1), 40);
                                                 },
                                                 "never described"},
                                         Misdeed{"pushes_more_than_a_chunk",
                                                 [](const TestRound& round) {
                                                   FrameHeader header =
                                                       push_header({.op = 99, .leaf_counts = {1000}}, 1);
                                                   header.op = round.op;
                                                   return push_frame(header, 4000);
                                                 },
                                                 ""},
                                         Misdeed{"sends_a_result",
                                                 [](const TestRound& round) {
                                                   FrameHeader header = push_header(round, 1);
                                                   header.type = FrameType::kResult;
                                                   return push_frame(header, round.bytes());
                                                 },
                                                 "it sent a frame of type 8"},
                                         Misdeed{"joins_twice",
                                                 [](const TestRound&) {
                                                   return OutFrame::control(FrameType::kJoin, encode(Join{0, 2, 0}));
                                                 },
                                                 "it joined twice"},
                                         Misdeed{"sends_a_broken_frame",
                                                 [](const TestRound&) {
                                                   FrameHeader header;
                                                   header.type = static_cast<FrameType>(77);
                                                   return OutFrame::of(header, {}, nullptr);
                                                 },
                                                 "unknown type 77"}),
                         [](const auto& info) { return info.param.name; });

// A reducer that takes what workers push and answers what a test wants.
class FakeReducer final : public ConnectionOwner {
 public:
  explicit FakeReducer(const Job& job) : config_(job.reducer_config(0)) {
    listener_ = std::move(*TcpListener::bind(thread_.loop(), *resolve("127.0.0.1", 0), "a test"));
    Registration registration;
    registration.role = Role::kReducer;
    registration.version = config_.version;
    registration.host_name = config_.host_name;
    registration.port = listener_->port();
    enrolment_ =
        std::make_unique<Enrolment>(context_, *resolve(config_.coordinator), registration, log_, config_.timeout);
    thread_.call([&] {
      const Status status =
          listener_->start([this](Fd socket, const TcpAddress& peer, std::shared_ptr<void> admission) {
            worker_ = TcpConnection::accept(context_, std::move(socket), peer, *this, std::move(admission));
          });
      EXPECT_TRUE(status.ok());
      enrolment_->start(
          kPatience,
          {.on_members = [this](const Members&) { enrolment_->send(OutFrame::control(FrameType::kReady, {})); },
           .on_halt = {},
           .on_leaving = {},
           .on_goodbye = {},
           .on_failure = {}});
    });
  }
  ~FakeReducer() override { thread_.stop(); }

  // On the loop's thread, when a push has arrived.
  std::function<void(Connection&, const FrameHeader&)> on_push_;

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
  void on_close(Connection&, const Status&) override {}

  const ReducerServerConfig config_;
  LoopThread thread_;
  TcpContext context_{thread_.loop(), config_.token};
  EventLog log_;
  std::unique_ptr<TcpListener> listener_;
  std::unique_ptr<Enrolment> enrolment_;
  std::shared_ptr<TcpConnection> worker_;
  Bytes payload_;
};

struct Lie {
  std::string name;
  std::function<void(FrameHeader&)> change;  // of the right answer to the first chunk
};

class LieTest : public testing::TestWithParam<Lie> {};

// A result that nobody asked for must not be written anywhere: the memory belongs to somebody else by now.
TEST_P(LieTest, IsNotBelieved) {
  Job job({.workers = 1, .reducers = 1, .timeout = kShort});
  FakeReducer reducer(job);
  std::atomic<bool> answered = false;
  reducer.on_push_ = [&](Connection& connection, const FrameHeader& push) {
    if (answered.exchange(true)) return;
    FrameHeader header = push;
    header.type = FrameType::kResult;
    GetParam().change(header);
    connection.send(push_frame(header, header.payload_bytes));
  };
  Communicator& worker = job.add_worker(0);
  ASSERT_TRUE(Job::wait_ready(worker).ok());
  const TestRound round{.leaf_counts = {200, 20000}};
  Part part(worker, round, 0);
  EXPECT_TRUE(failed_with(part.wait(), Code::kReducerLost, {"reducer 0 (host reducer-host-0, 127.0.0.1:"}));
  EXPECT_TRUE(part.output() == Bytes(round.bytes(), std::byte{0xee}));
}

INSTANTIATE_TEST_SUITE_P(All, LieTest,
                         testing::Values(Lie{"another_op", [](FrameHeader& h) { h.op = 99; }},
                                         Lie{"another_round", [](FrameHeader& h) { h.round = 1; }},
                                         Lie{"another_chunk", [](FrameHeader& h) { h.offset += h.count; }},
                                         Lie{"a_chunk_before", [](FrameHeader& h) { h.offset = 1; }},
                                         Lie{"too_short",
                                             [](FrameHeader& h) {
                                               h.count -= 1;
                                               h.payload_bytes -= 4;
                                             }},
                                         Lie{"too_long",
                                             [](FrameHeader& h) {
                                               h.count += 1;
                                               h.payload_bytes += 4;
                                             }},
                                         Lie{"empty",
                                             [](FrameHeader& h) {
                                               h.count = 0;
                                               h.payload_bytes = 0;
                                             }},
                                         Lie{"last_already", [](FrameHeader& h) { h.last = true; }},
                                         Lie{"larger_bucket", [](FrameHeader& h) { h.spec.total_count += 1; }},
                                         Lie{"other_dtype", [](FrameHeader& h) { h.spec.dtype = DType::kI32; }},
                                         Lie{"broadcast", [](FrameHeader& h) { h.spec.kind = Kind::kBroadcast; }},
                                         Lie{"a_push", [](FrameHeader& h) { h.type = FrameType::kPush; }},
                                         Lie{"broken", [](FrameHeader& h) { h.type = static_cast<FrameType>(0); }}),
                         [](const auto& info) { return info.param.name; });

TEST(FakeReducerTest, MayNotAnswerTwice) {
  Job job({.workers = 1, .reducers = 1});
  FakeReducer reducer(job);
  reducer.on_push_ = [&](Connection& connection, const FrameHeader& push) {
    FrameHeader header = push;
    header.type = FrameType::kResult;
    for (int twice = 0; twice < 2; ++twice) connection.send(push_frame(header, header.payload_bytes));
  };
  Communicator& worker = job.add_worker(0);
  ASSERT_TRUE(Job::wait_ready(worker).ok());
  Part first(worker, {.op = 1, .leaf_counts = {10}}, 0);
  EXPECT_TRUE(first.wait().ok());
  Part second(worker, {.op = 2, .leaf_counts = {10}}, 0);
  EXPECT_TRUE(failed_with(second.wait(), Code::kReducerLost, {"reducer 0 "}));
}

TEST(FakeReducerTest, CannotMakeAFailureLookLikeSuccess) {
  Job job({.workers = 1, .reducers = 1});
  FakeReducer reducer(job);
  Communicator& worker = job.add_worker(0);
  ASSERT_TRUE(Job::wait_ready(worker).ok());
  Part part(worker, {}, 0);
  reducer.send(OutFrame::control(FrameType::kLate, bytes_of("rank 9\x1b[2J\n")));  // of op 0, which does not run
  reducer.send(OutFrame::control(FrameType::kFault, Bytes(1)));                    // with the code of "ok"
  EXPECT_TRUE(failed_with(part.wait(), Code::kProtocol, {"malformed fault"}));
}

TEST(FakeReducerTest, IsNamedWithTheRoundsThatItLeaves) {
  Job job({.workers = 1, .reducers = 1});
  FakeReducer reducer(job);
  Communicator& worker = job.add_worker(0);
  ASSERT_TRUE(Job::wait_ready(worker).ok());
  std::latch pushed(2);
  reducer.on_push_ = [&](Connection& connection, const FrameHeader&) {
    pushed.count_down();
    if (pushed.try_wait()) connection.close();
  };
  Part first(worker, {.op = 1, .leaf_counts = {10}}, 0);
  Part second(worker, {.op = 2, .leaf_counts = {10}}, 0);
  const Status status = first.wait();
  EXPECT_TRUE(failed_with(status, Code::kReducerLost,
                          {"reducer 0 (host reducer-host-0", "it closed the connection", "running: test op 1 round 0",
                           "running: test op 2 round 0"}));
  EXPECT_EQ(second.wait().message(), status.message());
}

TEST(FakeReducerTest, IsNamedWhenItSaysNothing) {
  Job job({.workers = 1, .reducers = 1, .start_timeout = kShort, .timeout = kShort});
  FakeReducer reducer(job);
  Communicator& worker = job.add_worker(0);
  ASSERT_TRUE(Job::wait_ready(worker).ok());
  Part part(worker, {}, 0);
  EXPECT_TRUE(failed_with(part.wait(), Code::kRoundTimeout,
                          {"rank 0 (host host-0)", "no word from reducer 0 (host reducer-host-0"}));
}

// --- The ways to fail.

TEST(Failure, OfDisagreeingWorkersIsToldToAll) {
  Job job({.workers = 3, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  job.expect_works();
  std::vector<Part> parts;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    const TestRound round{.dtype = rank == 1 ? DType::kBF16 : DType::kF32};
    parts.emplace_back(*job.workers[rank], round, rank);
  }
  for (Part& part : parts) {
    EXPECT_TRUE(failed_with(
        part.wait(), Code::kMismatch,
        {"op 1 round 1", "rank 1 (host host-1) sent sum of bfloat16", "sent sum of float32[1000] (test op 1)"}));
  }
  for (const auto& reducer : job.reducers) EXPECT_EQ(Job::wait_end(*reducer).code(), Code::kMismatch);
  for (const auto& worker : job.workers) EXPECT_EQ(worker->shutdown(kPatience).code(), Code::kMismatch);
}

TEST(Failure, OfAWorkerThatIsDestroyedIsToldToAll) {
  for (uint32_t reducers : {0u, 2u}) {
    Job job({.workers = 3, .reducers = reducers});
    ASSERT_NO_FATAL_FAILURE(job.start());
    job.expect_works();
    std::vector<Part> parts;
    for (uint32_t rank : {0u, 2u}) parts.emplace_back(*job.workers[rank], TestRound{}, rank);
    job.workers[1].reset();
    for (Part& part : parts) EXPECT_TRUE(failed_with(part.wait(), Code::kWorkerLost, {"rank 1 (host host-1)"}));
    for (const auto& reducer : job.reducers) EXPECT_EQ(Job::wait_end(*reducer).code(), Code::kWorkerLost);
  }
}

TEST(Failure, OfAWorkerThatLeavesInOrderTooEarlyIsToldToAll) {
  Job job({.workers = 3, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  EXPECT_TRUE(job.workers[1]->shutdown(kPatience).ok());
  std::vector<Part> parts;
  for (uint32_t rank : {0u, 2u}) parts.emplace_back(*job.workers[rank], TestRound{}, rank);
  for (Part& part : parts) {
    EXPECT_TRUE(failed_with(part.wait(), Code::kWorkerLost, {"rank 1 (host host-1) shut down", "waits for it"}));
  }
}

TEST(Failure, OfAReducerIsToldToAll) {
  for (bool destroyed : {false, true}) {
    Job job({.workers = 3, .reducers = 2});
    ASSERT_NO_FATAL_FAILURE(job.start());
    const TestRound round{.leaf_counts = {100000}};
    job.expect_works(round);
    std::vector<Part> parts;  // rank 2 does not take part, so these wait
    for (uint32_t rank : {0u, 1u}) parts.emplace_back(*job.workers[rank], round, rank);
    job.reducers[1]->stop();
    EXPECT_TRUE(Job::wait_end(*job.reducers[1]).ok());
    if (destroyed) job.reducers[1].reset();
    for (Part& part : parts) {
      EXPECT_TRUE(failed_with(part.wait(), Code::kReducerLost, {"was lost", "last completed: test op 1 round 0"}));
    }
    for (const auto& worker : job.workers) EXPECT_EQ(worker->shutdown(kPatience).code(), Code::kReducerLost);
    EXPECT_EQ(Job::wait_end(*job.reducers[0]).code(), Code::kReducerLost);
  }
}

// The workers have half-sent frames on their way to the other reducers when they learn of it.
TEST(Failure, OfAReducerIsToldToAllInTheMiddleOfMuch) {
  const TestRound round{.leaf_counts = {6 << 20}};
  for (int repeat = 0; repeat < 3; ++repeat) {
    Job job({.workers = 3, .reducers = 3, .chunk_bytes = 1 << 22, .window_chunks = 8});
    ASSERT_NO_FATAL_FAILURE(job.start());
    std::vector<Part> parts;  // rank 2 does not take part, so these cannot be done before
    for (uint32_t rank : {0u, 1u}) parts.emplace_back(*job.workers[rank], round, rank);
    std::this_thread::sleep_for(milliseconds(5 * repeat));
    job.reducers[1].reset();
    for (Part& part : parts) EXPECT_TRUE(failed_with(part.wait(), Code::kReducerLost, {"was lost"}));
    EXPECT_EQ(job.workers[2]->shutdown(kPatience).code(), Code::kReducerLost);
  }
}

TEST(Failure, RefusesEveryLaterRound) {
  Job job({});
  ASSERT_NO_FATAL_FAILURE(job.start());
  job.workers[1].reset();
  Part first(*job.workers[0], {}, 0);
  EXPECT_EQ(first.wait().code(), Code::kWorkerLost);
  for (int i = 0; i < 3; ++i) {
    Part later(*job.workers[0], {}, 0);
    EXPECT_EQ(later.wait().code(), Code::kWorkerLost);
  }
}

}  // namespace
}  // namespace jaxhetero
