#include "xla_ffi/update/tensor_sum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "xla_ffi/sum/arithmetic.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {
namespace {

// The largest subtree that is summed at once.
constexpr uint32_t kBlockLevel = 12;
constexpr size_t kBlock = size_t{1} << kBlockLevel;
constexpr uint32_t kMaxLevel = 63;

[[gnu::always_inline]] inline double sum_of_block(const float* values, size_t count) {
  std::array<double, kBlock / 2> sums;
  if (count == 1) return values[0];
  for (size_t i = 0; i < count / 2; ++i) {
    sums[i] = static_cast<double>(values[2 * i]) + static_cast<double>(values[2 * i + 1]);
  }
  for (size_t left = count / 4; left > 0; left /= 2) {
    for (size_t i = 0; i < left; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  }
  return sums[0];
}

double sum_of_block_baseline(const float* values, size_t count) { return sum_of_block(values, count); }
JAXHETERO_WIDE double sum_of_block_wide(const float* values, size_t count) { return sum_of_block(values, count); }

bool are_siblings(const Subtree& left, const Subtree& right) {
  const uint64_t size = uint64_t{1} << left.level;
  return left.level == right.level && left.level < kMaxLevel && left.first + size == right.first &&
         left.first % (2 * size) == 0;
}

// Puts a subtree behind the others, and replaces siblings by what they are children of.
void push(std::vector<Subtree>& subtrees, Subtree next) {
  while (!subtrees.empty() && are_siblings(subtrees.back(), next)) {
    next = {subtrees.back().first, next.level + 1, subtrees.back().sum + next.sum};
    subtrees.pop_back();
  }
  subtrees.push_back(next);
}

Status incomplete() { return malformed("sum: its pieces do not hold every element once"); }

}  // namespace

void PieceSum::append(std::span<const float> values) {
  const DefaultFloatingPoint mode;
  const auto sum_of = have_wide_vectors() ? &sum_of_block_wide : &sum_of_block_baseline;
  while (!values.empty()) {
    const auto aligned = static_cast<uint32_t>(end_ == 0 ? kBlockLevel : std::countr_zero(end_));
    const auto longest = static_cast<uint32_t>(std::bit_width(values.size()) - 1);
    const uint32_t level = std::min({aligned, longest, kBlockLevel});
    const size_t count = size_t{1} << level;
    push(subtrees_, {end_, level, sum_of(values.data(), count)});
    end_ += count;
    values = values.subspan(count);
  }
}

Result<float> sum_of_tensor(std::vector<Subtree> subtrees, uint64_t count) {
  const DefaultFloatingPoint mode;
  std::ranges::sort(subtrees, {}, &Subtree::first);
  std::vector<Subtree> left;
  uint64_t end = 0;
  for (const Subtree& subtree : subtrees) {
    if (subtree.level > kMaxLevel || subtree.first != end || end >= count) return incomplete();
    const uint64_t size = uint64_t{1} << subtree.level;
    if (subtree.first % size != 0 || size > count - end) return incomplete();
    push(left, subtree);
    end += size;
  }
  if (end != count) return incomplete();
  if (left.empty()) return 0.0f;
  // What is left has ever smaller subtrees. Each goes up, alone, until it is as large as the one before it.
  double sum = left.back().sum;
  for (size_t i = left.size() - 1; i > 0; --i) sum = left[i - 1].sum + sum;
  return std::isnan(sum) ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(sum);
}

}  // namespace jaxhetero
