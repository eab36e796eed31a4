#include "xla_ffi/reducer/kept_states.h"

#include <algorithm>
#include <string>

namespace jaxhetero {
namespace {

constexpr size_t kMostStates = 65536;

}  // namespace

std::span<float> KeptState::slice(Memory& memory, const Range& part) {
  // calloc gives pages that are not there until they are touched.
  if (!memory && share_.count > 0) memory.reset(static_cast<float*>(std::calloc(share_.count, sizeof(float))));
  if (!memory) return {};
  return {memory.get() + (part.offset - share_.offset), part.count};
}

void KeptState::clear_states(const Range& part) {
  for (Memory& memory : std::span(slots_).subspan(1)) {
    if (memory) std::ranges::fill(slice(memory, part), 0.0f);
  }
}

Result<KeptState*> KeptStates::find(const OpSpec& spec, const Range& share) {
  auto found = states_.find(spec.state.number);
  if (found == states_.end()) {
    if (spec.kind != Kind::kStore) {
      return Status(Code::kInvalidArgument,
                    "no weights have been given to the reducers for it; make its state with init(params)");
    }
    if (states_.size() == kMostStates) {
      return Status(Code::kInvalidArgument, "a job can have " + std::to_string(kMostStates) + " buckets at reducers");
    }
    found = states_.emplace(spec.state.number, KeptState(share, spec.state.slot_count)).first;
  }
  KeptState& state = found->second;
  if (state.share() != share || state.slot_count() != spec.state.slot_count) {
    return Status(Code::kMismatch, "its weights were given to the reducers in another size");
  }
  return &state;
}

}  // namespace jaxhetero
