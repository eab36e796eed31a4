// How two processes prove to each other that they know the job token, before any frame: bytes in, bytes out, no socket.
//
// Client: magic, protocol version, nonce. Server: the same and its proof. Client: its proof.
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

  // `token` outlives this; `nonce` was never used before; `peer` is what messages call the other side.
  Handshake(Side side, std::span<const std::byte> token, const Nonce& nonce, std::string peer);

  // What to send at once; nothing for a server.
  [[nodiscard]] Bytes opening() const;
  // Where the peer's next bytes belong.
  [[nodiscard]] std::span<std::byte> wanted() { return std::span(message_).subspan(received_bytes_, left_bytes()); }
  // `bytes` of those are there. Fills `reply` with what to send now, even where the Status says that this is the end.
  Status take(size_t bytes, Bytes& reply);
  // The peer hung up instead.
  [[nodiscard]] Status hung_up() const;

  [[nodiscard]] bool is_done() const { return stage_ == Stage::kDone; }
  [[nodiscard]] Side side() const { return side_; }

 private:
  enum class Stage : uint8_t { kHello, kProof, kDone };

  [[nodiscard]] size_t message_bytes() const;
  [[nodiscard]] size_t left_bytes() const { return message_bytes() - received_bytes_; }
  Status take_client_hello(Bytes& reply);
  Status take_server_hello(Bytes& reply);
  Status take_client_proof();

  Side side_;
  Stage stage_ = Stage::kHello;
  std::span<const std::byte> token_;
  Nonce own_nonce_;
  Nonce peer_nonce_{};
  std::string peer_;
  std::array<std::byte, 128> message_{};  // of the peer
  size_t received_bytes_ = 0;
};

}  // namespace jaxhetero
