// Runs programs on pieces of tensors, block by block, so that what is computed in between stays in the cache. One of a
// kind that is known (fused.h) runs as one loop; another is interpreted, an operation at a time. The bits are the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/update/fused.h"
#include "xla_ffi/update/program.h"
#include "xla_ffi/update/tensor_sum.h"

namespace jaxhetero {

// What a program works on: one piece of a tensor.
struct Operands {
  std::span<const std::span<const float>> inputs;  // inputs of as many elements each
  std::span<const float> scalars;                  // one for each scalar of the program
  std::span<const std::span<std::byte>> outputs;   // outputs of as many elements each, perhaps in an input's memory
  size_t count = 0;                                // the number of elements
  uint64_t first = 0;                              // the piece's place in its tensor
};

// One thread at a time.
class Runner {
 public:
  explicit Runner(Program program);

  [[nodiscard]] const Program& program() const { return program_; }
  // The name of the fused kernel that runs the program; empty if it is interpreted.
  [[nodiscard]] std::string_view kernel() const;
  // For tests: interprets it whatever it is, and on vectors of the platform's baseline.
  void interpret() { fused_ = nullptr; }
  void use_baseline() { is_wide_ = false; }

  // Adds to `totals`, one for each summand of the program. NaN is always the same NaN in outputs. An error where the
  // operands are not what the program takes.
  Status run(const Operands& operands, std::span<PieceSum> totals);

 private:
  Status check(const Operands& operands, std::span<PieceSum> totals) const;
  void fill_scalars(std::span<const float> scalars);
  void run_block(const Operands& operands, size_t at, size_t count, std::span<PieceSum> totals);
  void pad_inputs(const Operands& operands, size_t at, size_t count);
  void compute(size_t count);
  void put_out(const Operands& operands, size_t at, size_t count);
  [[nodiscard]] const float* temporary(Slot slot) const;

  Program program_;
  const FusedKernel* fused_;
  bool is_wide_;
  std::vector<float> memory_;  // a block for each scalar, then for each temporary
  std::vector<float> padded_;  // a strip for each input
  std::vector<const float*> slots_;
};

}  // namespace jaxhetero
