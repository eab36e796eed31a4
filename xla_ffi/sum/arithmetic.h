// Building blocks of loops over elements: 16-bit floats, the floating-point mode, and detection of wide vectors.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <bit>
#include <cfenv>
#include <cstddef>
#include <cstdint>

namespace jaxhetero {

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

// Branch-free selects throughout, so that the compiler turns the loops below into vector code.
inline float load(F16 half) {
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
  const uint32_t magnitude = half.bits & 0x7fffu;
  // Shifted into the fields of a float, the exponent is 112 too small. A multiplication corrects normals and
  // subnormals.
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  const uint32_t is_special = 0u - static_cast<uint32_t>(magnitude >= 0x7c00u);
  return std::bit_cast<float>(sign | (special & is_special) | (finite & ~is_special));
}

inline F16 store_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // From 2^-14: re-bias and round to nearest even on the 13 bits that fall off; 65520 and above carry into infinity.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below: adding 0.5 leaves the result's bits, rounded by the adder, at the end of the mantissa.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t huge = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? huge : half;
  return {static_cast<uint16_t>(sign | half)};
}

inline float load(BF16 brain) { return std::bit_cast<float>(static_cast<uint32_t>(brain.bits) << 16); }

inline BF16 store_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
}

inline void store(float value, F16& out) { out = store_f16(value); }
inline void store(float value, BF16& out) { out = store_bf16(value); }

// While it lives, this thread rounds to nearest and keeps subnormals. A library of this process may have changed the
// thread's mode, and the bits of a sum must not depend on it.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&callers_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  std::fenv_t callers_;
};

// JAXHETERO_WIDE: compiled for processors with wide vectors. Call only if have_wide_vectors().
#if defined(__x86_64__)
#define JAXHETERO_WIDE [[gnu::target("avx2,f16c")]]
inline bool have_wide_vectors() {
  static const bool have = [] {
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    // Not every compiler's __builtin_cpu_supports() knows f16c.
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    return __builtin_cpu_supports("avx2") != 0 && f16c;
  }();
  return have;
}

// Conversions of eight elements. Compilers do not turn the branch-free load() and store() into good vector code, and
// float16's subnormals are slow in it.
JAXHETERO_WIDE inline void load_eight(const F16* halves, float* values) {
  _mm256_storeu_ps(values, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves))));
}
JAXHETERO_WIDE inline void load_eight(const BF16* halves, float* values) {
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), _mm256_slli_epi32(bits, 16));
}
JAXHETERO_WIDE inline void store_eight(const float* values, F16* halves) {
  const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(values), _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(halves), eight);
}
// As store_bf16().
JAXHETERO_WIDE inline void store_eight(const float* values, BF16* halves) {
  const __m256 eight = _mm256_loadu_ps(values);
  const __m256i bits = _mm256_castps_si256(eight);
  const __m256i upper = _mm256_srli_epi32(bits, 16);
  const __m256i half_step = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(upper, _mm256_set1_epi32(1)));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half_step), 16);
  const __m256i quiet_nan = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(eight, eight, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, quiet_nan, is_nan);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(halves), packed);
}

template <typename Half>
JAXHETERO_WIDE inline void load_wide(const Half* halves, float* values, size_t count) {
  const size_t whole = count - count % 8;
  for (size_t i = 0; i < whole; i += 8) load_eight(halves + i, values + i);
  for (size_t i = whole; i < count; ++i) values[i] = load(halves[i]);
}
template <typename Half>
JAXHETERO_WIDE inline void store_wide(const float* values, Half* halves, size_t count) {
  const size_t whole = count - count % 8;
  for (size_t i = 0; i < whole; i += 8) store_eight(values + i, halves + i);
  for (size_t i = whole; i < count; ++i) store(values[i], halves[i]);
}
#else
#define JAXHETERO_WIDE
inline bool have_wide_vectors() { return false; }
template <typename Half>
inline void load_wide(const Half* halves, float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) values[i] = load(halves[i]);
}
template <typename Half>
inline void store_wide(const float* values, Half* halves, size_t count) {
  for (size_t i = 0; i < count; ++i) store(values[i], halves[i]);
}
#endif

// Convert `count` elements. kIsWide only in functions that are JAXHETERO_WIDE. NaN stays NaN, with any payload.
template <bool kIsWide, typename Half>
[[gnu::always_inline]] inline void load_all(const Half* halves, float* values, size_t count) {
  if constexpr (kIsWide) {
    load_wide(halves, values, count);
  } else {
    for (size_t i = 0; i < count; ++i) values[i] = load(halves[i]);
  }
}
template <bool kIsWide, typename Half>
[[gnu::always_inline]] inline void store_all(const float* values, Half* halves, size_t count) {
  if constexpr (kIsWide) {
    store_wide(values, halves, count);
  } else {
    for (size_t i = 0; i < count; ++i) store(values[i], halves[i]);
  }
}

}  // namespace jaxhetero
