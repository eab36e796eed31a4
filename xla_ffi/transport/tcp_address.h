// Addresses of listening processes: IP address and port, and their resolution from text.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

#include "xla_ffi/base/status.h"

namespace jaxhetero {

struct TcpAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  [[nodiscard]] std::string host() const;
  [[nodiscard]] uint16_t port() const;
  [[nodiscard]] std::string text() const;  // "10.0.0.3:41234", "[::1]:41234"
  // Whether it is every interface of this host, of IPv4 as well.
  [[nodiscard]] bool is_any_ipv6() const;
  // Whether this host has it.
  [[nodiscard]] bool is_own() const;

 private:
  // The address of IPv4 that a socket of IPv6 has as ::ffff:10.0.0.3. Everybody else knows it as 10.0.0.3.
  [[nodiscard]] bool is_mapped_ipv4() const;
};

// These block on the name service, unless the host is an IP address: not for the loop's thread.

// The first address of a host. An empty host is every interface.
Result<TcpAddress> resolve(const std::string& host, uint16_t port);
// `endpoint` is "host:port" or "[v6]:port". All addresses of the host, of IPv4 and IPv6, which may not all be of use
// everywhere: first the one that this host would rather connect to.
Result<std::vector<TcpAddress>> resolve_all(const std::string& endpoint);

}  // namespace jaxhetero
