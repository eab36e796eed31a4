// Bytes that tests send and compare. Tests have so many of them that the thread sanitizer, which looks at each access,
// would take most of their time: it looks neither at how they are made nor, one by one, at how they are compared.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "xla_ffi/base/mix.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {

inline Bytes bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

[[gnu::no_sanitize("thread")]] inline void fill_at_random(uint64_t seed, std::byte* bytes, size_t size) {
  const uint64_t start = mix(seed + 1);
  for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
    const uint64_t value = mix(start + i);
    std::memcpy(bytes + i, &value, std::min(sizeof value, size - i));
  }
}

inline Bytes pattern(size_t size, uint64_t seed = 1) {
  Bytes bytes(size);
  fill_at_random(seed, bytes.data(), size);
  return bytes;
}

inline bool are_same(std::span<const std::byte> some, std::span<const std::byte> others) {
  return some.size() == others.size() && (some.empty() || std::memcmp(some.data(), others.data(), some.size()) == 0);
}

}  // namespace jaxhetero
