#include "xla_ffi/reducer/backups.h"

#include <algorithm>
#include <utility>

namespace jaxhetero {

void Backups::enter(const StatePlan& plan, KeptStates& states) {
  plan_ = plan;
  for (const auto& [number, state] : states.all()) assign(number, state);
}

std::vector<Backups::Backup>& Backups::backups_of(uint64_t number, const KeptState& state) {
  if (!backups_.contains(number)) assign(number, state);
  return backups_[number];
}

void Backups::assign(uint64_t number, const KeptState& state) {
  std::vector<Backup>& known = backups_[number];
  const std::vector<Backup> earlier = std::exchange(known, {});
  if (!state.is_backed_up()) return;
  for (const StateShare& share : plan_.cut(number, state.count())) {
    if (share.reducer != own_number_) continue;
    for (const StateShare::Backup& each : share.backups) {
      Backup backup{each.reducer, plan_.find(each.reducer)->since, each.part, each.part.offset};
      for (const Backup& old : earlier) {
        const bool has_beginning = old.part.offset <= each.part.offset && each.part.offset <= old.copied_end;
        if (old.reducer != backup.reducer || old.since != backup.since || !has_beginning) continue;
        backup.copied_end = std::max(backup.copied_end, std::min(old.copied_end, each.part.offset + each.part.count));
      }
      known.push_back(backup);
    }
  }
}

void Backups::forget(uint32_t reducer) {
  for (auto& [state, backups] : backups_) {
    std::erase_if(backups, [reducer](const Backup& backup) { return backup.reducer == reducer; });
  }
}

void Backups::note(const Copy& copy) {
  const uint64_t end = copy.part.offset + copy.part.count;
  for (Backup& backup : backups_[copy.state]) {
    if (backup.reducer != copy.reducer || overlap(copy.part, backup.part) != copy.part) continue;
    if (copy.part.offset <= backup.copied_end) backup.copied_end = std::max(backup.copied_end, end);
  }
}

void Backups::take_back(const Copy& copy) {
  for (Backup& backup : backups_[copy.state]) {
    if (backup.reducer != copy.reducer || overlap(copy.part, backup.part) != copy.part) continue;
    backup.copied_end = std::min(backup.copied_end, copy.part.offset);
  }
}

std::vector<Backups::Copy> Backups::assigned(uint64_t number, const KeptState& state, const Range& chunk) {
  std::vector<Copy> copies;
  for (const Backup& backup : backups_of(number, state)) {
    const Range part = overlap(chunk, backup.part);
    if (part.count > 0) copies.push_back({backup.reducer, number, part});
  }
  return copies;
}

std::vector<Backups::Copy> Backups::copied(uint64_t number, const KeptState& state, const Range& chunk) {
  std::vector<Copy> copies;
  for (const Backup& backup : backups_of(number, state)) {
    const Range part = overlap(chunk, backup.copied());
    if (part.count > 0) copies.push_back({backup.reducer, number, part});
  }
  return copies;
}

std::optional<Backups::Copy> Backups::next_to_copy(KeptStates& states, uint64_t most) {
  for (auto& [number, state] : states.all()) {
    for (const Backup& backup : backups_of(number, state)) {
      if (backup.lacking().count == 0) continue;
      const KeptState::Run run = state.runs(backup.lacking()).front();
      if (!run.stamp.has_value()) continue;
      return Copy{backup.reducer, number, {run.range.offset, std::min(run.range.count, most)}};
    }
  }
  return std::nullopt;
}

}  // namespace jaxhetero
