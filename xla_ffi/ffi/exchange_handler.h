// The custom call of an exchange: arrays, or rows of them, that go from worker to worker unchanged, over channels.
//
// Every call sends and receives its messages at once, and is done when all of them are. Who sends what to whom follows
// from the call's attributes, which are the same on every worker.
#pragma once

#include <cstdint>
#include <string_view>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/ffi/host_handler.h"

namespace jaxhetero {

// The attributes beside those of every call, as jaxhetero/_collectives/exchange_primitive.py writes them.
struct ExchangeAttributes {
  std::string_view shapes;  // the shapes of the operands, for people; workers must agree
  // If `group_size` is 0, one for each worker: the rank whose operands it gets, or -1 for zeros. Else the ranks of all
  // workers, group by group: a member sends its row `i` to the member at place `i` of its group, for whom the result
  // has the row `i` as well.
  xla::ffi::Span<const int64_t> ranks;
  int64_t group_size = 0;
};

// The declaration of the attributes by name; calls `visit(name, member)` for each.
template <typename Visit>
void for_each_exchange_attribute(Visit&& visit) {
  visit("shapes", &ExchangeAttributes::shapes);
  visit("ranks", &ExchangeAttributes::ranks);
  visit("group_size", &ExchangeAttributes::group_size);
}

// "jaxhetero_exchange", for the memory of this host.
FfiTarget exchange_target();

}  // namespace jaxhetero
