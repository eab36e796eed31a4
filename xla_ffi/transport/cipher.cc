#include "xla_ffi/transport/cipher.h"

#include <dlfcn.h>

#include <algorithm>
#include <string>
#include <utility>

namespace jaxhetero {
namespace {

constexpr const char* kVersion = "OPENSSL_3.0.0";
// From OpenSSL's crypto.h and evp.h.
constexpr uint64_t kNoExitHandler = 0x00080000;
constexpr int kGetTag = 0x10;
constexpr int kSetTag = 0x11;

const unsigned char* text(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }
unsigned char* text(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlvsym(library, name, kVersion));
  return function != nullptr;
}

}  // namespace

Result<std::shared_ptr<const CryptoLibrary>> CryptoLibrary::open(const char* name) {
  void* loaded = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (loaded == nullptr) {
    const char* reason = dlerror();
    return Status(Code::kInvalidArgument,
                  std::string("encryption needs OpenSSL 3, and its library cannot be opened: ") +
                      (reason != nullptr ? reason : name) + "; install it, or unset encrypt everywhere");
  }
  const auto library = std::make_shared<CryptoLibrary>();
  int (*initialize)(uint64_t options, const void* settings) = nullptr;
  const bool has_all =
      find(loaded, "OPENSSL_init_crypto", initialize) && find(loaded, "EVP_CIPHER_CTX_new", library->new_context_) &&
      find(loaded, "EVP_CIPHER_CTX_free", library->free_context_) &&
      find(loaded, "EVP_aes_128_gcm", library->aes_128_gcm_) && find(loaded, "EVP_CipherInit_ex", library->start_) &&
      find(loaded, "EVP_CipherUpdate", library->update_) && find(loaded, "EVP_CipherFinal_ex", library->finish_) &&
      find(loaded, "EVP_CIPHER_CTX_ctrl", library->control_);
  // Our threads may still run when the process exits: the library must not tidy up under them.
  if (!has_all || initialize(kNoExitHandler, nullptr) != 1) {
    return Status(Code::kInvalidArgument,
                  std::string(name) + " is not the library of OpenSSL 3, which encryption needs");
  }
  return std::shared_ptr<const CryptoLibrary>(library);
}

Result<std::shared_ptr<const CryptoLibrary>> CryptoLibrary::open_if(bool wanted) {
  return wanted ? open() : std::shared_ptr<const CryptoLibrary>();
}

Cipher::Cipher(std::shared_ptr<const CryptoLibrary> library, const Digest& secret, Direction direction,
               uint64_t records_per_key)
    : library_(std::move(library)),
      context_(library_->new_context_(), library_->free_context_),
      secret_(secret),
      direction_(direction),
      records_per_key_(records_per_key) {}

bool Cipher::start() {
  if (!context_) return false;
  if (number_ == records_per_key_) {
    secret_ = derive_key(secret_, {}, "jaxhetero next key");
    number_ = 0;
  }
  std::array<std::byte, 12> nonce{};
  for (int i = 0; i < 8; ++i) nonce[4 + i] = static_cast<std::byte>(number_ >> (56 - 8 * i));
  const bool is_first = number_++ == 0;  // the library derives much from a key, once
  return library_->start_(context_.get(), is_first ? library_->aes_128_gcm_() : nullptr, nullptr,
                          is_first ? text(secret_.data()) : nullptr, text(nonce.data()),
                          static_cast<int>(direction_)) == 1;
}

bool Cipher::add_plain(std::span<const std::byte> bytes) {
  int count = 0;
  return library_->update_(context_.get(), nullptr, &count, text(bytes.data()), static_cast<int>(bytes.size())) == 1;
}

bool Cipher::update(std::span<const std::byte> in, std::byte* out) {
  int count = 0;
  return library_->update_(context_.get(), text(out), &count, text(in.data()), static_cast<int>(in.size())) == 1;
}

bool Cipher::finish(std::span<std::byte, kTagBytes> tag) {
  int count = 0;
  std::array<unsigned char, kTagBytes> rest;
  return library_->finish_(context_.get(), rest.data(), &count) == 1 &&
         library_->control_(context_.get(), kGetTag, kTagBytes, tag.data()) == 1;
}

bool Cipher::is_genuine(std::span<const std::byte, kTagBytes> tag) {
  std::array<std::byte, kTagBytes> expected;
  std::ranges::copy(tag, expected.begin());
  int count = 0;
  std::array<unsigned char, kTagBytes> rest;
  return library_->control_(context_.get(), kSetTag, kTagBytes, expected.data()) == 1 &&
         library_->finish_(context_.get(), rest.data(), &count) == 1;
}

}  // namespace jaxhetero
