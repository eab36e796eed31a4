// The proof that a process knows the job token, and keys that follow from it: SHA-256 (FIPS 180-4), HMAC (RFC 2104) and
// HKDF (RFC 5869). Pure functions.
//
// They are implemented here so that the build needs no library; tests check them against the published vectors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace jaxhetero {

using Digest = std::array<std::byte, 32>;
using Nonce = std::array<std::byte, 32>;

Digest sha256(std::span<const std::byte> message);
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message);

// The proof that one side sends: HMAC over its role `speaker` ("client" or "server") and the hellos of both sides,
// which have one size. The role keeps a peer from reflecting a proof to its author; fresh nonces in the hellos keep a
// proof from being replayed.
Digest prove(std::span<const std::byte> token, std::string_view speaker, std::span<const std::byte> client,
             std::span<const std::byte> server);

// At most 32 bytes of a key: HKDF-SHA256 of `secret`.
Digest derive_key(std::span<const std::byte> secret, std::span<const std::byte> salt, std::string_view info);

// Compares in constant time.
bool same_digest(const Digest& a, const Digest& b);

// From the kernel's random generator; nullopt if that fails.
std::optional<Nonce> fresh_nonce();

}  // namespace jaxhetero
