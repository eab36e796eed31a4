// Optimizer programs: whatever bytes decode_program() takes, and programs that are mostly right, run on elements of any
// bits. Wide and narrow vectors, the fused kernel and the interpreter, and any pieces must give the same bits.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "xla_ffi/update/known_programs.h"
#include "xla_ffi/update/program.h"
#include "xla_ffi/update/run.h"
#include "xla_ffi/update/tensor_sum.h"

namespace {

using namespace jaxhetero;

constexpr size_t kMostSlots = 64;

Slot slot(FuzzedDataProvider& input, size_t count) {
  return input.ConsumeIntegralInRange<Slot>(0, static_cast<Slot>(count));
}

// Its slots are mostly there, and its temporaries mostly have a value.
Program make_program(FuzzedDataProvider& input) {
  Program program;
  program.input_count = input.ConsumeIntegralInRange<uint16_t>(0, 4);
  program.scalar_count = input.ConsumeIntegralInRange<uint16_t>(0, 4);
  program.temporary_count = input.ConsumeIntegralInRange<uint16_t>(1, 4);
  const auto last = static_cast<uint8_t>(kLastOpcode);
  const size_t slots = program.slot_count() - 1;
  const auto first = static_cast<Slot>(program.first_temporary());
  while (input.ConsumeBool() && program.instructions.size() < 20) {
    Instruction step;
    step.opcode = static_cast<Opcode>(input.ConsumeIntegralInRange<uint8_t>(1, last));
    step.to = static_cast<Slot>(first + slot(input, program.temporary_count - 1U));
    const size_t operands = operand_count(step.opcode);
    step.a = slot(input, slots);
    if (operands > 1) step.b = slot(input, slots);
    if (operands > 2) step.c = slot(input, slots);
    program.instructions.push_back(step);
  }
  if (program.instructions.empty()) return program;
  for (size_t i = input.ConsumeIntegralInRange<size_t>(0, 2); i > 0; --i) {
    program.summands.push_back({program.instructions.back().to});
    program.outputs.push_back(
        {program.instructions.back().to, input.ConsumeBool() ? OutputType::kF32 : OutputType::kBF16});
  }
  return program;
}

template <const auto& kKnown>
Program known_program() {
  Program program{kKnown.input_count, kKnown.scalar_count, kKnown.temporary_count, {}, {}, {}};
  program.instructions.assign(kKnown.steps.begin(), kKnown.steps.end());
  for (const Slot result : kKnown.results) {
    program.summands.push_back({result});
    program.outputs.push_back({result, OutputType::kF32});
  }
  return program;
}

Program choose_program(FuzzedDataProvider& input) {
  switch (input.ConsumeIntegralInRange(0, 5)) {
    case 0:
      return known_program<known::kAdamw>();
    case 1:
      return known_program<known::kLambSums>();
    case 2:
      return known_program<known::kLars>();
    default:
      return make_program(input);
  }
}

std::vector<float> numbers(FuzzedDataProvider& input, size_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = std::bit_cast<float>(input.ConsumeIntegral<uint32_t>());
  return values;
}

struct Found {
  std::vector<std::vector<std::byte>> outputs;
  std::vector<uint32_t> totals;

  bool operator==(const Found&) const = default;
};

class Tensor {
 public:
  Tensor(const Program& program, FuzzedDataProvider& input)
      : program_(program), count_(input.ConsumeIntegralInRange<size_t>(1, 40)) {
    scalars_ = numbers(input, program.scalar_count);
    for (size_t i = 0; i < program.input_count; ++i) inputs_.push_back(numbers(input, count_));
  }

  [[nodiscard]] size_t count() const { return count_; }

  Found run(Runner& runner, std::span<const size_t> cuts) const {
    Found found;
    for (const Output& output : program_.outputs) {
      found.outputs.emplace_back(count_ * (output.type == OutputType::kBF16 ? 2 : 4));
    }
    std::vector<std::vector<Subtree>> pieces(program_.summands.size());
    for (size_t i = 0; i + 1 < cuts.size(); ++i) run_piece(runner, cuts[i], cuts[i + 1], found, pieces);
    for (std::vector<Subtree>& subtrees : pieces) {
      Result<float> total = sum_of_tensor(std::move(subtrees), count_);
      if (!total.ok()) std::abort();
      found.totals.push_back(std::bit_cast<uint32_t>(*total));
    }
    return found;
  }

 private:
  void run_piece(Runner& runner, size_t begin, size_t end, Found& found,
                 std::vector<std::vector<Subtree>>& pieces) const {
    const size_t count = end - begin;
    std::vector<std::span<const float>> from;
    for (const auto& values : inputs_) from.push_back(std::span(values).subspan(begin, count));
    std::vector<std::span<std::byte>> to;
    for (auto& bytes : found.outputs) {
      const size_t item = bytes.size() / count_;
      to.push_back(std::span(bytes).subspan(begin * item, count * item));
    }
    std::vector<PieceSum> totals(pieces.size(), PieceSum(begin));
    if (!runner.run({from, scalars_, to, count, begin}, totals).ok()) std::abort();
    for (size_t i = 0; i < totals.size(); ++i) {
      const auto subtrees = totals[i].subtrees();
      pieces[i].insert(pieces[i].begin(), subtrees.begin(), subtrees.end());
    }
  }

  const Program& program_;
  size_t count_;
  std::vector<float> scalars_;
  std::vector<std::vector<float>> inputs_;
};

void run_all(const Program& program, FuzzedDataProvider& input) {
  const Tensor tensor(program, input);
  const size_t count = tensor.count();
  std::vector<size_t> cuts = {0, input.ConsumeIntegralInRange<size_t>(0, count),
                              input.ConsumeIntegralInRange<size_t>(0, count), count};
  std::ranges::sort(cuts);
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  const std::vector<size_t> whole = {0, count};
  Runner runner(program);
  const Found found = tensor.run(runner, whole);
  if (tensor.run(runner, cuts) != found) std::abort();
  runner.use_baseline();
  if (tensor.run(runner, whole) != found) std::abort();
  runner.interpret();
  if (tensor.run(runner, cuts) != found) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  FuzzedDataProvider input(data + 1, size - 1);
  const bool is_made = data[0] % 2 == 0;
  const Bytes made = is_made ? encode(choose_program(input)) : Bytes();
  const auto bytes = is_made ? std::span(made) : std::as_bytes(std::span(data + 1, size - 1));
  Result<Program> program = decode_program(bytes);
  if (!program.ok()) return 0;
  const Bytes again = encode(*program);
  if (!std::ranges::equal(again, bytes)) std::abort();
  if (program->slot_count() <= kMostSlots) run_all(*program, input);
  return 0;
}
