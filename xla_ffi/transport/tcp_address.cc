#include "xla_ffi/transport/tcp_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>

#include <array>
#include <charconv>
#include <cstring>
#include <memory>

namespace jaxhetero {

std::string TcpAddress::host() const {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (storage.ss_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&storage);
    inet_ntop(AF_INET6, &v6->sin6_addr, text.data(), text.size());
  } else {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&storage);
    inet_ntop(AF_INET, &v4->sin_addr, text.data(), text.size());
  }
  return text.data();
}

uint16_t TcpAddress::port() const {
  if (storage.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

std::string TcpAddress::text() const {
  const bool v6 = storage.ss_family == AF_INET6;
  std::string text(v6 ? "[" : "");
  text += host();
  text += v6 ? "]:" : ":";
  return text + std::to_string(port());
}

Result<TcpAddress> resolve(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_family = host.empty() ? AF_INET : AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string service = std::to_string(port);
  const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(), service.c_str(), &hints, &found);
  if (error != 0) return Status(Code::kInvalidArgument, "cannot find host '" + host + "': " + gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, &freeaddrinfo);
  TcpAddress address;
  address.length = found->ai_addrlen;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  return address;
}

Result<TcpAddress> resolve(const std::string& endpoint) {
  const Status malformed(Code::kInvalidArgument, "'" + endpoint + "' is not an address of the form host:port");
  const size_t colon = endpoint.rfind(':');
  if (colon == std::string::npos || colon == 0) return malformed;
  std::string host = endpoint.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  uint16_t port = 0;
  const char* first = endpoint.data() + colon + 1;
  const char* end = endpoint.data() + endpoint.size();
  const auto [stop, error] = std::from_chars(first, end, port);
  if (error != std::errc{} || stop != end || port == 0) return malformed;
  return resolve(host, port);
}

}  // namespace jaxhetero
