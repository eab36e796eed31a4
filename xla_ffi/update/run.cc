#include "xla_ffi/update/run.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "xla_ffi/sum/arithmetic.h"
#include "xla_ffi/update/operations.h"

namespace jaxhetero {
namespace {

size_t item_bytes(OutputType type) { return type == OutputType::kBF16 ? sizeof(BF16) : sizeof(float); }

template <bool kIsWide>
[[gnu::always_inline]] inline void interpret_all(const Program& program, std::span<const float* const> slots,
                                                 float* temporaries, size_t count) {
  using Run = Operations<kIsWide>;
  for (const Instruction& step : program.instructions) {
    const float* a = slots[step.a];
    const float* b = slots[step.b];
    const float* c = slots[step.c];
    float* to = temporaries + (step.to - program.first_temporary()) * kProgramBlock;
    dispatch(step.opcode, [&]<Opcode kOpcode>() __attribute__((always_inline)) {
      constexpr size_t kOperands = operand_count(kOpcode);
      for (size_t i = 0; i < count; i += Run::kLanes) {
        typename Run::Vector x = {};
        typename Run::Vector y = {};
        typename Run::Vector z = {};
        Run::load(a + i, x);
        if constexpr (kOperands > 1) Run::load(b + i, y);
        if constexpr (kOperands > 2) Run::load(c + i, z);
        Run::template apply<kOpcode>(x, y, z, x);
        Run::store(x, to + i);
      }
    });
  }
}

void interpret_baseline(const Program& program, std::span<const float* const> slots, float* temporaries, size_t count) {
  interpret_all<false>(program, slots, temporaries, count);
}
JAXHETERO_WIDE void interpret_wide(const Program& program, std::span<const float* const> slots, float* temporaries,
                                   size_t count) {
  interpret_all<true>(program, slots, temporaries, count);
}

template <bool kIsWide>
[[gnu::always_inline]] inline void put_out_any(const float* values, OutputType type, std::byte* out, size_t count) {
  using Run = Operations<kIsWide>;
  std::array<float, kProgramBlock> canonical;
  const size_t padded = (count + kStrip - 1) / kStrip * kStrip;
  float* const to = type == OutputType::kF32 && padded == count ? reinterpret_cast<float*>(out) : canonical.data();
  for (size_t i = 0; i < padded; i += Run::kLanes) {
    typename Run::Vector value;
    Run::load(values + i, value);
    Run::make_canonical(value);
    Run::store(value, to + i);
  }
  if (type == OutputType::kBF16) {
    store_all<kIsWide>(to, reinterpret_cast<BF16*>(out), count);
  } else if (to == canonical.data()) {
    std::copy_n(to, count, reinterpret_cast<float*>(out));
  }
}

void put_out_baseline(const float* values, OutputType type, std::byte* out, size_t count) {
  put_out_any<false>(values, type, out, count);
}
JAXHETERO_WIDE void put_out_wide(const float* values, OutputType type, std::byte* out, size_t count) {
  put_out_any<true>(values, type, out, count);
}

}  // namespace

Runner::Runner(Program program)
    : program_(std::move(program)),
      fused_(find_fused(program_)),
      is_wide_(have_wide_vectors()),
      memory_((size_t{program_.scalar_count} + program_.temporary_count) * kProgramBlock),
      padded_(program_.input_count * kStrip),
      slots_(program_.slot_count()) {
  for (size_t slot = program_.input_count; slot < slots_.size(); ++slot) {
    slots_[slot] = memory_.data() + (slot - program_.input_count) * kProgramBlock;
  }
}

std::string_view Runner::kernel() const { return fused_ == nullptr ? std::string_view() : fused_->name; }

Status Runner::run(const Operands& operands, std::span<PieceSum> totals) {
  if (Status status = check(operands, totals); !status.ok()) return status;
  const DefaultFloatingPoint mode;
  fill_scalars(operands.scalars);
  for (size_t at = 0; at < operands.count;) {
    // Whole subtrees of sums, and then what is less than a strip by itself.
    const size_t to_boundary = kProgramBlock - (operands.first + at) % kProgramBlock;
    size_t count = std::min(to_boundary, operands.count - at);
    if (count > kStrip) count -= count % kStrip;
    run_block(operands, at, count, totals);
    at += count;
  }
  return {};
}

Status Runner::check(const Operands& operands, std::span<PieceSum> totals) const {
  const auto is_wrong = [](const char* what) { return Status(Code::kInternal, std::string("program: ") + what); };
  if (operands.inputs.size() != program_.input_count) return is_wrong("another number of inputs");
  if (operands.scalars.size() != program_.scalar_count) return is_wrong("another number of scalars");
  if (operands.outputs.size() != program_.outputs.size()) return is_wrong("another number of outputs");
  if (totals.size() != program_.summands.size()) return is_wrong("another number of totals");
  for (const auto& input : operands.inputs) {
    if (input.size() != operands.count) return is_wrong("an input of another size");
  }
  for (size_t i = 0; i < operands.outputs.size(); ++i) {
    const size_t bytes = operands.count * item_bytes(program_.outputs[i].type);
    if (operands.outputs[i].size() != bytes) return is_wrong("an output of another size");
  }
  return {};
}

void Runner::fill_scalars(std::span<const float> scalars) {
  for (size_t i = 0; i < scalars.size(); ++i) {
    std::fill_n(memory_.begin() + static_cast<ptrdiff_t>(i * kProgramBlock), kProgramBlock, scalars[i]);
  }
}

// `count` is a multiple of a strip, or less than one.
void Runner::run_block(const Operands& operands, size_t at, size_t count, std::span<PieceSum> totals) {
  if (count % kStrip == 0) {
    for (size_t i = 0; i < operands.inputs.size(); ++i) slots_[i] = operands.inputs[i].data() + at;
    compute(count);
  } else {
    pad_inputs(operands, at, count);
    compute(kStrip);
  }
  for (size_t i = 0; i < totals.size(); ++i) {
    totals[i].append({temporary(program_.summands[i].from), count});
  }
  put_out(operands, at, count);
}

void Runner::pad_inputs(const Operands& operands, size_t at, size_t count) {
  for (size_t i = 0; i < operands.inputs.size(); ++i) {
    float* strip = padded_.data() + i * kStrip;
    std::copy_n(operands.inputs[i].data() + at, count, strip);
    slots_[i] = strip;
  }
}

void Runner::compute(size_t count) {
  float* const temporaries = memory_.data() + program_.scalar_count * kProgramBlock;
  if (fused_ != nullptr) {
    (is_wide_ ? fused_->wide : fused_->baseline)(slots_, temporaries, count);
  } else {
    (is_wide_ ? interpret_wide : interpret_baseline)(program_, slots_, temporaries, count);
  }
}

void Runner::put_out(const Operands& operands, size_t at, size_t count) {
  const auto put = is_wide_ ? put_out_wide : put_out_baseline;
  for (size_t i = 0; i < operands.outputs.size(); ++i) {
    const Output& output = program_.outputs[i];
    put(temporary(output.from), output.type, operands.outputs[i].data() + at * item_bytes(output.type), count);
  }
}

const float* Runner::temporary(Slot slot) const { return slots_[slot]; }

}  // namespace jaxhetero
