// The rounds of an elastic job on one strand whose totals are here and which the program has not been given yet.
//
// A worker *holds* a round once all of its total is here, on all strands. The round is *safe* once all members of the
// view hold it. Only then it is given to the program. So if a worker is lost that has been given a round, all others
// hold it: the next view commits it, and nobody needs the lost contribution again. Else the round begins anew, without
// the lost one: as a whole, on all strands. See docs/architecture.md and membership/commits.h.
//
// A small round is given at once, for the time that an exchange takes, and its total is copied for those who have not
// got it when the view ends.
//
// The strand owns it and sends the frames. The strand's thread only.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/elastic_messages.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/worker/op.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/round_ledger.h"
#include "xla_ffi/worker/schedule.h"

namespace jaxhetero {

class HeldRounds {
 public:
  // Both outlive the rounds.
  HeldRounds(Schedule& schedule, RoundLedger& ledger) : schedule_(schedule), ledger_(ledger) {}

  // All totals of the running round's part are here. Returns whether it is small, and to be finished at once.
  bool hold(const Op& op);
  // All members hold the part. Returns whether they hold all parts, so that the round may be given.
  bool secure(Round& round);
  // The op whose running round is a part of this one; null if there is none.
  [[nodiscard]] Op* find(const WholeRound& whole) const;

  // The view has ended, on all strands: how far each op is.
  [[nodiscard]] std::vector<Report::Op> report() const;
  // The running round is the one that the next view commits: makes its total complete. An internal error if it cannot
  // be.
  Status take(Op& op, const View::Commit& commit);
  // All that is left running will begin anew, as its op's next round.
  void begin_anew();

 private:
  Schedule& schedule_;
  RoundLedger& ledger_;
  std::unordered_map<uint64_t, Bytes> totals_;  // by op: of its latest round, if that was small
  std::vector<iovec> pieces_;                   // scratch memory
};

}  // namespace jaxhetero
