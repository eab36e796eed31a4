// Which other reducers back up what a strand of this one keeps of optimizers, and how far they have it. It outlives the
// views of the job, and sends nothing itself. One thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "xla_ffi/reducer/kept_states.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/wire/state_plan.h"

namespace jaxhetero {

class Backups {
 public:
  // A part of a state, and a reducer that has it as well.
  struct Copy {
    uint32_t reducer = 0;  // the reducer's number
    uint64_t state = 0;
    Range part;
  };

  // `own_number`: of this reducer.
  explicit Backups(uint32_t own_number) : own_number_(own_number) {}

  // From now on this is the plan. What backups had and still are to have, they keep.
  void enter(const StatePlan& plan, KeptStates& states);
  [[nodiscard]] const StatePlan& plan() const { return plan_; }
  // A reducer is gone.
  void forget(uint32_t reducer);
  // A backup has this part, or will have it before anything else that is sent to it from now on. Its parts come in
  // order and without gaps: one that does not is still to be copied.
  void note(const Copy& copy);
  // Nor will it have this piece, which was noted, or what is behind it.
  void take_back(const Copy& copy);

  // The parts of a chunk that are to be backed up; and those of them that the backups have.
  [[nodiscard]] std::vector<Copy> assigned(uint64_t number, const KeptState& state, const Range& chunk);
  [[nodiscard]] std::vector<Copy> copied(uint64_t number, const KeptState& state, const Range& chunk);
  // The next part that is kept here and that its backup lacks, equally far and with at most so many elements. Nothing
  // if there is none.
  [[nodiscard]] std::optional<Copy> next_to_copy(KeptStates& states, uint64_t most);

 private:
  struct Backup {
    uint32_t reducer = 0;
    uint32_t since = 0;
    Range part;
    uint64_t copied_end = 0;  // the backup has the elements of the part up to there

    [[nodiscard]] Range copied() const { return {part.offset, copied_end - part.offset}; }
    [[nodiscard]] Range lacking() const { return {copied_end, part.offset + part.count - copied_end}; }
  };

  std::vector<Backup>& backups_of(uint64_t number, const KeptState& state);
  void assign(uint64_t number, const KeptState& state);

  const uint32_t own_number_;
  StatePlan plan_;
  std::map<uint64_t, std::vector<Backup>> backups_;  // keyed by state
};

// All that a strand keeps of optimizers.
struct KeptOptimizers {
  // `can_undo`: see KeptState.
  explicit KeptOptimizers(uint32_t own_number, bool can_undo = false) : states(can_undo), backups(own_number) {}

  KeptStates states;
  Backups backups;
};

}  // namespace jaxhetero
