// What a strand of a reducer keeps of optimizers: of each bucket of weights, the weights and the states of the elements
// that the reducer has. It outlives the views of the job. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/update/bucket_update.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {

class KeptState {
 public:
  // `share`: elements of the bucket, or of the strand's part of it.
  KeptState(const Range& share, uint32_t slot_count) : share_(share), slots_(slot_count) {}

  [[nodiscard]] const Range& share() const { return share_; }
  [[nodiscard]] uint32_t slot_count() const { return static_cast<uint32_t>(slots_.size()); }
  // A part of a slot, which is 0 until something is written to it. Empty, with elements asked for, where there is no
  // memory for it. `part` lies in the share.
  std::span<float> slot(uint32_t number, const Range& part) { return slice(slots_[number], part); }
  // New weights: everything else begins with 0.
  void clear_states(const Range& part);
  // The summed gradients, between a measure and the update of the same step.
  std::span<float> gradient(const Range& part) { return slice(gradient_, part); }

  // How many updates it has seen.
  uint64_t version = 0;

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  using Memory = std::unique_ptr<float[], Free>;

  std::span<float> slice(Memory& memory, const Range& part);

  Range share_;
  std::vector<Memory> slots_;
  Memory gradient_;
};

class KeptStates {
 public:
  // The state that the op is about. An error where it is not as the op says, or not there and the op is no store.
  Result<KeptState*> find(const OpSpec& spec, const Range& share);
  [[nodiscard]] bool is_empty() const { return states_.empty(); }
  [[nodiscard]] Runners& runners() { return runners_; }

 private:
  std::map<uint64_t, KeptState> states_;  // by number
  Runners runners_;
};

}  // namespace jaxhetero
