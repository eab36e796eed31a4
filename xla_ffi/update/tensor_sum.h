// The sum of all elements of a tensor, with bits that do not depend on how the tensor is cut into pieces, nor on the
// order in which the pieces are summed. The elements are the leaves of one binary tree: elements 2i and 2i + 1 are
// added in float64, then those sums by twos, and so on; where there is no second one, the first goes up unchanged. A
// piece gives the sums of the largest subtrees that it holds, at most two of each size. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "xla_ffi/base/status.h"

namespace jaxhetero {

// The sum of elements [first, first + 2^level), as far as the tensor goes. `first` is a multiple of 2^level.
struct Subtree {
  uint64_t first = 0;
  uint32_t level = 0;
  double sum = 0;
};

// The sum of the elements of a tensor from `first` on, which come in order.
class PieceSum {
 public:
  explicit PieceSum(uint64_t first) : end_(first) {}

  void append(std::span<const float> values);

  // In order, without gaps.
  [[nodiscard]] std::span<const Subtree> subtrees() const { return subtrees_; }

 private:
  uint64_t end_;
  std::vector<Subtree> subtrees_;
};

// The sum over a tensor of `count` elements, of what all its pieces gave, in any order: 0 where there are none. NaN is
// always the same NaN. An error where they do not hold every element once.
Result<float> sum_of_tensor(std::vector<Subtree> subtrees, uint64_t count);

}  // namespace jaxhetero
