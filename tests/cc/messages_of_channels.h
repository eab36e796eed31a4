// Messages of channels, as a test posts them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/bytes.h"
#include "xla_ffi/channel/transfer.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {

// The memory of a message: buffers, each by itself, so that a sanitizer sees where one ends.
class MessageMemory {
 public:
  explicit MessageMemory(const std::vector<size_t>& sizes) {
    for (const size_t bytes : sizes) buffers_.emplace_back(bytes, std::byte{0xee});
  }
  // Filled with what the seed gives.
  MessageMemory(const std::vector<size_t>& sizes, uint32_t seed) : MessageMemory(sizes) {
    uint64_t own_seed = uint64_t{seed} << 32;
    for (Bytes& buffer : buffers_) buffer = pattern(buffer.size(), own_seed++);
  }

  [[nodiscard]] Transfer::Message message(uint32_t peer, uint32_t channel, uint64_t tag, std::string text) {
    Transfer::Message message{peer, channel, tag, std::move(text), {}};
    for (Bytes& buffer : buffers_) message.memory.append(buffer.data(), buffer.size());
    return message;
  }
  [[nodiscard]] Bytes contents() const {
    Bytes all;
    for (const Bytes& buffer : buffers_) all.insert(all.end(), buffer.begin(), buffer.end());
    return all;
  }

 private:
  std::vector<Bytes> buffers_;
};

}  // namespace jaxhetero
