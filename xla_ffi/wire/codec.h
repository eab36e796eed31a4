// The encoding of messages: numbers (fixed-width, little-endian), texts and lists, one after the other, without tags.
// Each message lists its fields once, in a function fields(); Writer and Reader both follow it. Neither does any I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "xla_ffi/base/status.h"

namespace jaxhetero {

using Bytes = std::vector<std::byte>;

// Text from a peer, made safe to print: at most kMaxTextBytes, and anything but printable ASCII becomes '?'.
std::string decode_text(std::span<const std::byte> bytes);

inline Status malformed(std::string what) { return {Code::kProtocol, "malformed " + std::move(what)}; }

inline constexpr size_t kMaxTextBytes = 8192;  // the most bytes of a text that is the rest of a message
inline constexpr size_t kMaxNameBytes = 255;   // the most bytes of a text inside a message

// For fields(): a message is const when it is written, and not const when it is read.
template <typename Message, typename Wanted>
concept IsA = std::is_same_v<std::remove_const_t<Message>, Wanted>;

class Writer {
 public:
  template <typename... Fields>
  void operator()(const Fields&... fields) {
    (put(fields), ...);
  }

  template <typename Item>
  void list(const std::vector<Item>& items, size_t /*most*/) {
    put(static_cast<uint32_t>(items.size()));
    for (const Item& item : items) {
      if constexpr (std::is_same_v<Item, std::string> || std::is_integral_v<Item> || std::is_enum_v<Item>) {
        put(item);
      } else {
        fields(*this, item);
      }
    }
  }

  void raw(std::span<const std::byte> bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }

  [[nodiscard]] Bytes take() { return std::move(bytes_); }

 private:
  template <typename Number>
    requires std::is_integral_v<Number> || std::is_enum_v<Number>
  void put(Number value) {
    for (size_t i = 0; i < sizeof value; ++i) {
      bytes_.push_back(static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i)));
    }
  }
  void put(const std::string& text) {
    const std::string_view name = std::string_view(text).substr(0, kMaxNameBytes);
    put(static_cast<uint16_t>(name.size()));
    raw(std::as_bytes(std::span(name)));
  }

  Bytes bytes_;
};

// Reads fields. Once the bytes have run out, ok() is false, every number is zero and every text is empty.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename... Fields>
  void operator()(Fields&... fields) {
    (get(fields), ...);
  }

  // Not ok() if the list claims more than `most` items.
  template <typename Item>
  void list(std::vector<Item>& items, size_t most) {
    uint32_t count = 0;
    get(count);
    ok_ = ok_ && count <= most;
    for (uint32_t i = 0; i < count && ok_; ++i) {
      Item item{};
      if constexpr (std::is_same_v<Item, std::string> || std::is_integral_v<Item> || std::is_enum_v<Item>) {
        get(item);
      } else {
        fields(*this, item);
      }
      items.push_back(std::move(item));
    }
  }

  void raw(std::span<std::byte> bytes) {
    for (std::byte& byte : bytes) get(byte);
  }

  [[nodiscard]] bool ok() const { return ok_; }
  [[nodiscard]] std::span<const std::byte> rest() const { return bytes_; }
  // ok(), and every byte was read.
  [[nodiscard]] bool finished() const { return ok_ && bytes_.empty(); }

 private:
  template <typename Number>
    requires std::is_integral_v<Number> || std::is_enum_v<Number>
  void get(Number& into) {
    uint64_t value = 0;
    ok_ = ok_ && bytes_.size() >= sizeof into;
    if (ok_) {
      for (size_t i = 0; i < sizeof into; ++i) value |= std::to_integer<uint64_t>(bytes_[i]) << (8 * i);
      bytes_ = bytes_.subspan(sizeof into);
    }
    if constexpr (std::is_same_v<Number, bool>) {
      into = value != 0;
    } else {
      into = static_cast<Number>(value);
    }
  }
  void get(std::string& into) {
    uint16_t length = 0;
    get(length);
    ok_ = ok_ && length <= kMaxNameBytes && length <= bytes_.size();
    into = ok_ ? decode_text(bytes_.first(length)) : std::string();
    if (ok_) bytes_ = bytes_.subspan(length);
  }

  std::span<const std::byte> bytes_;
  bool ok_ = true;
};

}  // namespace jaxhetero
