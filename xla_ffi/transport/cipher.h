// AES-128-GCM (NIST SP 800-38D) by the libcrypto of OpenSSL 3, which is opened at run time: a job that does not encrypt
// needs no such library.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/auth.h"

struct evp_cipher_ctx_st;  // OpenSSL's own names
struct evp_cipher_st;

namespace jaxhetero {

// Any thread.
class CryptoLibrary {
 public:
  // The library stays loaded for good.
  static Result<std::shared_ptr<const CryptoLibrary>> open(const char* name = "libcrypto.so.3");
  // The library if it is wanted, else null.
  static Result<std::shared_ptr<const CryptoLibrary>> open_if(bool wanted);

 private:
  friend class Cipher;
  using Context = evp_cipher_ctx_st;

  Context* (*new_context_)() = nullptr;
  void (*free_context_)(Context* context) = nullptr;
  const evp_cipher_st* (*aes_128_gcm_)() = nullptr;
  int (*start_)(Context* context, const evp_cipher_st* cipher, void* engine, const unsigned char* key,
                const unsigned char* nonce, int encrypts) = nullptr;
  int (*update_)(Context* context, unsigned char* out, int* out_bytes, const unsigned char* in, int in_bytes) = nullptr;
  int (*finish_)(Context* context, unsigned char* out, int* out_bytes) = nullptr;
  int (*control_)(Context* context, int command, int number, void* data) = nullptr;
};

inline constexpr size_t kTagBytes = 16;

// So many records have one key, 64 GiB at most: with much more, what is encrypted could be told from random bytes.
inline constexpr uint64_t kRecordsPerKey = uint64_t{1} << 20;

// One direction of a connection. The records of a key are numbered from 0, and the number is the nonce: so a record
// that was dropped, moved or repeated on its way fails like one that was changed. For one record: start(), then
// update() with what is authenticated and not encrypted, then with the pieces of the text, then the tag.
class Cipher {
 public:
  enum class Direction : uint8_t { kDecrypt = 0, kEncrypt = 1 };

  // The first key is the first half of `secret`. The next ones follow from it, so that both sides have them.
  Cipher(std::shared_ptr<const CryptoLibrary> library, const Digest& secret, Direction direction,
         uint64_t records_per_key = kRecordsPerKey);

  // Each returns false if the library fails, which it does only for want of memory.
  [[nodiscard]] bool start();
  [[nodiscard]] bool add_plain(std::span<const std::byte> bytes);
  // `out` has the size of `in`, and may be the same memory.
  [[nodiscard]] bool update(std::span<const std::byte> in, std::byte* out);
  [[nodiscard]] bool finish(std::span<std::byte, kTagBytes> tag);
  // Whether the record is the one that the other side sent.
  [[nodiscard]] bool is_genuine(std::span<const std::byte, kTagBytes> tag);

 private:
  std::shared_ptr<const CryptoLibrary> library_;
  std::unique_ptr<CryptoLibrary::Context, void (*)(CryptoLibrary::Context*)> context_;
  Digest secret_;
  Direction direction_;
  uint64_t records_per_key_;
  uint64_t number_ = 0;  // of the next record
};

}  // namespace jaxhetero
