// What comes of it when one of them does what it should not.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/cc/fake_peers.h"
#include "tests/cc/job.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

// Who has the token but does not belong here reads why, as does who looks after the reducer; the others go on.
struct Stray {
  Join join;  // its job_id is added to the right one
  Code code;
  std::string reason;
};

class StrayWorkerTest : public FakeWorkerTest, public testing::WithParamInterface<Stray> {};

TEST_P(StrayWorkerTest, IsRefusedAndToldWhy) {
  ASSERT_NO_FATAL_FAILURE(start({.workers = 3, .reducers = 2}, /*fake_joins=*/false));
  for (const auto& reducer : job_->reducers) ASSERT_NO_FATAL_FAILURE(Job::wait_joined(*reducer, 2));
  const auto& [stray, code, reason] = GetParam();
  Join join = stray;
  join.job_id += fake_->job_id();
  fake_->send(OutFrame::control(FrameType::kJoin, encode(join)));
  EXPECT_TRUE(failed_with(fake_->wait_end(), code, {"refused by reducer ", reason}));
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
                    Stray{{0, 1, 0, 0, 1}, Code::kInvalidArgument, "it joined reducer 1; does something on the way"},
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
  fake_->describe(round);
  for (size_t reducer : {0, 1}) fake_->send(GetParam().frame(round), reducer);
  expect_failure(Code::kWorkerLost, {"rank 1 (host host-1) was lost: ", GetParam().word});
  EXPECT_FALSE(fake_->wait_end().ok());
}

INSTANTIATE_TEST_SUITE_P(
    All, MisdeedTest,
    testing::Values(Misdeed{"pushes_what_it_never_described",
                            [](const TestRound& round) {
                              TestRound other = round;
                              other.op = 99;
                              other.leaf_counts = {10};
                              return push_frame(push_header(other), 40);
                            },
                            "never described"},
                    Misdeed{"pushes_more_than_a_chunk",
                            [](const TestRound& round) { return push_frame(push_header(round), round.bytes()); },
                            "pushed more than its window"},
                    Misdeed{"sends_a_result",
                            [](const TestRound& round) {
                              FrameHeader header = push_header(round);
                              header.type = FrameType::kResult;
                              return push_frame(header, round.bytes());
                            },
                            "it sent a frame of type 8"},
                    Misdeed{"joins_twice",
                            [](const TestRound&) { return OutFrame::control(FrameType::kJoin, encode(Join{0, 2, 0})); },
                            "it joined twice"},
                    Misdeed{"sends_a_broken_frame",
                            [](const TestRound&) {
                              FrameHeader header;
                              header.type = static_cast<FrameType>(77);
                              return OutFrame::of(header, {}, nullptr);
                            },
                            "unknown type 77"}),
    [](const auto& info) { return info.param.name; });

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
  EXPECT_TRUE(failed_with(part.wait(), Code::kReducerLost,
                          {"reducer 0 (host reducer-host-0, 127.0.0.1) was lost: rank 0 (host host-0): "}));
  EXPECT_TRUE(part.has(Bytes(round.bytes(), std::byte{0xee})));
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
                                         Lie{"no_data", [](FrameHeader& h) { h.payload_bytes = 0; }},
                                         Lie{"no_code",
                                             [](FrameHeader& h) {
                                               h.is_coded = true;
                                               h.payload_bytes = 0;
                                             }},
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

// Of a gather's only row, the worker's own, nothing comes back.
TEST(FakeReducerTest, MayNotSendAWorkerItsOwnRow) {
  Job job({.workers = 1, .reducers = 1});
  FakeReducer reducer(job);
  reducer.on_push_ = [&](Connection& connection, const FrameHeader& push) {
    FrameHeader header = push;
    header.type = FrameType::kResult;
    connection.send(push_frame(header, header.payload_bytes));
  };
  Communicator& worker = job.add_worker(0);
  ASSERT_TRUE(Job::wait_ready(worker).ok());
  Part part(worker, {.kind = Kind::kGather, .leaf_counts = {10}}, 0);
  EXPECT_TRUE(failed_with(part.wait(), Code::kReducerLost, {"it sent a result out of order"}));
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

}  // namespace
}  // namespace jaxhetero
