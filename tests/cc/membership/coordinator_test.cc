// How a job starts, or why it does not; and heartbeats.
#include "xla_ffi/membership/coordinator.h"

#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cc/job.h"
#include "tests/cc/loop_thread.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/membership/heartbeat.h"
#include "xla_ffi/membership/member.h"
#include "xla_ffi/membership/visit.h"
#include "xla_ffi/transport/connection.h"
#include "xla_ffi/transport/tcp_address.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/transport/tcp_context.h"
#include "xla_ffi/transport/tcp_listener.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/elastic_messages.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

// The next warning that `worker` logs.
std::string next_warning(Communicator& worker) {
  std::optional<Event> event;
  while ((event = worker.next_event(kPatience)) && event->severity != Severity::kWarning) {
  }
  return event.has_value() ? event->text : "";
}

TEST(Start, NamesTheWorkerThatIsMissing) {
  Job job({.workers = 3, .reducers = 1, .start_timeout = milliseconds(3500)});
  ReducerServer& reducer = job.add_reducer(job.reducer_config(0));
  job.add_worker(0);
  job.add_worker(1);
  // Everybody who waits says so after 3 s.
  for (uint32_t rank : {0u, 1u}) EXPECT_EQ(next_warning(*job.workers[rank]), "waiting for rank 2");
  for (uint32_t rank : {0u, 1u}) {
    EXPECT_TRUE(failed_with(Job::wait_ready(*job.workers[rank]), Code::kStartTimeout, {"missing rank 2", "3500 ms"}));
  }
  EXPECT_TRUE(failed_with(Job::wait_end(reducer), Code::kStartTimeout, {"missing rank 2"}));
}

TEST(Start, NamesHowManyReducersAreMissing) {
  Job job({.workers = 2, .reducers = 3, .start_timeout = kShort});
  job.add_reducer(job.reducer_config(0));
  job.add_worker(0);
  job.add_worker(1);
  for (const auto& worker : job.workers) {
    EXPECT_TRUE(failed_with(Job::wait_ready(*worker), Code::kStartTimeout, {"missing 2 of 3 reducers"}));
  }
  EXPECT_TRUE(failed_with(Job::wait_end(*job.reducers[0]), Code::kStartTimeout, {"missing 2 of 3 reducers"}));
}

TEST(Start, NamesTheCoordinatorThatDoesNotAnswer) {
  Job job({.workers = 2, .reducers = 1, .start_timeout = milliseconds(300)});
  ReducerServer& reducer = job.add_reducer(job.reducer_config(0));
  Communicator& worker = job.add_worker(1);
  const std::vector<std::string> words = {job.address().text(), "Connection refused", "is rank 0 running"};
  EXPECT_TRUE(failed_with(Job::wait_ready(worker), Code::kStartTimeout, words));
  EXPECT_TRUE(failed_with(Job::wait_end(reducer), Code::kStartTimeout, words));
}

TEST(Start, FailsWhereTheCoordinatorsAddressIsTaken) {
  Job job({});
  const std::unique_ptr<EventLoop> loop = std::move(*EventLoop::create());
  const auto other = TcpListener::bind(*loop, job.address(), "somebody else");
  ASSERT_TRUE(other.ok()) << other.status().message();
  Communicator worker(job.worker_config(0));
  EXPECT_TRUE(failed_with(worker.start(), Code::kAddressInUse, {job.address().text(), "the coordinator"}));
}

TEST(Start, TriesEveryAddressOfTheCoordinator) {
  const Job job({});
  const CommunicatorConfig config = job.worker_config(0);
  const auto at = [&](const std::string& host) { return *resolve(host, job.address().port()); };
  LoopThread thread;
  TcpContext context(thread.loop(), config.token);
  EventLog log;
  Coordinator coordinator(context, config.job, config.version, log);
  const Status bound = coordinator.bind({at("192.0.2.1"), at("127.0.0.1")});  // the first is no address of this host
  ASSERT_TRUE(bound.ok()) << bound.message();
  Registration registration;
  registration.version = "another";
  Member member(context, {at("127.0.0.2"), at("127.0.0.1")}, registration, log, config.timeout);
  std::promise<Status> end;
  thread.call([&] {
    EXPECT_TRUE(coordinator.start(kPatience, config.timeout).ok());
    member.start(kPatience, {.on_view = {},
                             .on_halt = {},
                             .on_forget = {},
                             .on_leaving = {},
                             .on_goodbye = {},
                             .on_failure = [&](const Status& why) { end.set_value(why); }});
  });
  EXPECT_EQ(end.get_future().get().code(), Code::kVersionMismatch);
  thread.stop();
}

