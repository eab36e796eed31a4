#include "xla_ffi/update/program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "tests/cc/strange_rounding.h"
#include "xla_ffi/update/run.h"
#include "xla_ffi/update/tensor_sum.h"

namespace jaxhetero {
namespace {

using enum Opcode;

// w -= rate * g, and the sum of g * g.
Program example() {
  Program program;
  program.input_count = 2;
  program.scalar_count = 1;
  program.temporary_count = 2;
  program.instructions = {{kMul, 3, 0, 2, 0}, {kSub, 3, 1, 3, 0}, {kMul, 4, 0, 0, 0}};
  program.summands = {{4}};
  program.outputs = {{3, OutputType::kF32}, {3, OutputType::kBF16}};
  return program;
}

TEST(ProgramTest, IsReadAsItWasWritten) {
  const Bytes bytes = encode(example());
  Result<Program> program = decode_program(bytes);
  ASSERT_TRUE(program.ok()) << program.status().message();
  EXPECT_EQ(program->instructions, example().instructions);
  EXPECT_EQ(encode(*program), bytes);
}

TEST(ProgramTest, EveryPrefixIsRefused) {
  const Bytes bytes = encode(example());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(decode_program(std::span(bytes).first(size)).status().code(), Code::kProtocol) << size;
  }
}

TEST(ProgramTest, OperationsThatAreNotThereAreRefused) {
  for (int opcode = 0; opcode < 256; ++opcode) {
    Program program = example();
    program.instructions[0].opcode = static_cast<Opcode>(opcode);
    const bool is_known = operand_count(program.instructions[0].opcode) >= 2;
    EXPECT_EQ(decode_program(encode(program)).ok(), is_known) << opcode;
  }
}

// Steps of example() on a tensor that lies at `first`, in place.
struct Tensor {
  explicit Tensor(size_t count) : gradient(count), weights(count), sent(count) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (float& value : gradient) value = normal(random);
    for (float& value : weights) value = normal(random);
  }

  Status run(Runner& runner, size_t begin, size_t count, PieceSum& total) {
    const std::vector<std::span<const float>> inputs = {std::span(gradient).subspan(begin, count),
                                                        std::span(weights).subspan(begin, count)};
    const std::vector<float> scalars = {0.25f};
    const std::vector<std::span<std::byte>> outputs = {std::as_writable_bytes(std::span(weights).subspan(begin, count)),
                                                       std::as_writable_bytes(std::span(sent).subspan(begin, count))};
    return runner.run({inputs, scalars, outputs, count, begin}, std::span(&total, 1));
  }

  std::vector<float> gradient;
  std::vector<float> weights;
  std::vector<uint16_t> sent;
};

TEST(ProgramTest, UpdatesInPlaceWhateverTheThreadsMode) {
  Tensor tensor(1000);
  const Tensor before = tensor;
  Runner runner(example());
  PieceSum total(0);
  {
    const StrangeRounding mode;
    ASSERT_TRUE(tensor.run(runner, 0, 1000, total).ok());
  }
  for (size_t i = 0; i < 1000; ++i) {
    EXPECT_EQ(tensor.weights[i], before.weights[i] - 0.25f * before.gradient[i]);
    const float sent = std::bit_cast<float>(static_cast<uint32_t>(tensor.sent[i]) << 16);
    EXPECT_NEAR(sent, tensor.weights[i], std::abs(tensor.weights[i]) / 256);
  }
}

TEST(ProgramTest, PiecesGiveTheBitsOfTheWhole) {
  constexpr size_t kCount = 9001;
  Runner runner(example());
  Tensor whole(kCount);
  PieceSum total(0);
  ASSERT_TRUE(whole.run(runner, 0, kCount, total).ok());
  Result<float> sum = sum_of_tensor({total.subtrees().begin(), total.subtrees().end()}, kCount);
  ASSERT_TRUE(sum.ok());
  std::mt19937 random(7);
  for (int turn = 0; turn < 20; ++turn) {
    Tensor cut(kCount);
    std::vector<Subtree> subtrees;
    for (size_t begin = 0; begin < kCount;) {
      const size_t count = std::min<size_t>(kCount - begin, 1 + random() % 5000);
      PieceSum piece(begin);
      ASSERT_TRUE(cut.run(runner, begin, count, piece).ok());
      subtrees.insert(subtrees.begin(), piece.subtrees().begin(), piece.subtrees().end());
      begin += count;
    }
    EXPECT_EQ(cut.weights, whole.weights);
    EXPECT_EQ(cut.sent, whole.sent);
    Result<float> again = sum_of_tensor(std::move(subtrees), kCount);
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(*again, *sum);
  }
}

TEST(TensorSumTest, OfWhatIsNotTheWholeTensorThereIsNone) {
  const Subtree left{0, 2, 1.0};
  const Subtree right{4, 2, 2.0};
  EXPECT_EQ(*sum_of_tensor({right, left}, 8), 3.0f);
  const std::vector<std::vector<Subtree>> wrong = {
      {}, {left}, {right}, {left, left, right}, {left, right, {8, 0, 1.0}}, {{1, 2, 1.0}}, {{0, 64, 1.0}}};
  for (const auto& subtrees : wrong) EXPECT_EQ(sum_of_tensor(subtrees, 8).status().code(), Code::kProtocol);
  EXPECT_FALSE(sum_of_tensor({left}, 3).ok());
}

TEST(TensorSumTest, NanIsAlwaysTheSame) {
  PieceSum piece(0);
  const std::vector<float> values = {-std::numeric_limits<float>::quiet_NaN(), 1.0f};
  piece.append(values);
  Result<float> total = sum_of_tensor({piece.subtrees().begin(), piece.subtrees().end()}, 2);
  ASSERT_TRUE(total.ok());
  EXPECT_EQ(std::bit_cast<uint32_t>(*total), std::bit_cast<uint32_t>(std::numeric_limits<float>::quiet_NaN()));
}

}  // namespace
}  // namespace jaxhetero
