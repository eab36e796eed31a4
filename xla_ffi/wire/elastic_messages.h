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
  };
  uint32_t view = 0;  // the next one
  std::vector<Op> ops;
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
  std::vector<uint32_t> ranks;
  std::string why;
};

// kAbsent: a round, which the header names, waits for these workers.
struct Absent {
  std::vector<uint32_t> ranks;
};

Bytes encode(const Absent& absent);
Bytes encode(const Report& report);
Bytes encode(const Return& back);
Bytes encode(const Accusation& accusation);

Result<Absent> decode_absent(std::span<const std::byte> bytes);
Result<Report> decode_report(std::span<const std::byte> bytes);
Result<Return> decode_return(std::span<const std::byte> bytes);
Result<Accusation> decode_accusation(std::span<const std::byte> bytes);

}  // namespace jaxhetero
