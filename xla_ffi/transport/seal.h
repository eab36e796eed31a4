// The bytes of an encrypted connection: both directions are cut into records, each of them encrypted, numbered and
// tagged. Pure: bytes in, bytes out; the connection owns the socket.
//
//   4 bytes    how many bytes of frames the record has: 1 to kMostBytes
//   n bytes    they, encrypted
//   16 bytes   the tag of both
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/cipher.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/handshake.h"

namespace jaxhetero {

class Seal {
 public:
  static constexpr size_t kMostBytes = (size_t{64} << 10) + kHeaderBytes;

  Seal(const std::shared_ptr<const CryptoLibrary>& library, const Handshake::Keys& keys,
       uint64_t records_per_key = kRecordsPerKey);

  // --- Sending.

  // Makes a record of the first `bytes` of `pieces`, or as many as a record may have. There is none unsent.
  Status close(std::span<const iovec> pieces, size_t bytes);
  // What is left to send of the record.
  [[nodiscard]] std::span<const std::byte> unsent() const { return std::span(out_).subspan(out_begin_); }
  // So many are sent. Returns how many bytes of frames the record had once it is sent whole, and 0 before.
  size_t note_sent(size_t bytes);
  // How many bytes of frames are in a record that is not sent whole.
  [[nodiscard]] size_t unsent_frame_bytes() const { return out_frame_bytes_; }

  // --- Receiving.

  // Where the next bytes of the socket go, once open() has returned 0; and that so many have come.
  [[nodiscard]] std::span<std::byte> room();
  void note_received(size_t bytes) { in_end_ += bytes; }
  // Puts bytes of frames into `pieces`, and returns how many; 0: a record is not whole. What it puts there is genuine
  // if it returns no error.
  Result<size_t> open(std::span<const iovec> pieces);
  // What came behind the last record.
  [[nodiscard]] std::span<const std::byte> rest() const {
    return std::span(in_).subspan(in_begin_, in_end_ - in_begin_);
  }

 private:
  Status decrypt(size_t bytes, std::span<const iovec> pieces);
  size_t hand_out(std::span<const iovec> pieces);

  Cipher encrypting_;
  Bytes out_;  // the record that is being sent
  size_t out_begin_ = 0;
  size_t out_frame_bytes_ = 0;

  Cipher decrypting_;
  Bytes in_;  // bytes of the socket, from in_begin_ to in_end_
  size_t in_begin_ = 0;
  size_t in_end_ = 0;
  std::span<const std::byte> opened_;  // the part of in_ that is decrypted and not handed out
};

}  // namespace jaxhetero
