#include "xla_ffi/wire/codec.h"

#include <algorithm>

namespace jaxhetero {

std::string decode_text(std::span<const std::byte> bytes) {
  std::string text;
  for (std::byte byte : bytes.first(std::min(bytes.size(), kMaxTextBytes))) {
    const char c = static_cast<char>(byte);
    text.push_back(c >= ' ' && c <= '~' ? c : '?');
  }
  return text;
}

}  // namespace jaxhetero
