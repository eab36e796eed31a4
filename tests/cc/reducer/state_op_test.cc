// A reducer that keeps weights and states of an optimizer.
#include "xla_ffi/reducer/state_op.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/one_reducer.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/reducer/backup_keeper.h"
#include "xla_ffi/reducer/backups.h"
#include "xla_ffi/reducer/state_machine.h"
#include "xla_ffi/update/bucket_update.h"
#include "xla_ffi/update/program.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/wire/state_plan.h"

namespace jaxhetero {
namespace {

using enum Opcode;

constexpr uint64_t kCount = 2 * kItemsPerChunk + 3;
constexpr uint64_t kStoreOp = 1;
constexpr uint64_t kUpdateOp = 2;
constexpr uint64_t kLoadOp = 3;
constexpr uint32_t kOwnNumber = 0;

OpSpec spec_of(Kind kind, uint32_t slot = 0) {
  OpSpec spec{kind, DType::kF32, 0, 1, kCount, 99};
  spec.state = {77, 2, slot};
  return spec;
}

// Momentum: m = 0.5 m + g, w -= rate * m.
UpdateDescription momentum() {
  Program program{3,  2,
                  2,  {{kMul, 5, 2, 4, 0}, {kAdd, 5, 5, 0, 0}, {kMul, 6, 5, 3, 0}, {kSub, 6, 1, 6, 0}},
                  {}, {{6, OutputType::kF32}, {5, OutputType::kF32}}};
  UpdateDescription update;
  update.sent_count = 1;
  update.state_count = 1;
  update.programs = {encode(program)};
  update.leaves = {{kCount, {0, {{Origin::kSent, 0}, {Origin::kConstant, std::bit_cast<uint32_t>(0.5f)}}}, {}}};
  return update;
}

class StateTest : public ReducerTest {
 protected:
  StateTest() {
    ReducerStateMachine::Job job{{"a", "b", "c"}, {3, 1, 0, kChunkBytes, kWindow}};
    reducer_ = std::make_unique<ReducerStateMachine>(std::move(job), std::make_shared<LentMemory>(), kept_);
  }

  Status describe_state(uint32_t rank, const OpSpec& spec, uint64_t op, const Range& shard = {0, kCount},
                        const Bytes& update = {}) {
    specs_[op] = spec;
    FrameHeader header;
    header.op = op;
    return reducer_->describe_op(rank, header, {spec, "op" + std::to_string(op), shard, update}, sent_);
  }
  void describe_all(const OpSpec& spec, uint64_t op, const Bytes& update = {}, const Range& shard = {0, kCount}) {
    for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(describe_state(rank, spec, op, shard, update).ok());
  }
  Status step(uint32_t rank, uint64_t op, uint64_t round, const StepInputs& inputs) {
    FrameHeader header;
    header.op = op;
    header.round = round;
    return reducer_->take_step(rank, header, inputs, sent_);
  }
  // A whole round; what rank 2 gets.
  Values run(const OpSpec& spec, uint64_t op, uint64_t round, const StepInputs& inputs,
             const std::vector<Values>& by_rank) {
    for (uint32_t rank = 0; rank < 3; ++rank) EXPECT_TRUE(step(rank, op, round, inputs).ok());
    for (uint64_t chunk = 0; chunk < 3; ++chunk) {
      for (uint32_t rank = 0; rank < 3; ++rank) {
        EXPECT_TRUE(push(rank, push_header(rank, spec, chunk, round, op), by_rank[rank]).ok());
      }
    }
    Values values = take_results(2, spec, round, op);
    sent_.clear();
    return values;
  }
  void store(const Values& weights) {
    describe_all(spec_of(Kind::kStore), kStoreOp);
    EXPECT_TRUE(run(spec_of(Kind::kStore), kStoreOp, 0, {}, {weights, weights, weights}).empty());
  }
  Values load(uint32_t slot, uint64_t version) {
    describe_all(spec_of(Kind::kLoad, slot), kLoadOp + slot);
    const Values none(kCount);
    return run(spec_of(Kind::kLoad, slot), kLoadOp + slot, 0, {version, {}}, {none, none, none});
  }

