#include "xla_ffi/reducer/kept_states.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace jaxhetero {
namespace {

constexpr size_t kMostStates = 65536;

}  // namespace

std::span<float> KeptState::slice(Memory& memory, const Range& part) {
  // calloc gives pages that are not there until they are touched.
  if (!memory && count_ > 0) memory.reset(static_cast<float*>(std::calloc(count_, sizeof(float))));
  if (!memory) return {};
  return {memory.get() + part.offset, part.count};
}

void KeptState::clear_states(const Range& part) {
  for (Memory& memory : std::span(slots_).subspan(1)) {
    if (memory) std::ranges::fill(slice(memory, part), 0.0f);
  }
}

bool KeptState::note_earlier(const Range& part) {
  for (uint32_t number = 0; number < slot_count(); ++number) {
    const std::span<float> to = earlier(number, part);
    const std::span<float> from = slot(number, part);
    if (to.size() != part.count || from.size() != part.count) return false;
    std::ranges::copy(from, to.begin());
  }
  return true;
}

void KeptState::undo(const Range& part) {
  for (uint32_t number = 0; number < slot_count(); ++number) {
    std::ranges::copy(earlier(number, part), slot(number, part).begin());
  }
}

// From now on a run begins there.
void KeptState::split(uint64_t offset) {
  const auto next = stamps_.upper_bound(offset);
  stamps_.emplace(offset, std::prev(next)->second);
}

void KeptState::stamp(const Range& part, const Stamp& stamp) {
  if (part.count == 0) return;
  const uint64_t end = part.offset + part.count;
  split(part.offset);
  split(end);
  const auto first = stamps_.find(part.offset);
  stamps_.erase(std::next(first), stamps_.find(end));
  first->second = stamp;
  // Chunks of a round come one behind the other, and make one run.
  const auto next = std::next(first);
  if (next->second == first->second) stamps_.erase(next);
  if (first != stamps_.begin() && std::prev(first)->second == first->second) stamps_.erase(first);
}

std::vector<KeptState::Run> KeptState::runs(const Range& part) const {
  std::vector<Run> runs;
  for (auto run = std::prev(stamps_.upper_bound(part.offset)); run != stamps_.end(); ++run) {
    const auto next = std::next(run);
    const uint64_t end = next == stamps_.end() ? count_ : next->first;
    const Range range = overlap({run->first, end - std::min(end, run->first)}, part);
    if (range.count > 0) runs.push_back({range, run->second});
    if (end >= part.offset + part.count) break;
  }
  return runs;
}

std::vector<std::span<float>> arrays_of(KeptState& state, const Range& part, bool with_gradient) {
  std::vector<std::span<float>> arrays;
  for (uint32_t slot = 0; slot < state.slot_count(); ++slot) arrays.push_back(state.slot(slot, part));
  if (with_gradient) arrays.push_back(state.gradient(part));
  for (uint32_t slot = 0; state.can_undo() && slot < state.slot_count(); ++slot) {
    arrays.push_back(state.earlier(slot, part));
  }
  return arrays;
}

Result<KeptState*> KeptStates::find(const OpSpec& spec) {
  const bool is_new = !states_.contains(spec.state.number);
  if (is_new && spec.kind != Kind::kStore) {
    return Status(Code::kInvalidArgument,
                  "no weights have been given to the reducers for it; make its state with init(params)");
  }
  KeptState* const state = open(spec.state.number, spec.total_count, spec.state.slot_count, spec.state.is_backed_up);
  if (state == nullptr)
    return Status(Code::kMismatch,
                  "its weights were given to the reducers in another size, or there are too many buckets");
  return state;
}

KeptState* KeptStates::find(uint64_t number) {
  const auto found = states_.find(number);
  return found == states_.end() ? nullptr : &found->second;
}

KeptState* KeptStates::open(uint64_t number, uint64_t count, uint32_t slot_count, bool is_backed_up) {
  if (states_.size() >= kMostStates && !states_.contains(number)) return nullptr;
  KeptState& state = states_.try_emplace(number, count, slot_count, is_backed_up, can_undo_).first->second;
  const bool is_same =
      state.count() == count && state.slot_count() == slot_count && state.is_backed_up() == is_backed_up;
  return is_same ? &state : nullptr;
}

}  // namespace jaxhetero
