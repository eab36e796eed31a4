#include "xla_ffi/sum/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "xla_ffi/sum/arithmetic.h"

namespace jaxhetero {
namespace {

#if defined(__x86_64__)
JAXHETERO_WIDE void stream_wide(const std::byte* from, std::byte* to, size_t bytes) {
  constexpr size_t kVector = sizeof(__m256i);
  constexpr size_t kStep = 4 * kVector;
  // Streaming stores must be aligned.
  size_t at = std::min(bytes, (kVector - reinterpret_cast<uintptr_t>(to) % kVector) % kVector);
  std::memcpy(to, from, at);
  for (; at + kStep <= bytes; at += kStep) {
    for (size_t i = at; i < at + kStep; i += kVector) {
      const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), value);
    }
  }
  _mm_sfence();  // other threads, and the kernel, see them in order again
  std::memcpy(to + at, from + at, bytes - at);
}
#else
void stream_wide(const std::byte* from, std::byte* to, size_t bytes) { std::memcpy(to, from, bytes); }
#endif

}  // namespace

void stream_copy(const std::byte* from, std::byte* to, size_t bytes) {
  if (bytes == 0) return;
  if (have_wide_vectors()) return stream_wide(from, to, bytes);
  std::memcpy(to, from, bytes);
}

}  // namespace jaxhetero