  std::shared_ptr<KeptOptimizers> kept_ = std::make_shared<KeptOptimizers>(kOwnNumber);
};

// Of an elastic job, whose views may have other members.
class ElasticStateTest : public StateTest {
 protected:
  ElasticStateTest() {
    kept_ = std::make_shared<KeptOptimizers>(kOwnNumber, true);
    enter({0, 1, 2});
  }

  void enter(std::vector<uint32_t> members) {
    members_ = members;
    ReducerStateMachine::Job job{{"a", "b", "c"}, {3, 1, 0, kChunkBytes, kWindow}, std::move(members)};
    reducer_ = std::make_unique<ReducerStateMachine>(std::move(job), std::make_shared<LentMemory>(), kept_);
  }
  static OpSpec spec_of(Kind kind, uint32_t slot = 0) {
    OpSpec spec = jaxhetero::spec_of(kind, slot);
    spec.state.averages = kind == Kind::kUpdate || kind == Kind::kMeasure;
    spec.state.is_of_all = kind == Kind::kStore;
    return spec;
  }
  // So many chunks of a round, of which the last member gets the results.
  Values run(const OpSpec& spec, uint64_t op, uint64_t round, const StepInputs& inputs, const Values& of_each,
             uint64_t chunks = 3) {
    specs_[op] = spec;
    FrameHeader header;
    header.op = op;
    header.round = round;
    const Bytes update = spec.kind == Kind::kUpdate ? encode(momentum()) : Bytes();
    for (const uint32_t rank : members_) {
      EXPECT_TRUE(reducer_->describe_op(rank, header, {spec, "op", {0, kCount}, update}, sent_).ok());
      EXPECT_TRUE(step(rank, op, round, inputs).ok());
    }
    for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
      for (const uint32_t rank : members_) {
        Values own = of_each;
        for (float& value : own) value *= static_cast<float>(1 + rank);
        EXPECT_TRUE(push(rank, push_header(rank, spec, chunk, round, op), own).ok());
      }
    }
    EXPECT_TRUE(reducer_->fault().ok()) << reducer_->fault().message();
    return chunks < 3 ? Values() : take_results(members_.back(), spec, round, op);
  }

