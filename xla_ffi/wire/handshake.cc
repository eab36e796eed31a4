#include "xla_ffi/wire/handshake.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "xla_ffi/wire/frame.h"

namespace jaxhetero {
namespace {

constexpr std::string_view kMagic = "jxhetero";
constexpr size_t kVersionAt = kMagic.size();
constexpr size_t kStrandAt = kVersionAt + sizeof(uint16_t);
constexpr size_t kHelloBytes = Handshake::kHelloBytes;
constexpr uint16_t kEncrypts = 1 << 15;  // the bit beside the strand
constexpr size_t kServerHelloBytes = kHelloBytes + sizeof(Digest);
static_assert(kStrandAt + sizeof(uint16_t) + sizeof(Nonce) == kHelloBytes);

void append(Bytes& bytes, uint16_t number) {
  for (const int shift : {0, 8}) bytes.push_back(static_cast<std::byte>(number >> shift));
}

uint16_t read_number(std::span<const std::byte> bytes, size_t at) {
  return static_cast<uint16_t>(std::to_integer<uint16_t>(bytes[at]) | std::to_integer<uint16_t>(bytes[at + 1]) << 8);
}

Bytes hello_of(uint16_t strand, bool encrypts, const Nonce& nonce) {
  Bytes bytes;
  for (char c : kMagic) bytes.push_back(static_cast<std::byte>(c));
  append(bytes, kProtocolVersion);
  append(bytes, encrypts ? strand | kEncrypts : strand);
  bytes.insert(bytes.end(), nonce.begin(), nonce.end());
  return bytes;
}

Digest read_digest(std::span<const std::byte> bytes) {
  Digest digest;
  std::ranges::copy(bytes.first(digest.size()), digest.begin());
  return digest;
}

}  // namespace

uint16_t Handshake::strand_of(std::span<const std::byte, kHelloBytes> hello) {
  return read_number(hello, kStrandAt) & ~kEncrypts;
}

Handshake::Handshake(Side side, std::span<const std::byte> token, const Nonce& nonce, std::string peer, uint16_t strand,
                     bool encrypts)
    : side_(side),
      token_(token),
      encrypts_(encrypts),
      own_hello_(hello_of(side == Side::kClient ? strand : 0, encrypts, nonce)),
      peer_(std::move(peer)) {}

// Keeps the peer's hello, or says why to refuse it.
Status Handshake::take_hello() {
  const auto bytes = std::span<const std::byte>(message_).first(kHelloBytes);
  const auto magic = bytes.first(kMagic.size());
  if (!std::ranges::equal(magic, std::as_bytes(std::span(kMagic)))) {
    return {Code::kProtocol, peer_ + " does not speak the protocol of jaxhetero"};
  }
  const uint16_t version = read_number(bytes, kVersionAt);
  if (version != kProtocolVersion) {
    return {Code::kVersionMismatch, peer_ + " speaks protocol version " + std::to_string(version) +
                                        ", this process version " + std::to_string(kProtocolVersion) +
                                        "; install the same version of jaxhetero everywhere"};
  }
  if (const bool encrypts = (read_number(bytes, kStrandAt) & kEncrypts) != 0; encrypts != encrypts_) {
    return {Code::kVersionMismatch,
            peer_ + (encrypts ? " encrypts, and this process does not" : " does not encrypt, and this process does") +
                "; give all processes of the job the same JAXHETERO_ENCRYPT"};
  }
  peer_hello_.assign(bytes.begin(), bytes.end());
  return {};
}

Digest Handshake::proof_of(Side speaker) const {
  const bool is_client = side_ == Side::kClient;
  return prove(token_, speaker == Side::kClient ? "client" : "server", is_client ? own_hello_ : peer_hello_,
               is_client ? peer_hello_ : own_hello_);
}

size_t Handshake::message_bytes() const {
  if (phase_ == Phase::kDone) return 0;
  if (phase_ == Phase::kProof) return sizeof(Digest);
  return side_ == Side::kServer ? kHelloBytes : kServerHelloBytes;
}

Status Handshake::take(size_t bytes, Bytes& reply) {
  reply.clear();
  received_bytes_ += bytes;
  if (left_bytes() > 0) return {};
  received_bytes_ = 0;
  if (phase_ == Phase::kProof) return take_client_proof();
  return side_ == Side::kServer ? take_client_hello(reply) : take_server_hello(reply);
}

Status Handshake::take_client_hello(Bytes& reply) {
  if (const Status refusal = take_hello(); !refusal.ok()) {
    // A peer of another version, or setting, gets an answer, so that its error can name ours. Any other gets none.
    if (refusal.code() == Code::kVersionMismatch) {
      reply = own_hello_;
      reply.resize(kServerHelloBytes);
    }
    return refusal;
  }
  reply = own_hello_;
  const Digest proof = proof_of(Side::kServer);
  reply.insert(reply.end(), proof.begin(), proof.end());
  phase_ = Phase::kProof;
  return {};
}

Status Handshake::take_server_hello(Bytes& reply) {
  if (Status refusal = take_hello(); !refusal.ok()) return refusal;
  if (!same_digest(proof_of(Side::kServer), read_digest(std::span(message_).subspan(kHelloBytes)))) {
    return {Code::kUnauthenticated,
            "its job token differs from the one of this process; give all of them the same "
            "JAXHETERO_TOKEN or JAXHETERO_TOKEN_FILE"};
  }
  const Digest proof = proof_of(Side::kClient);
  reply.assign(proof.begin(), proof.end());
  phase_ = Phase::kDone;
  return {};
}

Status Handshake::take_client_proof() {
  if (!same_digest(proof_of(Side::kClient), read_digest(std::span(message_)))) {
    return {Code::kUnauthenticated, "it could not prove that it knows the job token"};
  }
  phase_ = Phase::kDone;
  return {};
}

Handshake::Keys Handshake::keys() const {
  const bool is_client = side_ == Side::kClient;
  Bytes hellos = is_client ? own_hello_ : peer_hello_;
  const Bytes& second = is_client ? peer_hello_ : own_hello_;
  hellos.insert(hellos.end(), second.begin(), second.end());
  const Digest of_client = derive_key(token_, hellos, "jaxhetero client");
  const Digest of_server = derive_key(token_, hellos, "jaxhetero server");
  return is_client ? Keys{of_client, of_server} : Keys{of_server, of_client};
}

Status Handshake::hung_up() const {
  // A peer that closes after our proof has refused it. At any other point, the end says nothing about the token.
  const Code code = phase_ == Phase::kProof ? Code::kUnauthenticated : Code::kInternal;
  return {code, "it closed the connection in the handshake"};
}

}  // namespace jaxhetero
