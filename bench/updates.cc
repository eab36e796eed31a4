// The loops that bench/updates.py times: AdamW as a reducer runs it, and a plain copy, on one core.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <span>
#include <vector>

#include "xla_ffi/update/known_programs.h"
#include "xla_ffi/update/program.h"
#include "xla_ffi/update/run.h"

namespace {

using namespace jaxhetero;

double cpu_s() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Calls `work(first, count)` for one chunk after the other, `turns` times. Returns elements in a second of CPU time.
template <typename Work>
double elements_per_s(size_t count, size_t chunk_count, size_t turns, const Work& work) {
  const double start = cpu_s();
  for (size_t turn = 0; turn < turns; ++turn) {
    for (size_t first = 0; first < count; first += chunk_count) work(first, std::min(chunk_count, count - first));
  }
  return static_cast<double>(count * turns) / (cpu_s() - start);
}

Program adamw(bool narrow) {
  constexpr const auto& kKnown = known::kAdamw;
  Program program{kKnown.input_count, kKnown.scalar_count, kKnown.temporary_count, {}, {}, {}};
  program.instructions.assign(kKnown.steps.begin(), kKnown.steps.end());
  for (const Slot result : kKnown.results) program.outputs.push_back({result, OutputType::kF32});
  if (narrow) program.outputs.push_back({kKnown.results[0], OutputType::kBF16});
  return program;
}

}  // namespace

extern "C" {

// Updates the weights and both moments in place. `arrays` are the gradient, the weights, and the moments, of `count`
// elements each. With `sent` the weights are also written there, in bfloat16.
double update_per_s(bool interpret, float* const* arrays, uint16_t* sent, const float* scalars, size_t count,
                    size_t chunk_count, size_t turns) {
  Runner runner(adamw(sent != nullptr));
  if (interpret) runner.interpret();
  std::array<std::span<const float>, 4> inputs;
  std::vector<std::span<std::byte>> outputs(runner.program().outputs.size());
  return elements_per_s(count, chunk_count, turns, [&](size_t first, size_t n) {
    for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = {arrays[i] + first, n};
    for (size_t i = 0; i < 3; ++i) outputs[i] = std::as_writable_bytes(std::span(arrays[i + 1] + first, n));
    if (sent != nullptr) outputs[3] = std::as_writable_bytes(std::span(sent + first, n));
    const std::span<const float> given(scalars, runner.program().scalar_count);
    (void)runner.run({inputs, given, outputs, n, first}, {});
  });
}

double copy_per_s(const float* from, float* to, size_t count, size_t chunk_count, size_t turns) {
  return elements_per_s(count, chunk_count, turns,
                        [&](size_t first, size_t n) { std::memcpy(to + first, from + first, n * sizeof(float)); });
}
}
