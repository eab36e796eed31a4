// Memory that processes of one host share. One process creates it; others open it with the SharedOffer that it sends.
// The object owns the mapping.
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
  // kBothWrite: writable for the opener too, and all pages are allocated at once. kMakerWrites: read-only for the
  // opener, and pages are allocated when they are touched.
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
  // Everybody who may open the memory has done so: from now on nobody can.
  void close_descriptor() { descriptor_.reset(); }
  // Page-aligned; zero at first.
  [[nodiscard]] std::span<std::byte> bytes() const;

 private:
  SharedMemory(Fd descriptor, const SharedOffer& offer, std::span<std::byte> mapped)
      : descriptor_(std::move(descriptor)), offer_(offer), mapped_(mapped) {}

  Fd descriptor_;
  SharedOffer offer_;
  std::span<std::byte> mapped_;  // a page that starts with the key, then bytes()
};

}  // namespace jaxhetero
