// Addresses of listening processes: IP address and port, and their resolution from text.
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

// Blocks on the name service, unless `host` is an IP address: not for the loop's thread. An empty host is every
// interface.
Result<TcpAddress> resolve(const std::string& host, uint16_t port);
// `endpoint` is "host:port" or "[v6]:port".
Result<TcpAddress> resolve(const std::string& endpoint);

}  // namespace jaxhetero
