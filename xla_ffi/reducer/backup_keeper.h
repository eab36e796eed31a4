// What a strand of a reducer does for one partner whose share of optimizers it backs up: it runs the same ops on the
// same sums. It sends nothing itself. One thread; nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>

#include "xla_ffi/base/status.h"
#include "xla_ffi/reducer/kept_states.h"
#include "xla_ffi/reducer/state_op.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

class BackupKeeper {
 public:
  // `states` outlives it.
  explicit BackupKeeper(KeptStates& states) : states_(states) {}

  // Each fails where the partner breaks the protocol, or is no longer the one that has the share.
  Status describe_op(uint64_t op, const OpDescription& description);
  Status take_step(const FrameHeader& header, StepInputs inputs);
  // A chunk's contributions, which may be none.
  Status back_up(const FrameHeader& header, std::span<const std::byte> contributions);
  Status take_copy(const StateCopy& copy);

 private:
  KeptStates& states_;
  std::map<uint64_t, StateOp> ops_;
};

}  // namespace jaxhetero