TEST(Start, RefusesAddressesThatAreNone) {
  const Job job({});
  CommunicatorConfig worker = job.worker_config(1);
  worker.coordinator = "nonsense";
  EXPECT_TRUE(failed_with(Communicator(worker).start(), Code::kInvalidArgument, {"nonsense"}));
  ReducerServerConfig reducer = job.reducer_config(0);
  reducer.coordinator = "host.invalid:1";
  EXPECT_TRUE(failed_with(ReducerServer(reducer).start(), Code::kInvalidArgument, {"host.invalid"}));
}

TEST(Start, RefusesAJobWithoutReducers) {
  Job job({.workers = 1, .reducers = 0, .start_timeout = kShort});
  Communicator worker(job.worker_config(0));
  const Status status = worker.start();
  EXPECT_TRUE(failed_with(status.ok() ? Job::wait_ready(worker) : status, Code::kInvalidArgument, {"no reducer"}));
}

// One who does not belong is told why, and the job starts without him.
struct Intruder {
  std::string name;
  std::function<void(CommunicatorConfig&)> change;
  Code code;
  std::vector<std::string> words;  // that he reads
  std::string logged = "rank 2 (host intruder-host) was refused: ";
};

class IntruderTest : public testing::TestWithParam<Intruder> {};

TEST_P(IntruderTest, IsRefusedAndTheJobStarts) {
  Job job({.workers = 3, .reducers = 1});
  job.add_worker(0);
  CommunicatorConfig config = job.worker_config(2);
  config.host_name = "intruder-host";
  GetParam().change(config);
  Communicator intruder(config);
  ASSERT_TRUE(intruder.start().ok());
  EXPECT_TRUE(failed_with(Job::wait_ready(intruder), GetParam().code, GetParam().words));
  EXPECT_TRUE(has(next_warning(*job.workers[0]), GetParam().logged)) << "what rank 0 reads";
  job.add_worker(1);
  job.add_worker(2);
  job.add_reducers(1);
  for (const auto& worker : job.workers) ASSERT_TRUE(Job::wait_ready(*worker).ok());
  job.expect_works();
  job.expect_shutdown();
}

INSTANTIATE_TEST_SUITE_P(All, IntruderTest,
                         testing::Values(Intruder{"token",
                                                  [](CommunicatorConfig& c) { c.token = bytes_of("other"); },
                                                  Code::kUnauthenticated,
                                                  {"the coordinator at 127.0.0.1:", "token"},
                                                  "the coordinator refused a connection from 127.0.0.1:"},
                                         Intruder{"no_token",
                                                  [](CommunicatorConfig& c) { c.token.clear(); },
                                                  Code::kUnauthenticated,
                                                  {"the coordinator at 127.0.0.1:", "token"},
                                                  "the coordinator refused a connection from 127.0.0.1:"},
                                         Intruder{
                                             "version",
                                             [](CommunicatorConfig& c) { c.version = "2.0"; },
                                             Code::kVersionMismatch,
                                             {"rank 2 (host intruder-host) runs jaxhetero 2.0", "rank 0 runs 1.0"}},
                                         Intruder{"rank_too_large",
                                                  [](CommunicatorConfig& c) { c.rank = 3; },
                                                  Code::kInvalidArgument,
                                                  {"rank 3 (host intruder-host) is not one of 3"},
                                                  "rank 3 (host intruder-host) was refused: "},
                                         Intruder{"worker_count",
                                                  [](CommunicatorConfig& c) { c.job.worker_count = 4; },
                                                  Code::kVersionMismatch,
                                                  {"rank 2 (host intruder-host) was started with settings other than "
                                                   "rank 0's: worker_count is 4, not 3; "}},
                                         Intruder{"chunk_bytes",
                                                  [](CommunicatorConfig& c) { c.job.chunk_bytes = 2048; },
                                                  Code::kVersionMismatch,
                                                  {": chunk_bytes is 2048, not 1024; "}},
                                         Intruder{"window",
                                                  [](CommunicatorConfig& c) { c.job.window_chunks = 8; },
                                                  Code::kVersionMismatch,
                                                  {": window_chunks is 8, not 3; "}},
                                         Intruder{"checksum",
                                                  [](CommunicatorConfig& c) { c.job.checksum = true; },
                                                  Code::kVersionMismatch,
                                                  {": checksum is 1, not 0; "}}),
                         [](const auto& info) { return info.param.name; });

