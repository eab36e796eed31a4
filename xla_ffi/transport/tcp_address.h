// Where a process listens: numbers, and how they are found from what people write.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "xla_ffi/base/status.h"

namespace jaxhetero {

struct TcpAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  [[nodiscard]] std::string host() const;
  [[nodiscard]] uint16_t port() const;
  [[nodiscard]] std::string text() const;  // "10.0.0.3:41234", "[::1]:41234"
};

// May ask the name service: not for the loop's thread, unless `host` is a number. An empty host is every interface.
Result<TcpAddress> resolve(const std::string& host, uint16_t port);
// "host:port" or "[v6]:port".
Result<TcpAddress> resolve(const std::string& endpoint);

}  // namespace jaxhetero
