#include "xla_ffi/transport/tcp_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <memory>

#include "xla_ffi/base/fd.h"

namespace jaxhetero {
namespace {

const in6_addr& address_of_ipv6(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr;
}

bool has_ipv6() {
  return Fd([] { return ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0); }).valid();
}

// At least one, each once.
Result<std::vector<TcpAddress>> look_up(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_family = !host.empty() ? AF_UNSPEC : has_ipv6() ? AF_INET6 : AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string service = std::to_string(port);
  const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(), service.c_str(), &hints, &found);
  if (error != 0) return Status(Code::kInvalidArgument, "cannot find host '" + host + "': " + gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, &freeaddrinfo);
  std::vector<TcpAddress> addresses;
  for (; found != nullptr; found = found->ai_next) {
    TcpAddress address;
    address.length = found->ai_addrlen;
    std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
    const bool is_known = std::ranges::find(addresses, address.text(), &TcpAddress::text) != addresses.end();
    if (!is_known) addresses.push_back(address);
  }
  return addresses;
}

}  // namespace

bool TcpAddress::is_any_ipv6() const {
  return storage.ss_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&address_of_ipv6(storage));
}

bool TcpAddress::is_own() const {
  const Fd probe([&] { return ::socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0); });
  sockaddr_storage any_port = storage;
  // The port is at the same place for both.
  reinterpret_cast<sockaddr_in*>(&any_port)->sin_port = 0;
  return probe.valid() && ::bind(probe.get(), reinterpret_cast<const sockaddr*>(&any_port), length) == 0;
}

bool TcpAddress::is_mapped_ipv4() const {
  return storage.ss_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&address_of_ipv6(storage));
}

std::string TcpAddress::host() const {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (is_mapped_ipv4()) {
    inet_ntop(AF_INET, &address_of_ipv6(storage).s6_addr[12], text.data(), text.size());
  } else if (storage.ss_family == AF_INET6) {
    inet_ntop(AF_INET6, &address_of_ipv6(storage), text.data(), text.size());
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
  const bool v6 = storage.ss_family == AF_INET6 && !is_mapped_ipv4();
  std::string text(v6 ? "[" : "");
  text += host();
  text += v6 ? "]:" : ":";
  return text + std::to_string(port());
}

Result<TcpAddress> resolve(const std::string& host, uint16_t port) {
  const Result<std::vector<TcpAddress>> addresses = look_up(host, port);
  if (!addresses.ok()) return addresses.status();
  return addresses.value().front();
}

Result<std::vector<TcpAddress>> resolve_all(const std::string& endpoint) {
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
  return look_up(host, port);
}

}  // namespace jaxhetero
