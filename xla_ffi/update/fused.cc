#include "xla_ffi/update/fused.h"

#include <algorithm>
#include <array>
#include <utility>

#include "xla_ffi/sum/arithmetic.h"
#include "xla_ffi/update/known_programs.h"
#include "xla_ffi/update/operations.h"

namespace jaxhetero {
namespace {

// With constant indices the array is no memory: compilers give each vector a register.
template <bool kIsWide, const auto& kKnown>
[[gnu::always_inline]] inline void compute_all(std::span<const float* const> slots, float* temporaries, size_t count) {
  using Run = Operations<kIsWide>;
  constexpr size_t kFirstTemporary = kKnown.input_count + kKnown.scalar_count;
  typename Run::Vector values[kFirstTemporary + kKnown.temporary_count];
  for (size_t slot = kKnown.input_count; slot < kFirstTemporary; ++slot) Run::load(slots[slot], values[slot]);
  for (size_t i = 0; i < count; i += Run::kLanes) {
    for (size_t slot = 0; slot < kKnown.input_count; ++slot) Run::load(slots[slot] + i, values[slot]);
    [&]<size_t... kSteps>(std::index_sequence<kSteps...>) __attribute__((always_inline)) {
      (Run::template apply<kKnown.steps[kSteps].opcode>(values[kKnown.steps[kSteps].a], values[kKnown.steps[kSteps].b],
                                                        values[kKnown.steps[kSteps].c],
                                                        values[kKnown.steps[kSteps].to]),
       ...);
    }(std::make_index_sequence<kKnown.steps.size()>());
    for (const Slot result : kKnown.results) {
      Run::store(values[result], temporaries + (result - kFirstTemporary) * kProgramBlock + i);
    }
  }
}

template <const auto& kKnown>
void compute_baseline(std::span<const float* const> slots, float* temporaries, size_t count) {
  compute_all<false, kKnown>(slots, temporaries, count);
}
template <const auto& kKnown>
JAXHETERO_WIDE void compute_wide(std::span<const float* const> slots, float* temporaries, size_t count) {
  compute_all<true, kKnown>(slots, temporaries, count);
}

struct Entry {
  FusedKernel kernel;
  uint16_t input_count = 0;
  uint16_t scalar_count = 0;
  uint16_t temporary_count = 0;
  std::span<const Instruction> steps;
  std::span<const Slot> results;
};

template <const auto& kKnown>
constexpr Entry entry() {
  return {{kKnown.name, &compute_baseline<kKnown>, &compute_wide<kKnown>},
          kKnown.input_count,
          kKnown.scalar_count,
          kKnown.temporary_count,
          kKnown.steps,
          kKnown.results};
}

// BEGIN
constexpr std::array kEntries = {
    entry<known::kSgd>(),
    entry<known::kMomentum>(),
    entry<known::kNesterov>(),
    entry<known::kAdam>(),
    entry<known::kAdamw>(),
    entry<known::kLambSums>(),
    entry<known::kLamb>(),
    entry<known::kLarsSums>(),
    entry<known::kLars>(),
    entry<known::kLarsWithoutDecay>(),
    entry<known::kAdamClippedSums>(),
    entry<known::kAdamClipped>(),
    entry<known::kAdamwClipped>(),
    entry<known::kLambClippedNorm>(),
    entry<known::kLambClippedSums>(),
    entry<known::kLambClipped>(),
};
// END

bool computes(const Entry& entry, const Program& program) {
  const auto gives = [&entry](const auto& result) {
    return std::ranges::find(entry.results, result.from) != entry.results.end();
  };
  return entry.input_count == program.input_count && entry.scalar_count == program.scalar_count &&
         entry.temporary_count == program.temporary_count && std::ranges::equal(entry.steps, program.instructions) &&
         std::ranges::all_of(program.summands, gives) && std::ranges::all_of(program.outputs, gives);
}

}  // namespace

const FusedKernel* find_fused(const Program& program) {
  const auto found =
      std::ranges::find_if(kEntries, [&program](const Entry& entry) { return computes(entry, program); });
  return found == kEntries.end() ? nullptr : &found->kernel;
}

}  // namespace jaxhetero
