#include "xla_ffi/update/bucket_update.h"

#include <gtest/gtest.h>

#include <bit>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "tests/cc/printing.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/update/program.h"
#include "xla_ffi/update/tensor_sum.h"

namespace jaxhetero {
namespace {

using enum Opcode;

constexpr uint64_t kCount = 700;

uint32_t bits(float value) { return std::bit_cast<uint32_t>(value); }

// w -= rate * g with a rate that is twice what the workers send, for two leaves; and the sum of g * g of the first one.
UpdateDescription example() {
  Program twice{0, 1, 1, {{kAdd, 1, 0, 0, 0}}, {}, {{1, OutputType::kF32}}};
  Program step{2, 1, 2, {{kMul, 3, 0, 2, 0}, {kSub, 3, 1, 3, 0}}, {}, {{3, OutputType::kF32}}};
  Program square{2, 1, 2, {{kMul, 3, 0, 2, 0}, {kSub, 3, 1, 3, 0}, {kMul, 4, 0, 0, 0}}, {{4}}, {{3, OutputType::kF32}}};
  UpdateDescription update;
  update.sent_count = 1;
  update.total_count = 1;
  update.programs = {encode(twice), encode(step), encode(square)};
  update.derived = {{0, {{Origin::kSent, 0}}}};
  update.leaves = {{300, {2, {{Origin::kDerived, 0}}}, {0}}, {400, {1, {{Origin::kConstant, bits(0.5f)}}}, {}}};
  return update;
}

std::vector<float> some_values(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(kCount);
  for (float& value : values) value = static_cast<float>(random() % 1000) / 16;
  return values;
}

TEST(BucketUpdate, RunsOnAnyParts) {
  Runners runners;
  const std::vector<float> gradient = some_values(1);
  const std::vector<float> before = some_values(2);
  for (const uint64_t part : {uint64_t{1}, uint64_t{7}, uint64_t{299}, uint64_t{300}, kCount}) {
    Result<BucketUpdate> update = BucketUpdate::make(example(), kCount, runners);
    ASSERT_TRUE(update.ok()) << update.status().message();
    const float sent = 0.125f;
    ASSERT_TRUE(update->start_step({&sent, 1}).ok());
    std::vector<float> weights = before;
    std::vector<PartialTotal> totals;
    for (uint64_t first = 0; first < kCount; first += part) {
      const uint64_t count = std::min(part, kCount - first);
      const std::vector<std::span<float>> kept = {std::span(weights).subspan(first, count)};
      ASSERT_TRUE(update->run(first, {std::span(gradient).subspan(first, count), kept, {}}, totals).ok());
    }
    float sum = 0;
    for (uint64_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(weights[i], before[i] - (i < 300 ? 0.25f : 0.5f) * gradient[i]) << i;
      if (i < 300) sum += gradient[i] * gradient[i];
    }
    std::vector<Subtree> subtrees;
    for (const PartialTotal& total : totals) {
      EXPECT_EQ(total.total, 0u);
      subtrees.insert(subtrees.end(), total.sum.subtrees().begin(), total.sum.subtrees().end());
    }
    EXPECT_LE(subtrees.size(), 16u) << "parts that follow each other make one piece";
    Result<float> total = sum_of_tensor(subtrees, 300);
    ASSERT_TRUE(total.ok());
    EXPECT_NEAR(*total, sum, 1e-4 * sum);
  }
}

TEST(BucketUpdate, ComesBackAsItWas) {
  const Bytes bytes = encode(example());
  Result<UpdateDescription> update = decode_update(bytes);
  ASSERT_TRUE(update.ok());
  EXPECT_EQ(encode(*update), bytes);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(decode_update(std::span(bytes).first(size)).status().code(), Code::kProtocol) << size;
  }
}

TEST(BucketUpdate, RunsAProgramOnceForAllBuckets) {
  Runners runners;
  const std::shared_ptr<Runner> first = *runners.find(example().programs[1]);
  EXPECT_EQ(*runners.find(example().programs[1]), first);
  EXPECT_NE(*runners.find(example().programs[2]), first);
}

struct Spoiling {
  std::string name;
  std::function<void(UpdateDescription&)> change;
};

class RefusedUpdate : public testing::TestWithParam<Spoiling> {};

TEST_P(RefusedUpdate, IsAProtocolError) {
  Runners runners;
  UpdateDescription update = example();
  GetParam().change(update);
  EXPECT_EQ(BucketUpdate::make(update, kCount, runners).status().code(), Code::kProtocol);
}

INSTANTIATE_TEST_SUITE_P(
    All, RefusedUpdate,
    testing::Values(
        Spoiling{"too_few_elements", [](UpdateDescription& u) { u.leaves[1].count = 399; }},
        Spoiling{"too_many_elements", [](UpdateDescription& u) { u.leaves[1].count = 401; }},
        Spoiling{"elements_that_overflow", [](UpdateDescription& u) { u.leaves[1].count = ~uint64_t{0} - 200; }},
        Spoiling{"no_program", [](UpdateDescription& u) { u.programs[1].pop_back(); }},
        Spoiling{"program_that_is_not_there", [](UpdateDescription& u) { u.leaves[0].pass.program = 3; }},
        Spoiling{"scalar_that_is_not_sent", [](UpdateDescription& u) { u.derived[0].scalars[0].number = 1; }},
        Spoiling{"scalar_that_needs_itself",
                 [](UpdateDescription& u) { u.derived[0].scalars[0] = {Origin::kDerived, 0}; }},
        Spoiling{"scalar_from_nowhere", [](UpdateDescription& u) { u.derived[0].scalars[0].origin = Origin{}; }},
        Spoiling{"too_few_scalars", [](UpdateDescription& u) { u.leaves[0].pass.scalars.clear(); }},
        Spoiling{"derived_by_a_program_of_arrays", [](UpdateDescription& u) { u.derived[0].program = 1; }},
        Spoiling{"total_that_is_not_there", [](UpdateDescription& u) { u.leaves[0].totals[0] = 1; }},
        Spoiling{"total_of_no_sum", [](UpdateDescription& u) { u.leaves[1].totals = {0}; }},
        Spoiling{"weights_in_another_type", [](UpdateDescription& u) { u.weights = OutputType::kBF16; }},
        Spoiling{"outputs_of_a_measure", [](UpdateDescription& u) { u.has_outputs = false; }},
        Spoiling{"leaf_with_a_program_of_numbers",
                 [](UpdateDescription& u) { u.leaves[1].pass = {0, {{Origin::kConstant, 0}}}; }}),
    [](const auto& info) { return info.param.name; });

TEST(BucketUpdate, WantsTheScalarsThatItNeeds) {
  Runners runners;
  Result<BucketUpdate> update = BucketUpdate::make(example(), kCount, runners);
  EXPECT_EQ(update->start_step({}).code(), Code::kProtocol);
}

}  // namespace
}  // namespace jaxhetero
