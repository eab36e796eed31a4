// A reducer without sockets, and the frames that its workers push.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/printing.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/reducer/state_machine.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {

inline constexpr uint32_t kChunkBytes = 64;
inline constexpr uint32_t kItemsPerChunk = kChunkBytes / sizeof(float);
inline constexpr uint32_t kWindow = 2;
inline constexpr uint64_t kOp = 7;

inline OpSpec f32_sum(uint64_t count) { return {Kind::kSum, DType::kF32, 0, 1, count, 99}; }

inline OpSpec f32_broadcast(uint64_t count, uint32_t root) {
  return {Kind::kBroadcast, DType::kF32, root, 1, count, 99};
}

inline OpSpec f32_sum(uint64_t count, std::vector<uint32_t> group) {
  OpSpec spec = f32_sum(count);
  spec.group = std::move(group);
  return spec;
}

inline OpSpec f32_rows(Kind kind, uint64_t count) { return {kind, DType::kF32, 0, 1, count, 99}; }

using Values = std::vector<float>;

// The sum of floats like these depends on the order of the additions.
inline Values values_of(uint32_t rank, uint64_t count, uint32_t seed = 0) {
  std::mt19937 random(1000 * seed + rank);
  Values values(count);
  for (float& value : values) value = std::ldexp(static_cast<float>(random() % 1000), static_cast<int>(random() % 40));
  return values;
}

inline Values total_of(const std::vector<Values>& by_rank) {
  Values total = by_rank[0];
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    for (size_t i = 0; i < total.size(); ++i) total[i] += by_rank[rank][i];
  }
  return total;
}

inline std::span<const std::byte> part_of(const Values& values, const Range& range) {
  return std::as_bytes(std::span(values).subspan(range.offset, range.count));
}

class ReducerTest : public testing::Test {
 protected:
  explicit ReducerTest(uint32_t worker_count = 3) {
    ReducerStateMachine::Job job{{}, {worker_count, 1, 0, kChunkBytes, kWindow}};
    for (uint32_t rank = 0; rank < worker_count; ++rank) job.worker_hosts.push_back(std::string(1, char('a' + rank)));
    reducer_ = std::make_unique<ReducerStateMachine>(std::move(job));
  }

  // The header of the `index`-th chunk of a round whose whole bucket is one shard.
  FrameHeader push_header(uint32_t rank, const OpSpec& spec, uint64_t index, uint64_t round = 0, uint64_t op = kOp) {
    const uint64_t item = item_bytes(spec.dtype);
    FrameHeader header;
    header.type = FrameType::kPush;
    header.op = op;
    header.round = round;
    header.offset = index * kChunkBytes / item;
    header.count = static_cast<uint32_t>(std::min<uint64_t>(kChunkBytes / item, spec.total_count - header.offset));
    header.last = header.offset + header.count == spec.total_count;
    const Range part = stake_of(spec, reducer_->worker_count(), rank).pushed({header.offset, header.count});
    header.payload_bytes = static_cast<uint32_t>(part.count * item);
    return header;
  }
  // What of a bucket with these values the rank pushes in this chunk, and what it is sent.
  std::span<const std::byte> pushed_part(uint32_t rank, const FrameHeader& header, const Values& values) {
    return part_of(values, stake(rank, header.op).pushed({header.offset, header.count}));
  }
  std::span<const std::byte> answered_part(uint32_t rank, const FrameHeader& header, const Values& values) {
    return part_of(values, stake(rank, header.op).answered({header.offset, header.count}));
  }
  Stake stake(uint32_t rank, uint64_t op) { return stake_of(specs_[op], reducer_->worker_count(), rank); }

  Status describe(uint32_t rank, const OpSpec& spec, uint64_t op = kOp, uint64_t round = 0) {
    specs_[op] = spec;
    FrameHeader header;
    header.op = op;
    header.round = round;
    const std::string text = "op" + std::to_string(op) + " of " + std::to_string(rank);
    return reducer_->describe_op(rank, header, {spec, text}, sent_);
  }
  // By every worker that takes part, alike.
  void describe(const OpSpec& spec, uint64_t op = kOp, uint64_t round = 0) {
    for (const uint32_t rank : members(spec)) ASSERT_TRUE(describe(rank, spec, op, round).ok());
  }
  std::vector<uint32_t> members(const OpSpec& spec) {
    std::vector<uint32_t> ranks(spec.member_count(reducer_->worker_count()));
    for (uint32_t place = 0; place < ranks.size(); ++place) ranks[place] = spec.rank_at(place);
    return ranks;
  }

