// What becomes, at a change of view, of the rounds of an elastic job that some members have been given and others not.
//
// Pure: the coordinator decides by the members' reports alone, so that a decision that some have not heard comes out
// the same when it is made again.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/elastic_messages.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

// Of each op the round that all members in its group complete with the total that they hold. All others begin anew.
//
// A large round is given to a program only when every member of its view holds the total. So if anybody was given it,
// also one that is lost now, every survivor holds it, and all of them are given it. A small one is given at once, but a
// copy of its total is reported: the others are given that. An internal error if the reports contradict each other.
Result<std::vector<View::Commit>> decide_commits(const std::map<uint32_t, Report>& reports_by_rank);

}  // namespace jaxhetero
