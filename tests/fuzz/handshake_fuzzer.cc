// Both sides of the handshake against a peer that says anything, in pieces of any size. Bytes of the input: the side
// and whether it encrypts, how long the pieces are, and what the peer says. The nonces are always the same, so that an
// input can be right.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "xla_ffi/wire/handshake.h"

namespace {

using namespace jaxhetero;

constexpr size_t kHelloBytes = 44;

// Whether what the peer said is what only somebody with the token can say.
bool proves_it(Handshake::Side side, std::span<const std::byte> said, const Bytes& token,
               std::span<const std::byte> own) {
  if (said.size() < kHelloBytes + sizeof(Digest)) return false;
  const auto peer = said.first(kHelloBytes);
  const bool is_server = side == Handshake::Side::kServer;
  const Digest proof = is_server ? prove(token, "client", peer, own) : prove(token, "server", own, peer);
  return std::ranges::equal(said.subspan(kHelloBytes, proof.size()), proof);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const Handshake::Side side = data[0] % 2 == 0 ? Handshake::Side::kServer : Handshake::Side::kClient;
  const size_t piece_bytes = data[1] + size_t{1};
  const auto said = std::as_bytes(std::span(data + 2, size - 2));

  const Bytes token(16, std::byte{'t'});
  const Nonce nonce{std::byte{1}};
  const bool encrypts = (data[0] & 2) != 0;
  const Bytes own =
      Handshake(Handshake::Side::kClient, token, nonce, "", 0, encrypts).opening();  // as a server says it
  Handshake handshake(side, token, nonce, "10.0.0.3:4000", 0, encrypts);
  if (handshake.opening().empty() != (side == Handshake::Side::kServer)) std::abort();
  size_t taken = 0;
  Bytes reply;
  while (taken < said.size() && !handshake.is_done()) {
    const std::span<std::byte> wanted = handshake.wanted();
    if (wanted.empty()) std::abort();
    const size_t count = std::min({wanted.size(), piece_bytes, said.size() - taken});
    std::ranges::copy(said.subspan(taken, count), wanted.begin());
    taken += count;
    if (!handshake.take(count, reply).ok()) return 0;
  }
  if (handshake.hung_up().ok()) std::abort();
  if (handshake.is_done() != proves_it(side, said.first(taken), token, own)) std::abort();
  return 0;
}
