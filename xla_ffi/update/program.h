// A program: what an optimizer computes for each element of a tensor, as data. Workers make it from optax, send it, and
// a reducer runs it. It is checked before it is run, so that it can do nothing but arithmetic in its own memory. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {

// What a step computes in float32, for every element by itself; rounded to nearest, ties to even. The numbers are part
// of the protocol. True is 1 and false is 0. `a`, `b` and `c` are the operands.
enum class Opcode : uint8_t {
  kCopy = 1,
  kAdd = 2,
  kSub = 3,
  kMul = 4,
  kDiv = 5,
  kMax = 6,  // NaN if either operand is, and -0 is below +0
  kMin = 7,
  kSqrt = 8,
  kAbs = 9,
  kNeg = 10,
  kSign = 11,  // gives 1, -1, or the operand itself if it is a zero or NaN
  kLess = 12,
  kLessEqual = 13,
  kEqual = 14,
  kSelect = 15,     // b where a is not 0, else c
  kRoundBf16 = 16,  // rounds to the nearest bfloat16, as float32
};
inline constexpr auto kLastOpcode = Opcode::kRoundBf16;

// A slot holds a value for each element: first the inputs, then the scalars, which are the same for all elements, then
// the temporaries.
using Slot = uint16_t;

struct Instruction {
  Opcode opcode = Opcode::kCopy;
  Slot to = 0;  // a temporary
  Slot a = 0;
  Slot b = 0;  // zero where the opcode has no such operand
  Slot c = 0;

  friend constexpr bool operator==(const Instruction&, const Instruction&) = default;
};

enum class OutputType : uint8_t { kF32 = 1, kBF16 = 2 };

struct Output {
  Slot from = 0;  // a temporary
  OutputType type = OutputType::kF32;
};

// A temporary whose elements are added up over the tensor.
struct Summand {
  Slot from = 0;
};

struct Program {
  uint16_t input_count = 0;
  uint16_t scalar_count = 0;
  uint16_t temporary_count = 0;
  std::vector<Instruction> instructions;
  std::vector<Summand> summands;
  std::vector<Output> outputs;

  [[nodiscard]] size_t first_temporary() const { return size_t{input_count} + scalar_count; }
  [[nodiscard]] size_t slot_count() const { return first_temporary() + temporary_count; }
};

inline constexpr size_t kMaxInputs = 256;
inline constexpr size_t kMaxScalars = 8192;
inline constexpr size_t kMaxTemporaries = 1024;
inline constexpr size_t kMaxInstructions = size_t{1} << 15;
inline constexpr size_t kMaxOutputs = 256;
inline constexpr size_t kMaxSummands = 256;
inline constexpr size_t kMaxProgramBytes = 512 * 1024;

Bytes encode(const Program& program);

// Refuses what is not a whole program: counts out of bounds, slots that are not there, opcodes that are unknown, and
// temporaries that are read before they are written.
Result<Program> decode_program(std::span<const std::byte> bytes);

// How many operands the opcode has; 0 for a number that is no opcode.
constexpr size_t operand_count(Opcode opcode) {
  switch (opcode) {
    case Opcode::kCopy:
    case Opcode::kSqrt:
    case Opcode::kAbs:
    case Opcode::kNeg:
    case Opcode::kSign:
    case Opcode::kRoundBf16:
      return 1;
    case Opcode::kAdd:
    case Opcode::kSub:
    case Opcode::kMul:
    case Opcode::kDiv:
    case Opcode::kMax:
    case Opcode::kMin:
    case Opcode::kLess:
    case Opcode::kLessEqual:
    case Opcode::kEqual:
      return 2;
    case Opcode::kSelect:
      return 3;
  }
  return 0;
}

}  // namespace jaxhetero
