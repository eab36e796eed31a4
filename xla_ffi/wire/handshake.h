// The handshake: two processes prove to each other that they know the job token, before any frame. Pure: bytes in,
// bytes out; the connection owns the socket.
//
//   client -> server   magic number, protocol version, the server's strand, client's nonce
//   server -> client   magic number, protocol version, 0, server's nonce, server's proof
//   client -> server   client's proof
//
// The highest bit of the third number says whether the sender encrypts all that follows. It is never bargained over: a
// side that finds the other one's bit different from its own ends the handshake. Proofs and keys are of all that comes
// before a proof, so nobody on the way can change any of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/auth.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {

class Handshake {
 public:
  enum class Side : uint8_t { kClient, kServer };

  static constexpr size_t kHelloBytes = 12 + sizeof(Nonce);
  // The strand that a client's hello, which nothing has proved yet, asks for.
  static uint16_t strand_of(std::span<const std::byte, kHelloBytes> hello);

  // `token` outlives the handshake. `nonce` is fresh. `peer` names the other side in error messages. `strand` is that
  // of the server which a client wants.
  Handshake(Side side, std::span<const std::byte> token, const Nonce& nonce, std::string peer, uint16_t strand = 0,
            bool encrypts = false);

  // The bytes to send first; none for a server.
  [[nodiscard]] Bytes opening() const { return side_ == Side::kClient ? own_hello_ : Bytes(); }
  // The memory for the peer's next bytes.
  [[nodiscard]] std::span<std::byte> wanted() { return std::span(message_).subspan(received_bytes_, left_bytes()); }
  // `bytes` of wanted() have been filled. Sets `reply` to the bytes to send now, also if the Status is an error.
  Status take(size_t bytes, Bytes& reply);
  // Why the handshake failed, if the peer closed the connection.
  [[nodiscard]] Status hung_up() const;

  [[nodiscard]] bool is_done() const { return phase_ == Phase::kDone; }
  // The secret keys of what the two sides send from now on. Both have proved the token.
  struct Keys {
    Digest sending;
    Digest receiving;
  };
  [[nodiscard]] Keys keys() const;
  [[nodiscard]] Side side() const { return side_; }

 private:
  enum class Phase : uint8_t { kHello, kProof, kDone };

  Status take_hello();
  [[nodiscard]] Digest proof_of(Side speaker) const;
  [[nodiscard]] size_t message_bytes() const;
  [[nodiscard]] size_t left_bytes() const { return message_bytes() - received_bytes_; }
  Status take_client_hello(Bytes& reply);
  Status take_server_hello(Bytes& reply);
  Status take_client_proof();

  Side side_;
  Phase phase_ = Phase::kHello;
  std::span<const std::byte> token_;
  bool encrypts_;
  Bytes own_hello_;
  Bytes peer_hello_;
  std::string peer_;
  std::array<std::byte, 128> message_{};  // the peer's message
  size_t received_bytes_ = 0;
};

}  // namespace jaxhetero
