// A visit to the coordinator of a running job, by a process that does not take part: how is the job doing?
#pragma once

#include <chrono>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/tcp_address.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

// Blocks until the coordinator has answered, for at most `patience` and the time of connecting, which is as long again.
// Tries the addresses of the coordinator one after the other.
Result<JobState> visit(const std::vector<TcpAddress>& coordinator, const Bytes& token, bool encrypt,
                       std::chrono::milliseconds patience);

}  // namespace jaxhetero
