#include "xla_ffi/update/program.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

namespace jaxhetero {
// Not in an unnamed namespace: Writer and Reader have to find them.
template <typename Codec, IsA<Instruction> Message>
void fields(Codec& codec, Message& instruction) {
  codec(instruction.opcode, instruction.to, instruction.a, instruction.b, instruction.c);
}

template <typename Codec, IsA<Output> Message>
void fields(Codec& codec, Message& output) {
  codec(output.from, output.type);
}

template <typename Codec, IsA<Summand> Message>
void fields(Codec& codec, Message& summand) {
  codec(summand.from);
}

template <typename Codec, IsA<Program> Message>
void fields(Codec& codec, Message& program) {
  codec(program.input_count, program.scalar_count, program.temporary_count);
  codec.list(program.instructions, kMaxInstructions);
  codec.list(program.summands, kMaxSummands);
  codec.list(program.outputs, kMaxOutputs);
}

namespace {

// Follows the instructions and notes which temporaries have a value.
class Checker {
 public:
  explicit Checker(const Program& program) : program_(program), is_written_(program.temporary_count) {}

  Status check() {
    for (size_t i = 0; i < program_.instructions.size(); ++i) {
      if (!take(program_.instructions[i])) return malformed("program: instruction " + std::to_string(i));
    }
    for (const Summand& summand : program_.summands) {
      if (!is_result(summand.from)) return malformed("program: a total of what is no result");
    }
    for (const Output& output : program_.outputs) {
      const bool is_known = output.type == OutputType::kF32 || output.type == OutputType::kBF16;
      if (!is_known || !is_result(output.from)) return malformed("program: an output of what is no result");
    }
    return {};
  }

 private:
  bool take(const Instruction& instruction) {
    const std::array<Slot, 3> operands = {instruction.a, instruction.b, instruction.c};
    const size_t count = operand_count(instruction.opcode);
    const auto used = std::span(operands).first(count);
    const auto unused = std::span(operands).subspan(count);
    const bool is_good = count > 0 && std::ranges::all_of(used, [this](Slot slot) { return has_value(slot); }) &&
                         std::ranges::all_of(unused, [](Slot slot) { return slot == 0; });
    if (!is_good || !is_temporary(instruction.to)) return false;
    is_written_[instruction.to - program_.first_temporary()] = true;
    return true;
  }

  [[nodiscard]] bool is_temporary(Slot slot) const {
    return slot >= program_.first_temporary() && slot < program_.slot_count();
  }
  [[nodiscard]] bool is_result(Slot slot) const {
    return is_temporary(slot) && is_written_[slot - program_.first_temporary()];
  }
  [[nodiscard]] bool has_value(Slot slot) const { return slot < program_.first_temporary() || is_result(slot); }

  const Program& program_;
  std::vector<bool> is_written_;
};

}  // namespace

Bytes encode(const Program& program) {
  Writer writer;
  fields(writer, program);
  return writer.take();
}

Result<Program> decode_program(std::span<const std::byte> bytes) {
  if (bytes.size() > kMaxProgramBytes) return malformed("program: " + std::to_string(bytes.size()) + " bytes");
  Reader reader(bytes);
  Program program;
  fields(reader, program);
  const bool is_bounded = program.input_count <= kMaxInputs && program.scalar_count <= kMaxScalars &&
                          program.temporary_count <= kMaxTemporaries;
  if (!reader.finished() || !is_bounded) return malformed("program");
  if (Status status = Checker(program).check(); !status.ok()) return status;
  return program;
}

}  // namespace jaxhetero
