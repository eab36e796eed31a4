// How GoogleTest prints our types when an expectation fails.
#pragma once

#include <ostream>

#include "xla_ffi/base/status.h"

namespace jaxhetero {

inline void PrintTo(Code code, std::ostream* out) { *out << exception_name(code); }

}  // namespace jaxhetero