TEST(Start, NamesWhoHasTheRankAlready) {
  Job job({.workers = 3, .reducers = 1});
  job.add_worker(0);
  job.add_worker(1);
  EXPECT_EQ(next_warning(*job.workers[1]), "waiting for rank 2, 1 of 1 reducers") << "so it is registered";
  CommunicatorConfig config = job.worker_config(1);
  config.host_name = "other-host";
  Communicator other(config);
  ASSERT_TRUE(other.start().ok());
  EXPECT_TRUE(failed_with(Job::wait_ready(other), Code::kInvalidArgument,
                          {"rank 1 (host other-host) is taken already, by 127.0.0.1:"}));
}

TEST(Start, TellsWhoWaitsThatSomebodyHadAnotherToken) {
  Job job({.workers = 2, .reducers = 1, .start_timeout = kShort});
  job.add_worker(0);
  job.add_reducers(1);
  CommunicatorConfig config = job.worker_config(1);
  config.token = bytes_of("other");
  EXPECT_TRUE(failed_with(Job::wait_ready(job.add_worker(config)), Code::kUnauthenticated, {"token"}));
  EXPECT_TRUE(failed_with(Job::wait_ready(*job.workers[0]), Code::kStartTimeout, {"missing rank 1", "was refused"}));
}

TEST(Start, RefusesAReducerOfAnotherVersion) {
  Job job({.workers = 2, .reducers = 1});
  job.add_worker(0);
  ReducerServerConfig config = job.reducer_config(0);
  config.version = "2.0";
  EXPECT_TRUE(failed_with(Job::wait_end(job.add_reducer(config)), Code::kVersionMismatch,
                          {"reducer (host reducer-host-0) runs jaxhetero 2.0, rank 0 runs 1.0"}));
  EXPECT_TRUE(has(next_warning(*job.workers[0]), "reducer (host reducer-host-0) was refused: "));
}

TEST(Start, RefusesWhoComesToAJobThatRuns) {
  Job job({});
  ASSERT_NO_FATAL_FAILURE(job.start());
  Communicator late(job.worker_config(1));
  ASSERT_TRUE(late.start().ok());
  EXPECT_TRUE(failed_with(Job::wait_ready(late), Code::kInvalidArgument, {"started already"}));
  ReducerServer spare(job.reducer_config(0));
  ASSERT_TRUE(spare.start().ok());
  EXPECT_TRUE(failed_with(Job::wait_end(spare), Code::kInvalidArgument, {"started already"}));
  job.expect_works();
  job.expect_shutdown();
}

TEST(Start, RefusesADedicatedReducerWhereNoneIsWanted) {
  Job job({.workers = 2, .reducers = 0});
  job.add_worker(0);
  ReducerServerConfig config = job.reducer_config(0);
  config.colocated_rank = -1;
  ReducerServer& reducer = job.add_reducer(config);
  EXPECT_TRUE(failed_with(Job::wait_end(reducer), Code::kInvalidArgument, {"without dedicated reducers"}));
}

TEST(Start, RefusesOneReducerTooMany) {
  Job job({.workers = 2, .reducers = 1});
  job.add_worker(0);
  for (int i = 0; i < 2; ++i) job.add_reducer(job.reducer_config(0));
  std::optional<Status> refusal;
  for (int i = 0; !refusal.has_value() && i < 3000; ++i) {  // either may have come first
    for (const auto& reducer : job.reducers) {
      if (std::optional<Status> end = reducer->wait(milliseconds(10)); end.has_value()) refusal = end;
    }
  }
  ASSERT_TRUE(refusal.has_value());
  EXPECT_TRUE(failed_with(*refusal, Code::kInvalidArgument, {"has its 1 reducers already"}));
}

// Rows of a bucket then lie where they belong: see ShardPlan::cut().
TEST(Start, NumbersTheReducersInWorkersByRank) {
  Job job({.workers = 4, .reducers = 1, .colocated = 4});
  ASSERT_NO_FATAL_FAILURE(job.start());
  for (size_t number = 0; number < job.reducers.size(); ++number) {
    const std::string ready = "reducer " + std::to_string(number) + " is ready";
    std::optional<Event> event = job.reducers[number]->next_event(kPatience);
    ASSERT_TRUE(event.has_value());
    EXPECT_TRUE(has(event->text, ready)) << event->text;
  }
}

// What a reducer says of itself once the job begins: "reducer 2 is ready for 2 workers on port 4711".
std::string first_word(ReducerServer& reducer) {
  const std::optional<Event> event = reducer.next_event(kPatience);
  return event.has_value() ? event->text.substr(0, event->text.find(" is ready")) : "";
}

