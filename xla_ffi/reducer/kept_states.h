// What a strand of a reducer keeps of optimizers: of each bucket of weights, the weights and the states of some of its
// elements, those of its own share and those that it backs up for others. It outlives the views of the job. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/update/bucket_update.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {

class KeptState {
 public:
  // How far some elements are.
  struct Stamp {
    uint64_t version = 0;  // the number of updates that they have seen
    // Of the round that made it, so that a round that runs again changes nothing twice.
    uint64_t op = 0;
    uint64_t round = 0;

    bool operator==(const Stamp&) const = default;
  };
  struct Run {
    Range range;
    std::optional<Stamp> stamp;  // empty where these elements have never been kept here
  };

  // Of a bucket, or a strand's part of one, with so many elements. `can_undo`: it keeps as well what each slot was
  // before the latest update.
  KeptState(uint64_t count, uint32_t slot_count, bool is_backed_up, bool can_undo = false)
      : count_(count), is_backed_up_(is_backed_up), slots_(slot_count), earlier_(can_undo ? slot_count : 0) {}

  [[nodiscard]] uint64_t count() const { return count_; }
  [[nodiscard]] uint32_t slot_count() const { return static_cast<uint32_t>(slots_.size()); }
  // Whether other reducers are to back it up.
  [[nodiscard]] bool is_backed_up() const { return is_backed_up_; }
  // A part of a slot; 0 where nothing was written. Empty, with elements asked for, where there is no memory for it.
  std::span<float> slot(uint32_t number, const Range& part) { return slice(slots_[number], part); }
  [[nodiscard]] bool can_undo() const { return !earlier_.empty(); }
  // What a part of a slot was before the latest update. Only where that can be undone.
  std::span<float> earlier(uint32_t number, const Range& part) { return slice(earlier_[number], part); }
  // An update of this part begins, and can be undone from now on. False where there is no memory for that.
  bool note_earlier(const Range& part);
  // The part is again what it was before its latest update.
  void undo(const Range& part);
  // The summed gradients, between a measure and the update of the same step.
  std::span<float> gradient(const Range& part) { return slice(gradient_, part); }
  [[nodiscard]] bool has_gradient() const { return gradient_ != nullptr; }
  // Sets all slots but the weights to 0.
  void clear_states(const Range& part);

  void stamp(const Range& part, const Stamp& stamp);
  // The pieces of a part that are equally far, in order.
  [[nodiscard]] std::vector<Run> runs(const Range& part) const;

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  using Memory = std::unique_ptr<float[], Free>;

  std::span<float> slice(Memory& memory, const Range& part);
  void split(uint64_t offset);

  uint64_t count_;
  bool is_backed_up_;
  // For all elements; but a page is only there once something has been written to it.
  std::vector<Memory> slots_;
  std::vector<Memory> earlier_;
  Memory gradient_;
  // Keyed by the first element; each holds up to the next.
  std::map<uint64_t, std::optional<Stamp>> stamps_ = {{0, std::nullopt}};
};

// All that is kept of a part, in the order in which it is copied to a backup: the slots, the gradients if wanted, and
// the slots before the latest update where that can be undone.
std::vector<std::span<float>> arrays_of(KeptState& state, const Range& part, bool with_gradient);

class KeptStates {
 public:
  // `can_undo`: see KeptState; in elastic jobs.
  explicit KeptStates(bool can_undo = false) : can_undo_(can_undo) {}

  // The state that the op is about. An error where it is not as the op says, or not there and the op is no store.
  Result<KeptState*> find(const OpSpec& spec);
  // Null if there is none of this number.
  [[nodiscard]] KeptState* find(uint64_t number);
  // The same, made if it is not there; null if it has another size.
  KeptState* open(uint64_t number, uint64_t count, uint32_t slot_count, bool is_backed_up);
  [[nodiscard]] std::map<uint64_t, KeptState>& all() { return states_; }
  [[nodiscard]] Runners& runners() { return runners_; }

 private:
  const bool can_undo_;
  std::map<uint64_t, KeptState> states_;  // keyed by number
  Runners runners_;
};

}  // namespace jaxhetero