  Status push(uint32_t rank, const FrameHeader& header, std::span<const std::byte> payload) {
    Result<std::span<std::byte>> memory = reducer_->start_push(rank, header, now_ms_, sent_);
    if (!memory.ok()) return memory.status();
    EXPECT_EQ(memory->size(), header.payload_bytes);
    if (!memory->empty()) std::memcpy(memory->data(), payload.data(), memory->size());
    return reducer_->finish_push(rank, header, now_ms_, sent_);
  }
  Status push(uint32_t rank, const FrameHeader& header, const Values& values) {
    return push(rank, header, pushed_part(rank, header, values));
  }
  // The same, read where it is.
  Status lend(uint32_t rank, const FrameHeader& header, const Values& values) {
    const std::shared_ptr<const std::byte> payload(std::shared_ptr<void>(), pushed_part(rank, header, values).data());
    Result<bool> is_read = reducer_->take_lent(rank, header, payload, now_ms_, sent_);
    return is_read.ok() && !*is_read ? push(rank, header, values) : is_read.status();
  }
  // A chunk of ones.
  Status push(uint32_t rank, const FrameHeader& header) {
    const Values ones(header.payload_bytes / sizeof(float), 1.0f);
    return push(rank, header, std::as_bytes(std::span(ones)));
  }

  // The frames of one type for one worker; forgets them.
  std::vector<Outgoing> take(uint32_t rank, FrameType type) {
    std::vector<Outgoing> taken;
    std::erase_if(sent_, [&](const Outgoing& frame) {
      const bool matches = frame.rank == rank && frame.header.type == type;
      if (matches) taken.push_back(frame);
      return matches;
    });
    return taken;
  }

  // What `rank` was sent of the round so far, in order and without gaps.
  Values take_results(uint32_t rank, const OpSpec& spec, uint64_t round = 0, uint64_t op = kOp) {
    Values values;
    uint64_t end = 0;
    bool last = false;
    for (const Outgoing& frame : take(rank, FrameType::kResult)) {
      EXPECT_EQ(frame.header.op, op);
      EXPECT_EQ(frame.header.round, round);
      EXPECT_EQ(frame.header.offset, end);
      EXPECT_EQ(frame.header.payload_bytes, frame.payload.size());
      EXPECT_FALSE(last) << "something came after the last chunk";
      last = frame.header.last;
      end += frame.header.count;
      const size_t before = values.size();
      values.resize(before + frame.payload.size() / sizeof(float));
      if (!frame.payload.empty()) std::memcpy(&values[before], frame.payload.data(), frame.payload.size());
    }
    EXPECT_EQ(last, end == spec.total_count);
    return values;
  }

  // The only fault that `rank` was sent, or ok.
  Status take_fault(uint32_t rank) {
    const std::vector<Outgoing> faults = take(rank, FrameType::kFault);
    EXPECT_LE(faults.size(), 1u);
    return faults.empty() ? Status() : decode_fault(faults[0].payload);
  }

  void expect_fault(uint32_t rank, Code code, const std::vector<std::string>& words) {
    const Status fault = take_fault(rank);
    EXPECT_EQ(fault.code(), code) << "rank " << rank << ": " << fault.message();
    for (const std::string& word : words) EXPECT_NE(fault.message().find(word), std::string::npos) << fault.message();
  }

  // Of one chunk.
  void complete_round(uint64_t round, const OpSpec& spec) {
    for (uint32_t rank = 0; rank < reducer_->worker_count(); ++rank) {
      ASSERT_TRUE(push(rank, push_header(rank, spec, 0, round)).ok());
    }
    sent_.clear();
  }

  std::unique_ptr<ReducerStateMachine> reducer_;
  std::map<uint64_t, OpSpec> specs_;  // by op, as described last
  std::vector<Outgoing> sent_;
  int64_t now_ms_ = 0;
};

}  // namespace jaxhetero
