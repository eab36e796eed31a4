// Building blocks of sparse planes: which of 64 bytes have a value, and moving the chosen ones together and apart. For
// each vector unit.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace jaxhetero::codec {

inline constexpr size_t kGroup = 64;  // bytes that a mask has bits for

// Without vectors.
struct Plain {
  // A bit for each of 64 bytes: whether it is `value`.
  static uint64_t equal(const uint8_t* bytes, uint8_t value) {
    uint64_t mask = 0;
    for (size_t i = 0; i < kGroup; ++i) mask |= static_cast<uint64_t>(bytes[i] == value) << i;
    return mask;
  }
  // Writes the chosen ones of 64 bytes to the front of `out`, which has room for 64.
  static void compress(const uint8_t* bytes, uint64_t mask, uint8_t* out) {
    for (; mask != 0; mask &= mask - 1) *out++ = bytes[std::countr_zero(mask)];
  }
  // Writes 64 bytes: the chosen ones from the front of `bytes`, which has 64; else 0.
  static void expand(const uint8_t* bytes, uint64_t mask, uint8_t* out) {
    std::memset(out, 0, kGroup);
    for (; mask != 0; mask &= mask - 1) out[std::countr_zero(mask)] = *bytes++;
  }
};

#if defined(__x86_64__)
// By a mask of 8 bits: where each of 8 bytes comes from. No byte is at 0x80.
struct Shuffles {
  std::array<std::array<uint8_t, 8>, 256> compress{};
  std::array<std::array<uint8_t, 8>, 256> expand{};
};
inline constexpr Shuffles kShuffles = [] {
  Shuffles shuffles;
  for (size_t mask = 0; mask < 256; ++mask) {
    shuffles.compress[mask].fill(0x80);
    shuffles.expand[mask].fill(0x80);
    uint8_t count = 0;
    for (uint8_t bit = 0; bit < 8; ++bit) {
      if ((mask >> bit & 1) == 0) continue;
      shuffles.compress[mask][count] = bit;
      shuffles.expand[mask][bit] = count++;
    }
  }
  return shuffles;
}();

#define JAXHETERO_AVX2 [[gnu::target("avx2,popcnt")]]
struct Avx2 {
  JAXHETERO_AVX2 static uint64_t equal(const uint8_t* bytes, uint8_t value) {
    const __m256i all = _mm256_set1_epi8(static_cast<char>(value));
    const auto* at = reinterpret_cast<const __m256i*>(bytes);
    const auto low = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(at), all)));
    const auto high = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(at + 1), all)));
    return static_cast<uint64_t>(high) << 32 | low;
  }
  JAXHETERO_AVX2 static void compress(const uint8_t* bytes, uint64_t mask, uint8_t* out) {
    for (size_t i = 0; i < kGroup; i += 8, mask >>= 8) {
      store(out, shuffled(bytes + i, kShuffles.compress[mask & 0xff].data()));
      out += std::popcount(mask & 0xff);
    }
  }
  JAXHETERO_AVX2 static void expand(const uint8_t* bytes, uint64_t mask, uint8_t* out) {
    for (size_t i = 0; i < kGroup; i += 8, mask >>= 8) {
      store(out + i, shuffled(bytes, kShuffles.expand[mask & 0xff].data()));
      bytes += std::popcount(mask & 0xff);
    }
  }

 private:
  JAXHETERO_AVX2 static __m128i shuffled(const uint8_t* bytes, const uint8_t* places) {
    return _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)),
                            _mm_loadl_epi64(reinterpret_cast<const __m128i*>(places)));
  }
  JAXHETERO_AVX2 static void store(uint8_t* out, __m128i eight) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), eight);
  }
};

// Of all the extensions of AVX-512, those that processors have which can compress bytes.
#define JAXHETERO_AVX512 [[gnu::target("avx2,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2")]]
struct Avx512 {
  JAXHETERO_AVX512 static uint64_t equal(const uint8_t* bytes, uint8_t value) {
    return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(bytes), _mm512_set1_epi8(static_cast<char>(value)));
  }
  // In a register first: compressing into memory is slow on some processors.
  JAXHETERO_AVX512 static void compress(const uint8_t* bytes, uint64_t mask, uint8_t* out) {
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi8(mask, _mm512_loadu_si512(bytes)));
  }
  JAXHETERO_AVX512 static void expand(const uint8_t* bytes, uint64_t mask, uint8_t* out) {
    _mm512_storeu_si512(out, _mm512_maskz_expand_epi8(mask, _mm512_loadu_si512(bytes)));
  }
};
#endif

}  // namespace jaxhetero::codec