TEST(Start, GivesReducersTheNumbersThatTheyAskFor) {
  Job job({.workers = 2, .reducers = 3, .colocated = 2});
  const std::vector<int32_t> wishes = {2, -1, 0};
  for (uint32_t index = 0; index < job.reducer_count(); ++index) {
    ReducerServerConfig config = job.reducer_config(index);
    if (index < wishes.size()) config.number = wishes[index];
    job.add_reducer(config);
  }
  for (const uint32_t rank : {0u, 1u}) job.add_worker(rank);
  for (const auto& worker : job.workers) ASSERT_TRUE(Job::wait_ready(*worker).ok());
  const std::vector<std::string> numbers = {"reducer 2", "reducer 1", "reducer 0", "reducer 3", "reducer 4"};
  for (size_t index = 0; index < numbers.size(); ++index) EXPECT_EQ(first_word(*job.reducers[index]), numbers[index]);
  job.expect_works();
  job.expect_shutdown();
}

TEST(Start, RefusesANumberThatIsTakenOrDoesNotExist) {
  Job job({.workers = 2, .reducers = 2});
  job.add_worker(0);
  ReducerServerConfig config = job.reducer_config(0);
  config.number = 2;
  EXPECT_TRUE(failed_with(Job::wait_end(job.add_reducer(config)), Code::kInvalidArgument,
                          {"reducer 2 (host reducer-host-0) is not one of the 2 dedicated reducers"}));
  config.number = 1;
  for (int i = 0; i < 2; ++i) job.add_reducer(config);
  std::optional<Status> refusal;
  for (int i = 0; !refusal.has_value() && i < 3000; ++i) {  // either may have come first
    for (const size_t reducer : {1u, 2u}) {
      if (std::optional<Status> end = job.reducers[reducer]->wait(milliseconds(10)); end.has_value()) refusal = end;
    }
  }
  ASSERT_TRUE(refusal.has_value());
  EXPECT_TRUE(failed_with(*refusal, Code::kInvalidArgument,
                          {"reducer 1 (host reducer-host-0) is taken already, by 127.0.0.1:", "a number of its own"}));
}

TEST(Start, MayBeGivenUp) {
  Job job({.workers = 2, .reducers = 1});
  Communicator& worker = job.add_worker(0);
  EXPECT_FALSE(worker.wait_ready(milliseconds(20)).has_value());
  EXPECT_TRUE(failed_with(worker.shutdown(kPatience), Code::kNotInitialized, {"before the start was complete"}));
}

TEST(Start, MayBeDestroyedInAnyState) {
  Job job({.workers = 2, .reducers = 1});
  {
    const Communicator never_started(job.worker_config(0));
  }
  {
    const ReducerServer never_started(job.reducer_config(0));
  }
  {
    job.add_worker(0);
  }
  job.workers.clear();  // waits for the others
  {
    job.add_reducers(1);
  }
  job.reducers.clear();  // has found nobody
  ASSERT_NO_FATAL_FAILURE(job.start());
  job.workers.clear();
  job.reducers.clear();
}

// A process that was stopped finds its beat due and, behind it, all that others have sent meanwhile.
// A worker that waits at a gate already while the coordinator, which was started again, does not know yet who it is.
class EarlyComer final : public ConnectionOwner {
 public:
  EarlyComer(const TcpAddress& coordinator, Registration registration) : registration_(std::move(registration)) {
    thread_.call([&] { connection_ = TcpConnection::connect(context_, coordinator, *this, kPatience); });
  }
  ~EarlyComer() override {
    thread_.call([this] { connection_->close(); });
    thread_.stop();
  }
  // Whether it is answered, and not closed.
  bool wait_answered() { return answered_.get_future().get(); }

 private:
  void on_open(Connection&) override {
    connection_->send(OutFrame::control(FrameType::kRegister, encode(registration_)));
    connection_->send(OutFrame::control(FrameType::kPresent, {}, header_of(Presence{1})));
    connection_->send(OutFrame::control(FrameType::kLeave, {}));
    connection_->send(OutFrame::control(FrameType::kAsk, {}));
  }
  Status on_header(Connection&, const FrameHeader& header, std::vector<iovec>& into) override {
    payload_.resize(header.payload_bytes);
    into = as_pieces(payload_);
    return {};
  }
  Status on_frame(Connection&, const FrameHeader& header) override {
    if (header.type == FrameType::kState) end(true);
    return {};
  }
  void on_close(Connection&, const Status&) override { end(false); }
  void end(bool answered) {
    if (!std::exchange(has_ended_, true)) answered_.set_value(answered);
  }

