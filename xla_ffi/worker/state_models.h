// The models of an optimizer on reducers. Programs say of a state what is the same for all models with parameters of
// these shapes; which of them a call is about is in the version of the state, which is data. So a compiled init() makes
// another model each time that it runs.
//
// All workers run the same stores of a state in the same order, and so agree.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "xla_ffi/base/mix.h"

namespace jaxhetero {

class StateModels {
 public:
  // In place of the version of a state, for a store of weights: they are those of a new model, or take the place of the
  // model that was made last.
  static constexpr uint32_t kNew = 0xffffffff;
  static constexpr uint32_t kLatest = 0xfffffffe;
  // The next one takes the place of the first: who makes states again and again does not fill the reducers' memory.
  static constexpr uint32_t kMost = 15;

  // The version of a state whose weights are stored. `number` is the state's; `given` is one of the above, or a version
  // of the model whose place they take. What a reducer may still have of earlier weights must not pass for these, so
  // that versions of several stores are far from each other. Any thread.
  uint32_t start(uint64_t number, uint32_t given) {
    const std::lock_guard lock(mutex_);
    Counts& counts = counts_[number];
    if (given == kNew || counts.models == 0) {
      ++counts.models;
      given = kLatest;
    }
    const uint32_t model = given == kLatest ? (counts.models - 1) % kMost : model_of(given);
    return model << 28 | counts.stores++ % 16 << 24;
  }

  // A worker that has come to an elastic job meets a version of a store that it has not taken part in. Any thread.
  void note(uint64_t number, uint32_t version) {
    const std::lock_guard lock(mutex_);
    Counts& counts = counts_[number];
    if (model_of(version) < counts.models) return;
    counts.models = model_of(version) + 1;
    counts.stores = (version >> 24) % 16 + 1;
  }

  static uint32_t model_of(uint32_t version) { return version >> 28; }
  // The number of a state, or of an op, for the model of this version.
  static uint64_t number_for(uint64_t number, uint32_t version) {
    return model_of(version) == 0 ? number : mix(number + model_of(version));
  }

 private:
  struct Counts {
    uint32_t models = 0;
    uint32_t stores = 0;
  };
  std::mutex mutex_;
  std::unordered_map<uint64_t, Counts> counts_;  // keyed by the number of the state; guarded by mutex_
};

}  // namespace jaxhetero
