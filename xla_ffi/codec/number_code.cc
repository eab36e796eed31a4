#include "xla_ffi/codec/number_code.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "xla_ffi/sum/arithmetic.h"

namespace jaxhetero {
namespace number_code {
namespace {

#define INLINE [[gnu::always_inline]] inline

constexpr size_t kBlock = 64;
constexpr uint8_t kOtherCount = 0;
constexpr uint8_t kNoScale = 255;
// Of float32.
constexpr int kMantissaBits = 23;
constexpr uint32_t kMantissa = (1u << kMantissaBits) - 1;
constexpr uint32_t kMagnitude = 0x7fffffff;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kExponentOfOne = 127;

INLINE uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
INLINE float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

// What quanta.py calls Quanta.
struct Format {
  float largest;
  uint32_t fraction_bits;  // the least number above 0 is 2 to the power of minus this

  [[nodiscard]] constexpr uint32_t exponent_of_largest() const {
    return (std::bit_cast<uint32_t>(largest) >> kMantissaBits) - kExponentOfOne;
  }
  // With which the least number is a normal float32.
  [[nodiscard]] constexpr uint32_t least_exponent() const { return exponent_of_largest() + 1 + fraction_bits; }
  // Of the block whose largest magnitude has these bits.
  [[nodiscard]] INLINE uint32_t exponent(uint32_t most) const {
    const bool is_larger = (most & kMantissa) > (std::bit_cast<uint32_t>(largest) & kMantissa);
    return std::max((most >> kMantissaBits) + (is_larger ? 1 : 0), least_exponent());
  }
  // Powers of two, so that a number times its scale is exact.
  [[nodiscard]] INLINE float scale(uint32_t exponent) const {
    return float_of((exponent - exponent_of_largest()) << kMantissaBits);
  }
  [[nodiscard]] INLINE float inverse_scale(uint32_t exponent) const {
    return float_of((2 * kExponentOfOne - (exponent - exponent_of_largest())) << kMantissaBits);
  }
};

template <Numbers kNumbers>
constexpr Format kFormat = kNumbers == Numbers::kInt8   ? Format{127, 0}
                           : kNumbers == Numbers::kInt4 ? Format{7, 0}
                                                        : Format{448, 9};

// The bits of a float8_e4m3fn from its first normal number on are those of float32 without the lower ones, and less by
// the difference of what the exponents stand for.
constexpr int kDroppedBits = 20;
constexpr uint32_t kDifference = (kExponentOfOne - 7) << 3;
constexpr uint32_t kFirstNormal = 8;
constexpr float kSubnormals = 512;  // in one

template <Numbers kNumbers>
INLINE uint8_t number_of(float value) {
  if constexpr (kNumbers != Numbers::kFloat8) {
    return static_cast<uint8_t>(static_cast<int8_t>(static_cast<int32_t>(value)));
  } else {
    const uint32_t magnitude = bits_of(value) & kMagnitude;
    const uint32_t normal = (magnitude >> kDroppedBits) - kDifference;
    const auto subnormal = static_cast<uint32_t>(static_cast<int32_t>(float_of(magnitude) * kSubnormals));
    const bool is_normal = magnitude >= (kDifference + kFirstNormal) << kDroppedBits;
    return static_cast<uint8_t>((is_normal ? normal : subnormal) | bits_of(value) >> 31 << 7);
  }
}

template <Numbers kNumbers>
INLINE float value_of(uint8_t number) {
  if constexpr (kNumbers != Numbers::kFloat8) {
    return static_cast<float>(static_cast<int8_t>(number));
  } else {
    const uint32_t magnitude = number & 0x7f;
    const uint32_t normal = (magnitude + kDifference) << kDroppedBits;
    const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) / kSubnormals);
    return float_of((magnitude >= kFirstNormal ? normal : subnormal) | static_cast<uint32_t>(number) >> 7 << 31);
  }
}

template <Numbers kNumbers>
INLINE size_t packed_bytes(size_t count) {
  return kNumbers == Numbers::kInt4 ? (count + 1) / 2 : count;
}

// Loops for the compiler to turn into vector code: `count` is most often the constant kBlock.
template <Numbers kNumbers>
INLINE bool write_block(const float* values, size_t count, uint8_t*& out) {
  constexpr Format kOfAll = kFormat<kNumbers>;
  uint32_t most = 0;
  for (size_t i = 0; i < count; ++i) most = std::max(most, bits_of(values[i]) & kMagnitude);
  if (count != kBlock) {
    *out++ = kOtherCount;
    *out++ = static_cast<uint8_t>(count);
  }
  if (most > kInfinity) {
    *out++ = kNoScale;
    return std::all_of(values, values + count, [](float value) { return (bits_of(value) & kMagnitude) > kInfinity; });
  }
  const uint32_t exponent = kOfAll.exponent(most);
  if (exponent >= kNoScale) return false;
  *out++ = static_cast<uint8_t>(exponent);
  const float scale = kOfAll.scale(exponent);
  const float inverse = kOfAll.inverse_scale(exponent);
  uint8_t numbers[kBlock] = {};
  for (size_t i = 0; i < count; ++i) numbers[i] = number_of<kNumbers>(values[i] * inverse);
  uint32_t differences = 0;
  for (size_t i = 0; i < count; ++i)
    differences |= bits_of(value_of<kNumbers>(numbers[i]) * scale) ^ bits_of(values[i]);
  const size_t bytes = packed_bytes<kNumbers>(count);
  for (size_t i = 0; i < bytes; ++i) {
    out[i] = numbers[i];
    if constexpr (kNumbers == Numbers::kInt4) {
      const uint32_t upper = bytes + i < count ? numbers[bytes + i] : 0;
      out[i] = static_cast<uint8_t>((numbers[i] & 15u) | upper << 4);
    }
  }
  out += bytes;
  return differences == 0;
}

template <Numbers kNumbers>
INLINE void read_block(const uint8_t* packed, size_t count, float scale, float* values) {
  const size_t bytes = packed_bytes<kNumbers>(count);
  if constexpr (kNumbers == Numbers::kInt4) {
    for (size_t i = 0; i < bytes; ++i) {
      values[i] = static_cast<float>(static_cast<int8_t>(static_cast<uint8_t>(packed[i] << 4)) >> 4) * scale;
    }
    for (size_t i = bytes; i < count; ++i) {
      values[i] = static_cast<float>(static_cast<int8_t>(packed[i - bytes]) >> 4) * scale;
    }
  } else {
    for (size_t i = 0; i < count; ++i) values[i] = value_of<kNumbers>(packed[i]) * scale;
  }
}

template <Numbers kNumbers>
INLINE size_t encode_all(std::span<const float> values, uint64_t first, std::span<const uint64_t> leaf_ends,
                         uint8_t* const begin) {
  uint8_t* out = begin;
  auto end = std::ranges::upper_bound(leaf_ends, first);
  uint64_t leaf_first = end == leaf_ends.begin() ? 0 : *(end - 1);
  for (size_t at = 0; at < values.size();) {
    if (end == leaf_ends.end()) return 0;
    const uint64_t place = first + at - leaf_first;
    const size_t count = std::min<uint64_t>({kBlock - place % kBlock, *end - (first + at), values.size() - at});
    const bool is_code = count == kBlock ? write_block<kNumbers>(values.data() + at, kBlock, out)
                                         : write_block<kNumbers>(values.data() + at, count, out);
    if (!is_code) return 0;
    at += count;
    while (end != leaf_ends.end() && *end == first + at) leaf_first = *end++;
  }
  const auto bytes = static_cast<size_t>(out - begin);
  return bytes < values.size_bytes() ? bytes : 0;
}

template <Numbers kNumbers>
INLINE bool decode_all(std::span<const std::byte> coded, std::span<float> values) {
  const auto* in = reinterpret_cast<const uint8_t*>(coded.data());
  size_t left = coded.size();
  const auto take = [&](size_t bytes) {
    left -= bytes;
    return std::exchange(in, in + bytes);
  };
  for (size_t at = 0; at < values.size();) {
    if (left == 0) return false;
    uint8_t exponent = *take(1);
    size_t count = kBlock;
    if (exponent == kOtherCount) {
      if (left < 2) return false;
      count = *take(1);
      exponent = *take(1);
    }
    if (count == 0 || count > std::min(kBlock, values.size() - at)) return false;
    float* const out = values.data() + at;
    at += count;
    if (exponent == kNoScale) {
      std::fill_n(out, count, std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    const size_t bytes = packed_bytes<kNumbers>(count);
    if (exponent < kFormat<kNumbers>.least_exponent() || bytes > left) return false;
    const float scale = kFormat<kNumbers>.scale(exponent);
    count == kBlock ? read_block<kNumbers>(take(bytes), kBlock, scale, out)
                    : read_block<kNumbers>(take(bytes), count, scale, out);
  }
  return left == 0;
}

#undef INLINE

struct Functions {
  size_t (*encode)(std::span<const float>, uint64_t, std::span<const uint64_t>, uint8_t*);
  bool (*decode)(std::span<const std::byte>, std::span<float>);
};

template <Numbers kNumbers>
struct Plain {
  static size_t encode(std::span<const float> values, uint64_t first, std::span<const uint64_t> leaf_ends,
                       uint8_t* out) {
    return encode_all<kNumbers>(values, first, leaf_ends, out);
  }
  static bool decode(std::span<const std::byte> coded, std::span<float> values) {
    return decode_all<kNumbers>(coded, values);
  }
};

// The same functions, compiled for processors with wide vectors.
template <Numbers kNumbers>
struct Wide {
  JAXHETERO_WIDE static size_t encode(std::span<const float> values, uint64_t first,
                                      std::span<const uint64_t> leaf_ends, uint8_t* out) {
    return encode_all<kNumbers>(values, first, leaf_ends, out);
  }
  JAXHETERO_WIDE static bool decode(std::span<const std::byte> coded, std::span<float> values) {
    return decode_all<kNumbers>(coded, values);
  }
};

template <Numbers kNumbers>
Functions functions() {
  if (have_wide_vectors()) return {Wide<kNumbers>::encode, Wide<kNumbers>::decode};
  return {Plain<kNumbers>::encode, Plain<kNumbers>::decode};
}

Functions functions_of(Numbers numbers) {
  if (numbers == Numbers::kInt8) return functions<Numbers::kInt8>();
  if (numbers == Numbers::kInt4) return functions<Numbers::kInt4>();
  return functions<Numbers::kFloat8>();
}

}  // namespace
}  // namespace number_code

size_t encode_numbers(Numbers numbers, std::span<const float> values, uint64_t first,
                      std::span<const uint64_t> leaf_ends, std::span<std::byte> out) {
  return number_code::functions_of(numbers).encode(values, first, leaf_ends, reinterpret_cast<uint8_t*>(out.data()));
}

bool decode_numbers(Numbers numbers, std::span<const std::byte> coded, std::span<float> values) {
  return number_code::functions_of(numbers).decode(coded, values);
}

}  // namespace jaxhetero