  std::vector<uint32_t> members_;
};

StepInputs inputs_of(uint64_t version, float rate) { return {version, {std::bit_cast<uint32_t>(rate)}}; }

TEST_F(StateTest, UpdatesWhatWasStored) {
  const Values weights = values_of(0, kCount, 5);
  store(weights);
  const OpSpec spec = spec_of(Kind::kUpdate);
  describe_all(spec, kUpdateOp, encode(momentum()));
  Values expected = weights;
  Values moment(kCount);
  for (uint64_t round = 0; round < 3; ++round) {
    std::vector<Values> gradients;
    for (uint32_t rank = 0; rank < 3; ++rank)
      gradients.push_back(values_of(rank, kCount, static_cast<uint32_t>(round)));
    const float rate = 0.25f / static_cast<float>(round + 1);
    const Values total = total_of(gradients);
    for (uint64_t i = 0; i < kCount; ++i) {
      moment[i] = moment[i] * 0.5f + total[i];
      expected[i] -= moment[i] * rate;
    }
    EXPECT_EQ(run(spec, kUpdateOp, round, inputs_of(round, rate), gradients), expected);
  }
  EXPECT_EQ(load(0, 3), expected);
  EXPECT_EQ(load(1, 3), moment);
  run(spec_of(Kind::kStore), kStoreOp, 1, {}, {weights, weights, weights});
  describe_all(spec_of(Kind::kLoad, 1), 50);
  const Values none(kCount);
  EXPECT_EQ(run(spec_of(Kind::kLoad, 1), 50, 0, {0, {}}, {none, none, none}), none) << "new weights begin anew";
}

TEST_F(StateTest, AShardMayGoOnAtTheBucketsBeginning) {
  constexpr Range kShard{kCount - 2, 2 + kItemsPerChunk};
  const OpSpec spec = spec_of(Kind::kStore);
  const Values weights = values_of(0, kCount);
  describe_all(spec, kStoreOp, {}, kShard);
  FrameHeader end = push_header(0, spec, 0, 0, kStoreOp);
  end.offset = kCount - 2;
  end.count = 2;
  FrameHeader beginning = end;
  beginning.offset = 0;
  beginning.count = kItemsPerChunk;
  beginning.last = true;
  const auto push_both = [&](uint64_t round) {
    for (uint32_t rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(step(rank, kStoreOp, round, {}).ok());
      for (FrameHeader header : {end, beginning}) {
        header.round = round;
        header.payload_bytes = rank == 0 ? header.count * sizeof(float) : 0;
        ASSERT_TRUE(push(rank, header, weights).ok());
      }
    }
  };
  push_both(0);
  EXPECT_EQ(reducer_->completed_round_count(), 1u);
  KeptState& kept = *kept_->states.find(spec.state.number);
  for (const Range& range : unwrapped(kShard, kCount)) {
    EXPECT_TRUE(std::ranges::equal(kept.slot(0, range), std::span(weights).subspan(range.offset, range.count)));
    EXPECT_TRUE(kept.runs(range).front().stamp.has_value());
  }
  beginning.last = false;
  push_both(1);
  beginning.round = 1;
  beginning.payload_bytes = 0;
  EXPECT_EQ(push(1, beginning, weights).code(), Code::kProtocol) << "but once";
}

TEST_F(StateTest, AStateIsUsedOnce) {
  store(Values(kCount, 1.0f));
  const OpSpec spec = spec_of(Kind::kUpdate);
  describe_all(spec, kUpdateOp, encode(momentum()));
  const Values ones(kCount, 1.0f);
  run(spec, kUpdateOp, 0, inputs_of(0, 0.5f), {ones, ones, ones});
  for (uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(step(rank, kUpdateOp, 1, inputs_of(0, 0.5f)).ok());
    ASSERT_TRUE(push(rank, push_header(rank, spec, 0, 1, kUpdateOp), ones).ok()) << "the fault is the job's";
  }
  expect_fault(1, Code::kInvalidArgument, {"op2", "after 0 updates", "the one after 1", "used once"});
}

TEST_F(StateTest, WorkersThatDisagreeAboutTheStepAreNamed) {
  store(Values(kCount, 1.0f));
  describe_all(spec_of(Kind::kUpdate), kUpdateOp, encode(momentum()));
  ASSERT_TRUE(step(1, kUpdateOp, 0, inputs_of(0, 0.5f)).ok());
  EXPECT_EQ(step(2, kUpdateOp, 0, inputs_of(0, 0.25f)).code(), Code::kMismatch);
  expect_fault(0, Code::kMismatch, {"rank 2 (host c)", "rank 1 (host b)", "learning rate"});
}

// In the next view, for workers that had not got all of it.
TEST_F(StateTest, ARoundThatRunsAgainChangesNothing) {
  store(values_of(0, kCount));
  const OpSpec spec = spec_of(Kind::kUpdate);
  const Values ones(kCount, 1.0f);
  describe_all(spec, kUpdateOp, encode(momentum()));
  const Values weights = run(spec, kUpdateOp, 0, inputs_of(0, 0.25f), {ones, ones, ones});
  ReducerStateMachine::Job job{{"a", "b", "c"}, {3, 1, 0, kChunkBytes, kWindow}};
  reducer_ = std::make_unique<ReducerStateMachine>(std::move(job), std::make_shared<LentMemory>(), kept_);
  describe_all(spec, kUpdateOp, encode(momentum()));
  EXPECT_EQ(run(spec, kUpdateOp, 0, inputs_of(0, 0.25f), {ones, ones, ones}), weights);
  EXPECT_EQ(load(0, 1), weights);
}

// Rank 1 is lost while two chunks of three have counted it. No worker has been given the round.
// Our workers all contribute the same there: the root may be gone.
TEST_F(ElasticStateTest, RefusesAStoreWhoseRootIsNoMember) {
  enter({0, 2});
  OpSpec spec = spec_of(Kind::kStore);
  spec.state.is_of_all = false;
  spec.root = 1;
  EXPECT_EQ(describe_state(0, spec, kStoreOp).code(), Code::kProtocol);
  spec.root = 2;
  EXPECT_TRUE(describe_state(0, spec, kStoreOp + 1).ok());
}

TEST_F(ElasticStateTest, ARoundThatBeginsAnewCountsThoseWhoAreLeft) {
  run(spec_of(Kind::kStore), kStoreOp, 0, {}, Values(kCount, 1.0f));
  const OpSpec spec = spec_of(Kind::kUpdate);
  Values moment(kCount, 0.0f);
  Values weights(kCount, 1.0f);  // those of rank 0, the first member
  const auto advance = [&](float mean) {
    for (uint64_t i = 0; i < kCount; ++i) {
      moment[i] = moment[i] * 0.5f + mean;
      weights[i] -= moment[i] * 0.25f;
    }
  };
  const Values ones(kCount, 1.0f);
  advance((1.0f + 2.0f + 3.0f) * (1.0f / 3.0f));
  EXPECT_EQ(run(spec, kUpdateOp, 0, inputs_of(0, 0.25f), ones), weights);
  sent_.clear();
  enter({0, 1, 2});
  run(spec, kUpdateOp, 1, inputs_of(1, 0.25f), ones, 2);
  sent_.clear();
  enter({0, 2});
  advance((1.0f + 3.0f) * (1.0f / 2.0f));
  EXPECT_EQ(run(spec, kUpdateOp, 1, inputs_of(1, 0.25f), ones), weights);
  sent_.clear();
  enter({0, 2});
  EXPECT_EQ(run(spec, kUpdateOp, 1, inputs_of(1, 0.25f), ones), weights) << "nothing is done twice";
  EXPECT_TRUE(std::ranges::equal(kept_->states.find(77)->slot(1, {0, kCount}), moment));
}

// What a backup has of a round that begins anew is undone there as well, also where it was copied meanwhile.
TEST_F(ElasticStateTest, ABackupFollowsARoundThatBeginsAnew) {
  const Values ones(kCount, 1.0f);
  run(spec_of(Kind::kStore), kStoreOp, 0, {}, ones);
  run(spec_of(Kind::kUpdate), kUpdateOp, 0, inputs_of(0, 0.25f), ones);
  KeptState& own = *kept_->states.find(77);
  KeptStates theirs(true);
  BackupKeeper keeper(theirs);
  const KeptState::Stamp stamp = *own.runs({0, kCount})[0].stamp;
  StateCopy copy{77, kCount, 2, true, {0, kCount}, stamp.version, stamp.op, stamp.round, false, true, {}};
  for (const std::span<float> array : arrays_of(own, copy.part, false)) {
    const auto bytes = std::as_bytes(array);
    copy.values.insert(copy.values.end(), bytes.begin(), bytes.end());
  }
  Result<StateCopy> sent = decode_state_copy(encode(copy));
  ASSERT_TRUE(sent.ok());
  ASSERT_TRUE(keeper.take_copy(*sent).ok());
  sent_.clear();
  enter({2});
  run(spec_of(Kind::kUpdate), kUpdateOp, 0, inputs_of(0, 0.25f), ones);
  FrameHeader header;
  header.op = kUpdateOp;
  header.count = kCount;
  ASSERT_TRUE(keeper.describe_op(kUpdateOp, {spec_of(Kind::kUpdate), "", {0, kCount}, encode(momentum())}).ok());
  ASSERT_TRUE(keeper.take_step(header, inputs_of(0, 0.25f)).ok());
  const Values mean(kCount, 3.0f);
  ASSERT_TRUE(keeper.back_up(header, std::as_bytes(std::span(mean))).ok());
  for (uint32_t slot = 0; slot < 2; ++slot) {
    EXPECT_TRUE(std::ranges::equal(theirs.find(77)->slot(slot, {0, kCount}), own.slot(slot, {0, kCount})));
  }
  copy.has_earlier = false;
  copy.values.resize(copy.array_count() * kCount * sizeof(float));
  EXPECT_EQ(keeper.take_copy(copy).code(), Code::kProtocol) << "a round could not be undone";
}

// Workers get what a partner has as well, and the partner has the same.
TEST_F(StateTest, AnswersOnceAPartnerHasIt) {
  const std::vector<StatePlan::Member> members = {{0, 0, "a", 1, 1}, {1, 0, "b", 2, 1}};
  kept_->backups.enter(StatePlan(members), kept_->states);
  KeptStates theirs;
  BackupKeeper partner(theirs);
  // Hands over what is for the partner; the headers that it would reply to.
  const auto hand_over = [&] {
    std::vector<FrameHeader> replies;
    for (const Outgoing& frame : std::exchange(sent_, {})) {
      const Bytes payload(frame.payload.begin(), frame.payload.end());
      if (!frame.is_for_partner) {
        sent_.push_back(frame);
      } else if (frame.header.type == FrameType::kDescribe) {
        EXPECT_TRUE(partner.describe_op(frame.header.op, *decode_op_description(payload)).ok());
      } else if (frame.header.type == FrameType::kStep) {
        EXPECT_TRUE(partner.take_step(frame.header, *decode_step_inputs(payload)).ok());
      } else {
        EXPECT_TRUE(partner.back_up(frame.header, payload).ok());
        replies.push_back(frame.header);
      }
    }
    return replies;
  };
  ASSERT_EQ(StatePlan(members).cut(77, kCount)[0].reducer, kOwnNumber) << "else the other one has the bucket";
  const Values ones(kCount, 1.0f);
  const auto run_backed_up = [&](const OpSpec& spec, uint64_t op, const StepInputs& inputs) {
    for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(step(rank, op, 0, inputs).ok());
    for (uint64_t chunk = 0; chunk < 3; ++chunk) {
      for (uint32_t rank = 0; rank < 3; ++rank) {
        ASSERT_TRUE(push(rank, push_header(rank, spec, chunk, 0, op), ones).ok());
      }
    }
    const std::vector<FrameHeader> replies = hand_over();
    ASSERT_EQ(replies.size(), 3u);
    EXPECT_TRUE(sent_.empty()) << "answered before the partner has replied";
    for (const FrameHeader& reply : replies) reducer_->note_backed_up(reply, sent_);
    EXPECT_EQ(take(0, FrameType::kResult).size(), 3u);
    sent_.clear();
  };
  describe_all(spec_of(Kind::kStore), kStoreOp);
  run_backed_up(spec_of(Kind::kStore), kStoreOp, {});
  describe_all(spec_of(Kind::kUpdate), kUpdateOp, encode(momentum()));
  run_backed_up(spec_of(Kind::kUpdate), kUpdateOp, inputs_of(0, 0.25f));
  const Range all{0, kCount};
  for (uint32_t slot = 0; slot < 2; ++slot) {
    EXPECT_TRUE(std::ranges::equal(theirs.find(77)->slot(slot, all), kept_->states.find(77)->slot(slot, all)));
  }
  EXPECT_EQ(theirs.find(77)->runs(all)[0].stamp, kept_->states.find(77)->runs(all)[0].stamp);
}

TEST_F(StateTest, WhatWasNotStoredIsNotUpdated) {
  EXPECT_EQ(describe_state(0, spec_of(Kind::kUpdate), kUpdateOp, {0, kCount}, encode(momentum())).code(),
            Code::kInvalidArgument);
  expect_fault(2, Code::kInvalidArgument, {"init(params)"});
}

TEST_F(StateTest, ABrokenWorkerDoesNoHarm) {
  store(Values(kCount, 1.0f));
  const OpSpec spec = spec_of(Kind::kUpdate);
  const Bytes update = encode(momentum());
  EXPECT_EQ(describe_state(0, spec, 10, {0, kCount + 1}, update).code(), Code::kProtocol)
      << "a shard beyond the bucket";
  Bytes spoiled = update;
  spoiled.back() ^= std::byte{1};
  EXPECT_EQ(describe_state(0, spec, 11, {0, kCount}, spoiled).code(), Code::kProtocol);
  EXPECT_EQ(describe_state(0, spec_of(Kind::kLoad), 12, {0, kCount}, update).code(), Code::kProtocol);
  ASSERT_TRUE(describe_state(0, spec, kUpdateOp, {0, kCount}, update).ok());
  EXPECT_EQ(describe_state(1, spec, kUpdateOp, {0, kCount - 1}, update).code(), Code::kProtocol) << "another shard";
  EXPECT_EQ(push(0, push_header(0, spec, 0, 0, kUpdateOp)).code(), Code::kProtocol) << "before the inputs of the step";
  EXPECT_EQ(step(2, kUpdateOp, 0, inputs_of(0, 0.5f)).code(), Code::kProtocol) << "before its description";
  EXPECT_EQ(step(0, kUpdateOp, 0, {0, {1, 2, 3}}).code(), Code::kProtocol) << "too many scalars";
  EXPECT_TRUE(reducer_->fault().ok());
}

// Of a shard that begins in the middle of the bucket.
TEST_F(StateTest, MeasuresItsPartOfTheBucket) {
  constexpr Range kShard{kItemsPerChunk, kCount - kItemsPerChunk};
  Program program{2, 0, 1, {{kMul, 2, 0, 1, 0}}, {{2}}, {}};
  UpdateDescription update;
  update.total_count = 1;
  update.has_outputs = false;
  update.programs = {encode(program)};
  update.leaves = {{kCount, {0, {}}, {0}}};
  OpSpec store = spec_of(Kind::kStore);
  OpSpec measure = spec_of(Kind::kMeasure);
  const Values ones(kCount, 1.0f);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(describe_state(rank, store, kStoreOp, kShard).ok());
    ASSERT_TRUE(step(rank, kStoreOp, 0, {}).ok());
  }
  const auto run_part = [&](const OpSpec& spec, uint64_t op) {
    for (uint64_t chunk = 1; chunk < 3; ++chunk) {
      for (uint32_t rank = 0; rank < 3; ++rank) {
        ASSERT_TRUE(push(rank, push_header(rank, spec, chunk, 0, op), ones).ok());
      }
    }
  };
  run_part(store, kStoreOp);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(describe_state(rank, measure, kUpdateOp, kShard, encode(update)).ok());
    ASSERT_TRUE(step(rank, kUpdateOp, 0, {}).ok());
  }
  run_part(measure, kUpdateOp);
  const std::vector<Outgoing> frames = take(1, FrameType::kTotals);
  ASSERT_EQ(frames.size(), 1u);
  Result<StepTotals> totals = decode_step_totals(frames[0].payload);
  ASSERT_TRUE(totals.ok());
  double sum = 0;
  for (const StepTotals::Part& part : totals->parts) {
    EXPECT_EQ(part.total, 0u);
    EXPECT_GE(part.first, kShard.offset);
    sum += std::bit_cast<double>(part.sum);
  }
  EXPECT_EQ(sum, 3.0 * kShard.count);
}

}  // namespace
}  // namespace jaxhetero
