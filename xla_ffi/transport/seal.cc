#include "xla_ffi/transport/seal.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "xla_ffi/base/buffers.h"

namespace jaxhetero {
namespace {

constexpr size_t kLengthBytes = 4;
constexpr size_t kMostRecordBytes = kLengthBytes + Seal::kMostBytes + kTagBytes;

void write_length(size_t bytes, std::byte* to) {
  for (size_t i = 0; i < kLengthBytes; ++i) to[i] = static_cast<std::byte>(bytes >> (8 * i));
}

size_t read_length(const std::byte* from) {
  size_t bytes = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) bytes |= std::to_integer<size_t>(from[i]) << (8 * i);
  return bytes;
}

Status library_failed() { return {Code::kInternal, "OpenSSL could not encrypt or decrypt"}; }

}  // namespace

Seal::Seal(const std::shared_ptr<const CryptoLibrary>& library, const Handshake::Keys& keys, uint64_t records_per_key)
    : encrypting_(library, keys.sending, Cipher::Direction::kEncrypt, records_per_key),
      decrypting_(library, keys.receiving, Cipher::Direction::kDecrypt, records_per_key),
      in_(2 * kMostRecordBytes) {}

Status Seal::close(std::span<const iovec> pieces, size_t bytes) {
  bytes = std::min({bytes, total_bytes(pieces), kMostBytes});
  out_.resize(kLengthBytes + bytes + kTagBytes);
  out_begin_ = 0;
  out_frame_bytes_ = bytes;
  write_length(bytes, out_.data());
  bool works = encrypting_.start() && encrypting_.add_plain(std::span(out_).first(kLengthBytes));
  size_t at = kLengthBytes;
  for (const iovec& piece : pieces) {
    const auto part = bytes_of(piece).first(std::min(bytes, piece.iov_len));
    works = works && (part.empty() || encrypting_.update(part, out_.data() + at));
    at += part.size();
    bytes -= part.size();
    if (bytes == 0) break;
  }
  return works && encrypting_.finish(std::span(out_).last<kTagBytes>()) ? Status() : library_failed();
}

size_t Seal::note_sent(size_t bytes) {
  out_begin_ += bytes;
  if (!unsent().empty()) return 0;
  return std::exchange(out_frame_bytes_, 0);
}

std::span<std::byte> Seal::room() {
  // A part of a record is moved to the front, unless the rest of it fits behind it.
  if (in_begin_ + kMostRecordBytes > in_.size()) {
    std::memmove(in_.data(), in_.data() + in_begin_, in_end_ - in_begin_);
    in_end_ -= std::exchange(in_begin_, 0);
  }
  return std::span(in_).subspan(in_end_);
}

Result<size_t> Seal::open(std::span<const iovec> pieces) {
  if (!opened_.empty()) return hand_out(pieces);
  const std::span<const std::byte> come = rest();
  if (come.size() < kLengthBytes) return size_t{0};
  const size_t bytes = read_length(come.data());
  if (bytes == 0 || bytes > kMostBytes) {
    return Status(Code::kProtocol, "it sent a record of " + std::to_string(bytes) + " bytes");
  }
  if (come.size() < kLengthBytes + bytes + kTagBytes) return size_t{0};
  const bool fits = bytes <= total_bytes(pieces);
  std::byte* const own = in_.data() + in_begin_ + kLengthBytes;
  const std::array<iovec, 1> in_place = {iovec{own, bytes}};
  if (Status status = decrypt(bytes, fits ? pieces : in_place); !status.ok()) return status;
  in_begin_ += kLengthBytes + bytes + kTagBytes;
  if (in_begin_ == in_end_) in_begin_ = in_end_ = 0;
  if (fits) return bytes;
  opened_ = {own, bytes};
  return hand_out(pieces);
}

// The record at the front, which is whole and has so many bytes of frames.
Status Seal::decrypt(size_t bytes, std::span<const iovec> pieces) {
  const std::span<const std::byte> record = rest().first(kLengthBytes + bytes + kTagBytes);
  bool works = decrypting_.start() && decrypting_.add_plain(record.first(kLengthBytes));
  std::span<const std::byte> text = record.subspan(kLengthBytes, bytes);
  for (const iovec& piece : pieces) {
    const size_t part = std::min(text.size(), piece.iov_len);
    works = works && (part == 0 || decrypting_.update(text.first(part), static_cast<std::byte*>(piece.iov_base)));
    text = text.subspan(part);
  }
  if (!works) return library_failed();
  if (decrypting_.is_genuine(record.last<kTagBytes>())) return {};
  return {Code::kProtocol, "what it sent was changed on its way: a record of " + std::to_string(bytes) +
                               " bytes is not the one that it encrypted"};
}

size_t Seal::hand_out(std::span<const iovec> pieces) {
  size_t given = 0;
  for (const iovec& piece : pieces) {
    const size_t part = std::min(opened_.size(), piece.iov_len);
    if (part > 0) std::memcpy(piece.iov_base, opened_.data(), part);
    opened_ = opened_.subspan(part);
    given += part;
  }
  return given;
}

}  // namespace jaxhetero
