// What members and coordinator of an elastic job say to each other beside what those of a fixed job do. Pure, as the
// rest of the messages.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

// kReport: how far a worker is with each op, when a view ends.
struct Report {
  struct Op {
    uint64_t op = 0;
    uint64_t given_count = 0;          // rounds that the program has been given
    bool holds = false;                // all of the total of the next round is here, on every strand
    bool is_small = false;             // the latest round was given at once
    std::vector<uint32_t> group = {};  // the ranks that take part; empty: all
    Bytes total = {};                  // of the latest round, if it was given at once
    std::string name = {};             // for people
  };
  uint32_t view = 0;  // the next one
  std::vector<Op> ops;
  uint64_t gate = 0;  // the next one of the program
  bool has_state = true;
  uint32_t planned_view = 0;  // the latest view that it has entered
  Bytes states = {};          // the StatePlan of that view, if the worker has used a state
};

// kReturn: a member of the job, to a coordinator that has been started anew.
struct Return {
  Registration registration;
  uint32_t heard_view = 0;  // the highest number that it has heard of
  View view;                // the latest one that it has been told
};

// kAccuse: a member that cannot go on because of these workers.
struct Accusation {
  uint32_t view = 0;
  std::vector<uint32_t> ranks;  // none: whoever has not come to the gate where all are to meet
  std::string why;
};

// kAbsent: a round, which the header names, waits for these workers.
struct Absent {
  std::vector<uint32_t> ranks;
};

// Where the members meet, to let others in and out: kMeet and kMet. In the header, as the next one.
struct Meeting {
  uint64_t number = 0;
  uint64_t gate = 0;
  bool is_set = false;  // all have answered; before, the gate counts only in an answer

  bool operator==(const Meeting&) const = default;
};

// kPresent and kGo.
struct Presence {
  uint32_t view = 0;  // that the receiver of a state has it in; of a candidate the latest that it was told

  bool operator==(const Presence&) const = default;
};

FrameHeader header_of(const Meeting& meeting);
FrameHeader header_of(const Presence& presence);
Meeting decode_meeting(const FrameHeader& header);
Result<Presence> decode_presence(const FrameHeader& header);

Bytes encode(const Absent& absent);
Bytes encode(const Report& report);
Bytes encode(const Return& back);
Bytes encode(const Accusation& accusation);

Result<Absent> decode_absent(std::span<const std::byte> bytes);
Result<Report> decode_report(std::span<const std::byte> bytes);
Result<Return> decode_return(std::span<const std::byte> bytes);
Result<Accusation> decode_accusation(std::span<const std::byte> bytes);

}  // namespace jaxhetero