  const Registration registration_;
  LoopThread thread_;
  TcpContext context_{thread_.loop(), bytes_of("secret")};
  std::shared_ptr<TcpConnection> connection_;
  Bytes payload_;
  bool has_ended_ = false;
  std::promise<bool> answered_;
};

TEST(Start, OfAnElasticJobWaitsForWhomIsNotNeededYet) {
  Job job({.workers = 3, .least = 2});
  job.start_coordinator();
  Registration registration;
  registration.rank = 3;
  registration.job = job.worker_config(0).job;
  registration.job.first_worker_count = 2;
  registration.version = "1.0";
  registration.host_name = "host-3";
  EarlyComer comer(job.address(), registration);
  EXPECT_TRUE(comer.wait_answered());
}

// --- Visits.

TEST(Visit, BeforeTheStartLearnsWhoIsMissing) {
  Job job({.workers = 3, .reducers = 2});
  job.add_worker(0);
  Result<JobState> state = visit({job.address()}, bytes_of("secret"), false, kPatience);
  while (state.ok() && state->processes.empty()) state = visit({job.address()}, bytes_of("secret"), false, kPatience);
  ASSERT_TRUE(state.ok()) << state.status().message();
  EXPECT_FALSE(state->has_started);
  EXPECT_EQ(state->missing, "rank 1, rank 2, 2 of 2 reducers");
  ASSERT_EQ(state->processes.size(), 1);
  EXPECT_EQ(state->processes[0].host_name, "host-0");
  EXPECT_TRUE(state->processes[0].has_answered);
}

TEST(Visit, LearnsWhoIsLate) {
  Job job({.workers = 3, .reducers = 2});
  ASSERT_NO_FATAL_FAILURE(job.start());
  job.expect_works({});
  const TestRound round{.op = 2, .leaf_counts = {20000}};
  std::vector<Part> parts;  // rank 2 does not take part
  for (uint32_t rank : {0u, 1u}) parts.emplace_back(*job.workers[rank], round, rank);
  const auto late_of = [](const JobState& state) {
    std::vector<uint32_t> ranks;
    for (const JobState::Process& process : state.processes) {
      for (const auto& late : process.state.late_workers) ranks.push_back(late.rank);
    }
    return ranks;
  };
  Result<JobState> state = visit({job.address()}, bytes_of("secret"), false, kPatience);
  while (state.ok() && late_of(*state) != std::vector<uint32_t>{2, 2}) {  // the pushes are on their way
    state = visit({job.address()}, bytes_of("secret"), false, kPatience);
  }
  ASSERT_TRUE(state.ok()) << state.status().message();
  EXPECT_TRUE(state->has_started);
  ASSERT_EQ(state->processes.size(), 5);
  for (const JobState::Process& process : state->processes) {
    EXPECT_TRUE(process.has_answered);
    EXPECT_EQ(process.state.round_count, process.role == Role::kWorker ? 1 : process.state.round_count);
    const bool waits = process.role == Role::kWorker && process.rank < 2;
    EXPECT_EQ(process.state.round, waits ? "test op 2 round 0" : "");
  }
}

TEST(Visit, NeedsTheToken) {
  Job job({});
  ASSERT_NO_FATAL_FAILURE(job.start());
  EXPECT_EQ(visit({job.address()}, bytes_of("guess"), false, kPatience).status().code(), Code::kUnauthenticated);
  job.expect_works({});
}

TEST(Visit, ToNobodyEnds) {
  const Job job({});
  EXPECT_TRUE(
      failed_with(visit({job.address()}, bytes_of("secret"), false, kPatience).status(), Code::kInternal, {"refused"}));
}

TEST(Heartbeat, OfAProcessThatWasStoppedComesAfterWhatOthersHaveSent) {
  std::vector<std::string> order;
  std::promise<void> is_over;
  LoopThread thread;
  thread.call([&] {
    Heartbeat::start(thread.loop(), milliseconds(100), [&] {
      order.emplace_back("beat");
      if (order.size() < 3) return true;
      is_over.set_value();
      return false;
    });
    std::this_thread::sleep_for(milliseconds(100));
    // The loop runs timers that are due before it looks for what has come in.
    thread.loop().after(milliseconds(0), [&] { thread.loop().post([&] { order.emplace_back("heard"); }); });
  });
  ASSERT_EQ(is_over.get_future().wait_for(kPatience), std::future_status::ready);
  EXPECT_EQ(order, (std::vector<std::string>{"beat", "heard", "beat"}));
}

}  // namespace
}  // namespace jaxhetero
