// The secret of a job and the proof of knowing it: SHA-256 (FIPS 180-4) and HMAC (RFC 2104).
//
// Written out here because the build asks for nothing but a compiler; tests hold it to the published vectors.
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

// The proof that one side sends: HMAC over who speaks ("client" or "server") and both sides' nonces. Naming the speaker
// keeps a proof from being sent back to its author; fresh nonces keep it from being replayed.
Digest prove(std::span<const std::byte> token, std::string_view speaker, const Nonce& client, const Nonce& server);

// Equality in time that does not depend on where the difference is.
bool same_digest(const Digest& a, const Digest& b);

// From the kernel's generator; none where the kernel has no such call.
std::optional<Nonce> fresh_nonce();

}  // namespace jaxhetero
