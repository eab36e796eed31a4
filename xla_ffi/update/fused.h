// Programs that are known: each is compiled to one loop, which keeps in registers what the interpreter writes to
// memory after every operation. The operations and their order are those of the program, and so are the bits.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "xla_ffi/update/program.h"

namespace jaxhetero {

// Elements that are computed together; a multiple of a strip (operations.h), and a whole subtree of sums.
inline constexpr size_t kProgramBlock = 256;

// Computes `count` elements, a multiple of a strip. A slot is where its block begins; the temporaries lie one behind
// the other, a block each. The results, and no other temporaries, are written.
using KernelFunction = void (*)(std::span<const float* const> slots, float* temporaries, size_t count);

struct FusedKernel {
  std::string_view name;
  KernelFunction baseline = nullptr;
  KernelFunction wide = nullptr;  // call only if have_wide_vectors()
};

// The kernel that computes all outputs and summands of the program; null where none does.
const FusedKernel* find_fused(const Program& program);

}  // namespace jaxhetero
