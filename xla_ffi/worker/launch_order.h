// Watches the order in which the program asks for the rounds of an op.
//
// Rounds pair up by the order in which programs are launched. XLA numbers the launches of one program. Two threads that
// race to launch it may be seen in the wrong order here, and in another one on other hosts; and XLA may run two calls
// of one program in any order. Neither must pass silently. What a worker runs on several of its devices has no order
// either: it is an op for each device, and the workers need not use the same one.
//
// The communicator's thread only.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/worker/round.h"

namespace jaxhetero {

class LaunchOrder {
 public:
  // The next round of its op. Sets `op` to that of its device, and `is_compiled_anew`. An error where the round has no
  // place in the op's order.
  Status note(RoundRequest& request);

 private:
  struct Launch {
    uint64_t sequence = 0;  // RoundRequest::sequence
    int64_t run = 0;        // the latest
  };
  // Of one op. Each program that has been compiled with it has a call of its own.
  struct Calls {
    int32_t device = 0;          // the first one
    uint64_t newest = 0;         // the sequence of the one that was compiled last
    std::vector<Launch> latest;  // one for each call; the last one is that of the latest round
  };
  Calls& calls_of(RoundRequest& request);

  std::unordered_map<uint64_t, Calls> ops_;
};

}  // namespace jaxhetero
