#include "xla_ffi/worker/part_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/shard_plan.h"

namespace jaxhetero {
namespace {

constexpr JobShape kJob{.worker_count = 4, .reducer_count = 2};

OpSpec spec_of(uint64_t count, Kind kind = Kind::kSum, DType dtype = DType::kF32) {
  return {kind, dtype, 0, 1, count, 0, 0};
}

uint64_t bytes_of_part(const RoundPart& part) {
  return part.request.spec.total_count * item_bytes(part.request.spec.dtype);
}

std::vector<RoundPart> cut(uint32_t strand_count, const OpSpec& spec, uint64_t op = 7) {
  RoundRequest request;
  request.op = op;
  request.spec = spec;
  return PartPlan(kJob, std::vector<uint32_t>(strand_count, 1)).cut(std::move(request));
}

// By default a part has 64 KiB for each reducer; where the cost of a message is known, what makes its bytes cost as
// much.
TEST(PartPlan, CutsASmallBucketIntoMorePartsWhereTheCostOfAMessageIsKnown) {
  const auto part_count = [](const MessageCosts& costs) {
    return PartPlan(kJob, std::vector<uint32_t>(8, 1), costs).part_count(spec_of(65'536));  // 128 KiB for each
  };
  EXPECT_EQ(part_count({}), 2u);
  EXPECT_EQ(part_count({.message_ps = 12'000'000, .byte_fs = 300'000}), 3u) << "40 KB";
  EXPECT_EQ(part_count({.message_ps = 1'000'000, .byte_fs = 300'000}), 8u) << "16 KiB, the least";
  EXPECT_EQ(part_count({.message_ps = 90'000'000, .byte_fs = 300'000}), 2u);
}

TEST(PartPlan, CutsALargeBucketIntoEqualPartsOnCacheLines) {
  for (const uint32_t strands : {1u, 2u, 3u, 7u, 32u}) {
    for (const uint64_t count : {uint64_t{10'000'000}, uint64_t{12'345'679}, uint64_t{1} << 59}) {
      const std::vector<RoundPart> parts = cut(strands, spec_of(count));
      ASSERT_EQ(parts.size(), strands);
      uint64_t total = 0;
      for (uint32_t strand = 0; strand < strands; ++strand) {
        const OpSpec& spec = parts[strand].request.spec;
        EXPECT_EQ(parts[strand].strand, strand);
        EXPECT_NEAR(static_cast<double>(spec.total_count), static_cast<double>(count) / strands, 32);
        EXPECT_EQ(total * sizeof(float) % 64, 0u) << "the part begins within a cache line";
        EXPECT_EQ(spec.part, strand);
        total += spec.total_count;
      }
      EXPECT_EQ(total, count);
    }
  }
}

// Of several interfaces, a faster one carries more.
TEST(PartPlan, GivesEachStrandItsShare) {
  RoundRequest request;
  request.spec = spec_of(16'000'000);
  const std::vector<RoundPart> parts = PartPlan(kJob, {16, 8}).cut(request);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_NEAR(static_cast<double>(bytes_of_part(parts[0])), 2.0 * static_cast<double>(bytes_of_part(parts[1])), 128);
}

TEST(PartPlan, GivesASmallBucketToOneStrandAndSpreadsThem) {
  std::map<uint32_t, int> by_strand;
  for (uint64_t op = 0; op < 4000; ++op) {
    const std::vector<RoundPart> parts = cut(4, spec_of(op % 3 * 10'000), op);
    ASSERT_EQ(parts.size(), 1u);
    EXPECT_EQ(parts[0].request.spec, spec_of(op % 3 * 10'000)) << "the round is as it was";
    ++by_strand[parts[0].strand];
  }
  ASSERT_EQ(by_strand.size(), 4u);
  for (const auto& [strand, count] : by_strand) EXPECT_NEAR(count, 1000, 150) << strand;
}

// A part has 64 KiB for each of six reducers, or as much as there is.
TEST(PartPlan, GivesABucketBetweenSmallAndLargeToSomeStrands) {
  const PartPlan plan({.worker_count = 4, .reducer_count = 2, .colocated_count = 4}, std::vector<uint32_t>(4, 1));
  std::map<uint32_t, uint64_t> bytes_by_strand;
  for (uint64_t op = 0; op < 4000; ++op) {
    RoundRequest request;
    request.op = op;
    request.spec = spec_of(3 * 6 * 16'384 - (op % 2 == 0 ? 0 : 1));
    const std::vector<RoundPart> parts = plan.cut(std::move(request));
    ASSERT_EQ(parts.size(), op % 2 == 0 ? 3u : 2u);
    for (size_t number = 0; number < parts.size(); ++number) {
      EXPECT_EQ(parts[number].strand, (parts[0].strand + number) % 4);
      EXPECT_EQ(parts[number].request.spec.part, number);
      bytes_by_strand[parts[number].strand] += bytes_of_part(parts[number]);
    }
  }
  for (const auto& [strand, bytes] : bytes_by_strand) EXPECT_NEAR(static_cast<double>(bytes), 1.18e9, 0.05e9) << strand;
}

// Otherwise no reducer would find out that the workers disagree: one sends a part here, and another one nothing.
TEST(PartPlan, GivesAnOpOneNumberOnAStrandWhateverTheBucketsSize) {
  for (uint64_t op = 0; op < 100; ++op) {
    const RoundPart small = cut(4, spec_of(10), op).at(0);
    const RoundPart larger = cut(4, spec_of(100'000), op).at(0);
    const RoundPart large = cut(4, spec_of(10'000'000), op).at(small.strand);
    EXPECT_EQ(small.request.op, larger.request.op);
    EXPECT_EQ(small.request.op, large.request.op);
    EXPECT_NE(small.request.spec, large.request.spec);
  }
}

// Nor where they disagree about the group, and so about the op's number.
TEST(PartPlan, SendsSmallOpsOfOneCallThroughOneStrandWhateverTheirGroups) {
  OpSpec spec = spec_of(10);
  for (spec.site = 1; spec.site < 100; ++spec.site) {
    spec.group = {0, 2};
    const uint32_t strand = cut(4, spec, 2 * spec.site).at(0).strand;
    spec.group = {0, 1, 2};
    EXPECT_EQ(cut(4, spec, 2 * spec.site + 1).at(0).strand, strand);
  }
}

TEST(PartPlan, GivesThePartsOfAnOpNumbersOfTheirOwn) {
  std::vector<uint64_t> ops;
  for (uint64_t op = 0; op < 1000; ++op) {
    for (const RoundPart& part : cut(8, spec_of(10'000'000), op)) ops.push_back(part.request.op);
  }
  std::ranges::sort(ops);
  EXPECT_EQ(std::ranges::adjacent_find(ops), ops.end());
}

// The bytes of a model's gradients, in buckets of 16 MiB and a rest.
TEST(PartPlan, GivesEveryStrandEqualBytes) {
  for (const uint64_t model_bytes : {uint64_t{102'228'128}, uint64_t{1'344'000'000}, uint64_t{1'000'000'000}}) {
    for (const uint64_t bucket_bytes : {uint64_t{16} << 20, model_bytes}) {
      for (const uint32_t strands : {2u, 4u, 8u}) {
        std::vector<uint64_t> bytes(strands);
        for (uint64_t at = 0; at < model_bytes; at += bucket_bytes) {
          const uint64_t count = std::min(bucket_bytes, model_bytes - at) / sizeof(float);
          for (const RoundPart& part : cut(strands, spec_of(count), at)) bytes[part.strand] += bytes_of_part(part);
        }
        const auto [least, most] = std::ranges::minmax(bytes);
        EXPECT_LE(static_cast<double>(most - least), 0.01 * static_cast<double>(least));
      }
    }
  }
}

class PartMemory : public testing::TestWithParam<bool> {};

// Every element of a bucket is in one part, wherever its leaves lie.
TEST_P(PartMemory, CoversTheLeavesOnce) {
  const size_t item = GetParam() ? sizeof(float) : 2;  // in memory; 2 on the wire
  const std::vector<size_t> leaf_counts = {1, 0, 300'001, 77, 500'000};
  std::vector<Bytes> leaves;
  RoundRequest request;
  request.spec = spec_of(std::accumulate(leaf_counts.begin(), leaf_counts.end(), size_t{0}), Kind::kSum, DType::kBF16);
  request.narrows = request.widens = GetParam();
  for (const size_t count : leaf_counts) {
    leaves.emplace_back(count * item);
    request.inputs.append(leaves.back().data(), leaves.back().size());
  }
  request.outputs = request.inputs;
  for (const RoundPart& part : PartPlan(kJob, {1, 1, 1}).cut(request)) {
    for (const Leaves& taken : {part.request.inputs, part.request.outputs}) {
      EXPECT_EQ(taken.bytes(), part.request.spec.total_count * item);
      std::vector<iovec> pieces;
      taken.slice(0, taken.bytes(), pieces);
      for (const iovec& piece : pieces) {
        auto* const data = static_cast<std::byte*>(piece.iov_base);
        for (size_t i = 0; i < piece.iov_len; ++i) data[i] = std::byte(std::to_integer<int>(data[i]) + 1);
      }
    }
  }
  for (const Bytes& leaf : leaves)
    EXPECT_TRUE(std::ranges::all_of(leaf, [](std::byte b) { return b == std::byte{2}; }));
}

INSTANTIATE_TEST_SUITE_P(Converting, PartMemory, testing::Bool());

// A rank's row of a part is the part of its row.
TEST(PartPlan, CutsRowsIntoColumns) {
  constexpr uint64_t kWidth = 600'001;
  std::vector<uint16_t> bucket(4 * kWidth);
  for (size_t i = 0; i < bucket.size(); ++i) bucket[i] = static_cast<uint16_t>(i / kWidth);
  std::vector<uint16_t> row(kWidth);
  RoundRequest request;
  request.spec = spec_of(4 * kWidth, Kind::kScatter, DType::kU16);
  request.inputs.append(bucket.data(), bucket.size() * 2);
  request.outputs.append(row.data(), row.size() * 2);
  uint64_t first = 0;
  for (const RoundPart& part : PartPlan(kJob, {1, 1}).cut(request)) {
    const RoundRequest& taken = part.request;
    const uint64_t width = taken.spec.total_count / 4;
    EXPECT_EQ(check(taken.spec, 4).code(), Code::kOk);
    EXPECT_EQ(taken.outputs.bytes(), width * 2);
    for (uint32_t rank = 0; rank < 4; ++rank) {
      std::vector<iovec> pieces;
      taken.inputs.slice(rank * width * 2, width * 2, pieces);
      ASSERT_EQ(pieces.size(), 1u);
      EXPECT_EQ(pieces[0].iov_base, bucket.data() + rank * kWidth + first);
      EXPECT_EQ(taken.sliced.place.whole_offset(rank * width * 2), (rank * kWidth + first) * 2);
    }
    EXPECT_EQ(taken.sliced.place.whole_offset(10), first * 2 + 10);
    first += width;
  }
  EXPECT_EQ(first, kWidth);
}

// New weights may take half as many bytes as their gradients.
TEST(PartPlan, ResultsOfAnotherDtypeHaveTheirOwnPlace) {
  constexpr uint64_t kCount = 2'000'000;
  std::vector<float> gradients(kCount);
  std::vector<uint16_t> weights(kCount);
  RoundRequest request;
  request.spec = spec_of(kCount, Kind::kUpdate, DType::kF32);
  request.spec.state.weights = DType::kBF16;
  request.inputs.append(gradients.data(), kCount * 4);
  request.outputs.append(weights.data(), kCount * 2);
  const std::vector<RoundPart> parts = PartPlan(kJob, {1, 1}).cut(request);
  ASSERT_EQ(parts.size(), 2u);
  const SlicedTransfer& second = parts[1].request.sliced;
  const uint64_t first = parts[0].request.spec.total_count;
  EXPECT_EQ(second.place.whole_offset(8), first * 4 + 8);
  EXPECT_EQ(second.result_place.whole_offset(8), first * 2 + 8);
}

TEST(SlicedTransfer, ReportsWhereTheBytesLieInTheWhole) {
  std::vector<std::pair<size_t, size_t>> reported;
  SlicedTransfer sliced;
  sliced.received = [&](size_t offset, size_t bytes) { reported.emplace_back(offset, bytes); };
  sliced.result_place = {.piece_bytes = 100, .first = 40, .distance = 1000};
  sliced.report(90, 130);
  sliced.report(50, 60);  // the last ten of them again
  const std::vector<std::pair<size_t, size_t>> expected = {{130, 10}, {1040, 100}, {2040, 20}, {90, 40}};
  EXPECT_EQ(reported, expected);
}

TEST(SlicedTransfer, WaitsForTheLastByteOfAPart) {
  const auto ready = std::make_shared<std::atomic<size_t>>(1089);
  SlicedTransfer sliced;
  sliced.ready_bytes = ready;
  sliced.place = {.piece_bytes = 100, .first = 40, .distance = 1000};
  EXPECT_TRUE(sliced.is_ready(0, 100));
  EXPECT_FALSE(sliced.is_ready(90, 60));
  *ready = 1090;
  EXPECT_TRUE(sliced.is_ready(90, 60));
  EXPECT_TRUE(sliced.is_ready(290, 0)) << "nothing is always ready";
}

}  // namespace
}  // namespace jaxhetero
