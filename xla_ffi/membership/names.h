// How the coordinator names processes to people.
#pragma once

#include <string>

#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

inline std::string named(const Registration& registration) {
  const bool is_worker = registration.role == Role::kWorker;
  std::string name = is_worker ? "rank" : "reducer";
  if (registration.number >= 0) name += " " + std::to_string(registration.number);
  if (!is_worker && registration.rank >= 0) name += " of rank";
  if (registration.rank >= 0) name += " " + std::to_string(registration.rank);
  return name + " (host " + registration.host_name + ")";
}

inline void append_list(std::string& list, const std::string& item) { list += (list.empty() ? "" : ", ") + item; }

}  // namespace jaxhetero
