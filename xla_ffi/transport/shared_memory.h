// Memory that processes of one host share. One of them makes it and tells the others, in a SharedOffer, where it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "xla_ffi/base/fd.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

class SharedMemory {
 public:
  // Who else may write; and whether all pages are there from the start, or only those that somebody has touched.
  enum class Use : uint8_t { kBothWrite, kMakerWrites };

  static Result<SharedMemory> create(size_t bytes, Use use);
  static Result<SharedMemory> open(const SharedOffer& offer, size_t bytes, Use use);
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept
      : descriptor_(std::move(other.descriptor_)), offer_(other.offer_), mapped_(std::exchange(other.mapped_, {})) {}
  SharedMemory& operator=(SharedMemory&&) = delete;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  [[nodiscard]] const SharedOffer& offer() const { return offer_; }
  // Whoever shall has it open: nobody else.
  void close_descriptor() { descriptor_.reset(); }
  // Begins with a page; zeros at first.
  [[nodiscard]] std::span<std::byte> bytes() const;

 private:
  SharedMemory(Fd descriptor, const SharedOffer& offer, std::span<std::byte> mapped)
      : descriptor_(std::move(descriptor)), offer_(offer), mapped_(mapped) {}

  Fd descriptor_;
  SharedOffer offer_;
  std::span<std::byte> mapped_;  // the key, and from the next page on what is shared
};

}  // namespace jaxhetero
