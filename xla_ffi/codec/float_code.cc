#include "xla_ffi/codec/float_code.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "xla_ffi/codec/sparse_bytes.h"

namespace jaxhetero {
namespace {

using codec::kGroup;

constexpr size_t kBlock = 1024;  // elements
constexpr size_t kGroups = kBlock / kGroup;
// With room for a vector behind it.
using Plane = std::array<uint8_t, kBlock + kGroup>;
using Masks = std::array<uint64_t, kGroups>;

// Codes of exponents in 4 bits. Those between are 1 for the largest exponent of the block, and so on downwards.
constexpr uint8_t kZeroCode = 0;
constexpr uint8_t kOtherCode = 15;

// The codes of exponents are dense, or short. A rare plane is sparse, and so is its mask.
enum class Form : uint8_t { kZero, kSparse, kDense, kRare, kShort, kShorter };

// A short code has 3 bits, a shorter one 2. The largest that its bits can have stands for a code of 4 bits that
// follows, the others for neighbours among those.
constexpr uint8_t largest_short(Form form) { return form == Form::kShort ? 7 : 3; }

// A block begins with its largest exponent, the first code that is short, and 3 bits for the form of each plane.
constexpr size_t kHeadBytes = 4;
constexpr int kFormBits = 3;

// The widths of the planes in bits. An element's bits, from its top: sign, exponent, and the planes' bits, of which the
// first has the sign on top.
template <typename Word>
constexpr size_t kPlaneCount = std::is_same_v<Word, uint32_t> ? 5 : 2;
constexpr std::array<int, 5> kWidths = {4, 8, 4, 4, 8};

template <typename Word>
using Planes = std::array<Plane, kPlaneCount<Word>>;

// Of a block of so many elements. A dense plane of exponents, and all of them once more.
template <typename Word>
constexpr size_t most_block_bytes(size_t elements) {
  return kHeadBytes + elements * sizeof(Word) + elements / 2;
}

#define INLINE [[gnu::always_inline]] inline

INLINE size_t whole_groups(size_t elements) { return (elements + kGroup - 1) / kGroup * kGroup; }

// Loops over elements, for the compiler to turn into vector code.
template <typename Word>
INLINE void split(const Word* words, size_t count, Planes<Word>& planes) {
  constexpr int kShift = 8 * (sizeof(Word) - 2);
  for (size_t i = 0; i < count; ++i) planes[0][i] = static_cast<uint8_t>(words[i] >> (kShift + 7));
  for (size_t i = 0; i < count; ++i) {
    planes[1][i] = static_cast<uint8_t>((words[i] >> kShift & 0x7f) | (words[i] >> (kShift + 8) & 0x80));
  }
  if constexpr (sizeof(Word) == 4) {
    for (size_t i = 0; i < count; ++i) planes[2][i] = static_cast<uint8_t>(words[i] >> 12 & 15);
    for (size_t i = 0; i < count; ++i) planes[3][i] = static_cast<uint8_t>(words[i] >> 8 & 15);
    for (size_t i = 0; i < count; ++i) planes[4][i] = static_cast<uint8_t>(words[i]);
  }
}

template <typename Word>
INLINE void merge(const Planes<Word>& planes, size_t count, Word* words) {
  constexpr int kShift = 8 * (sizeof(Word) - 2);
  for (size_t i = 0; i < count; ++i) {
    const auto exponent = static_cast<uint32_t>(planes[0][i]);
    const auto rest = static_cast<uint32_t>(planes[1][i]);
    uint32_t word = ((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f)) << kShift;
    if constexpr (sizeof(Word) == 4) word |= planes[2][i] << 12 | planes[3][i] << 8 | planes[4][i];
    words[i] = static_cast<Word>(word);
  }
}

// The first half of the elements in the lower bits, the second in the upper ones.
INLINE void pack_nibbles(const uint8_t* nibbles, size_t half, uint8_t* out) {
  for (size_t i = 0; i < half; ++i) out[i] = static_cast<uint8_t>(nibbles[i] | nibbles[half + i] << 4);
}
INLINE void unpack_nibbles(const uint8_t* packed, size_t half, uint8_t* out) {
  for (size_t i = 0; i < half; ++i) out[i] = packed[i] & 15;
  for (size_t i = 0; i < half; ++i) out[half + i] = packed[i] >> 4;
}

// Infinity and NaN do not count.
INLINE uint8_t largest_exponent(const uint8_t* exponents, size_t count) {
  uint8_t most = 0;
  for (size_t i = 0; i < count; ++i) most = std::max(most, static_cast<uint8_t>(exponents[i] + 1));
  return most == 0 ? 0 : most - 1;
}

INLINE void code_exponents(const uint8_t* exponents, size_t count, uint8_t largest, uint8_t* codes) {
  for (size_t i = 0; i < count; ++i) {
    const auto below = static_cast<uint8_t>(largest - exponents[i]);
    const uint8_t code = std::min<uint8_t>(below, kOtherCode - 1) + 1;
    codes[i] = exponents[i] == 0 ? kZeroCode : code;
  }
}
// 0 for those that have no code.
INLINE void decode_exponents(const uint8_t* codes, size_t count, uint8_t largest, uint8_t* exponents) {
  for (size_t i = 0; i < count; ++i) {
    const auto exponent = static_cast<uint8_t>(largest + 1 - codes[i]);
    exponents[i] = codes[i] == kZeroCode || codes[i] == kOtherCode ? 0 : exponent;
  }
}

// How the codes of a block are written, from a sample of them, a sixteenth.
struct Shortening {
  Form form = Form::kDense;
  uint8_t first = 1;  // the first of the neighbours that are short
};
INLINE Shortening shortening_of(const uint8_t* codes, size_t count) {
  std::array<uint8_t, 16> found{};
  for (size_t i = 0; i < count; i += 16) ++found[codes[i]];
  Shortening best;
  size_t least_bits = 4 * count / 16;
  for (const Form form : {Form::kShort, Form::kShorter}) {
    const uint8_t neighbours = largest_short(form);
    for (uint8_t first = 1; first + neighbours <= kOtherCode; ++first) {
      size_t left = count / 16;
      for (uint8_t i = 0; i < neighbours; ++i) left -= found[first + i];
      const size_t bits = (form == Form::kShort ? 3 : 2) * count / 16 + 4 * left;
      if (bits < least_bits) {
        least_bits = bits;
        best = {form, first};
      }
    }
  }
  return best;
}

INLINE void shorten(const uint8_t* codes, size_t count, uint8_t first, uint8_t largest, uint8_t* shorts) {
  for (size_t i = 0; i < count; ++i) shorts[i] = std::min<uint8_t>(codes[i] - first, largest);
}
// 0 for those that are not short.
INLINE void lengthen(const uint8_t* shorts, size_t count, uint8_t first, uint8_t largest, uint8_t* codes) {
  for (size_t i = 0; i < count; ++i) {
    codes[i] = shorts[i] == largest ? 0 : static_cast<uint8_t>((shorts[i] + first) & 15);
  }
}

// The lower two bits, as nibbles are packed, by quarters.
INLINE void pack_pairs(const uint8_t* shorts, size_t quarter, uint8_t* out) {
  for (size_t i = 0; i < quarter; ++i) {
    out[i] = static_cast<uint8_t>((shorts[i] & 3) | (shorts[quarter + i] & 3) << 2 |
                                  (shorts[2 * quarter + i] & 3) << 4 | shorts[3 * quarter + i] << 6);
  }
}
INLINE void unpack_pairs(const uint8_t* packed, size_t quarter, uint8_t* out) {
  for (size_t part = 0; part < 4; ++part) {
    for (size_t i = 0; i < quarter; ++i) out[part * quarter + i] = packed[i] >> (2 * part) & 3;
  }
}
// The third bit, by eighths.
INLINE void pack_bits(const uint8_t* shorts, size_t eighth, uint8_t* out) {
  for (size_t i = 0; i < eighth; ++i) {
    unsigned byte = 0;
    for (size_t part = 0; part < 8; ++part) byte |= static_cast<unsigned>(shorts[part * eighth + i] >> 2) << part;
    out[i] = static_cast<uint8_t>(byte);
  }
}
INLINE void unpack_bits(const uint8_t* packed, size_t eighth, uint8_t* shorts) {
  for (size_t part = 0; part < 8; ++part) {
    for (size_t i = 0; i < eighth; ++i) shorts[part * eighth + i] |= (packed[i] >> part & 1) << 2;
  }
}

// Those which are `value`, or those which are not. Returns their number.
template <typename Unit>
INLINE size_t find(const uint8_t* bytes, size_t count, uint8_t value, bool wanted, Masks& masks) {
  size_t found = 0;
  for (size_t group = 0; group < count / kGroup; ++group) {
    const uint64_t equal = Unit::equal(bytes + group * kGroup, value);
    masks[group] = wanted ? equal : ~equal;
    found += static_cast<size_t>(std::popcount(masks[group]));
  }
  return found;
}

INLINE size_t count_of(const Masks& masks, size_t count) {
  size_t found = 0;
  for (size_t group = 0; group < count / kGroup; ++group) found += static_cast<size_t>(std::popcount(masks[group]));
  return found;
}

template <typename Unit>
INLINE void compress(const uint8_t* bytes, size_t count, const Masks& masks, uint8_t* out) {
  for (size_t group = 0; group < count / kGroup; ++group) {
    Unit::compress(bytes + group * kGroup, masks[group], out);
    out += std::popcount(masks[group]);
  }
}

template <typename Unit>
INLINE void expand(const uint8_t* bytes, size_t count, const Masks& masks, uint8_t* out) {
  for (size_t group = 0; group < count / kGroup; ++group) {
    Unit::expand(bytes, masks[group], out + group * kGroup);
    bytes += std::popcount(masks[group]);
  }
}

INLINE size_t packed_bytes(size_t elements, int width) { return width == 8 ? elements : (elements + 1) / 2; }

INLINE uint8_t* write(const uint8_t* bytes, size_t count, int width, uint8_t* out) {
  if (width == 8) {
    std::memcpy(out, bytes, count);
  } else {
    pack_nibbles(bytes, packed_bytes(count, width), out);
  }
  return out + packed_bytes(count, width);
}

// Masks are little-endian, as all processors are that XLA runs on.
static_assert(std::endian::native == std::endian::little);

// The masks of a rare plane, of a bit for each element: a mask of the bytes that they have, and these bytes.
struct RareMasks {
  std::array<uint8_t, kBlock / 8 + kGroup> chosen;
  Masks masks;
  size_t count;  // of bytes in `chosen`
};
INLINE size_t mask_bytes(size_t count) { return count / 8; }

// Masks of masks have whole groups.
template <typename Unit>
INLINE void choose_masks(const Masks& masks, size_t count, RareMasks& rare) {
  std::array<uint8_t, kBlock / 8> bytes{};
  std::memcpy(bytes.data(), masks.data(), mask_bytes(count));
  const size_t whole = whole_groups(mask_bytes(count));
  rare.count = find<Unit>(bytes.data(), whole, 0, false, rare.masks);
  compress<Unit>(bytes.data(), whole, rare.masks, rare.chosen.data());
}

template <typename Unit>
INLINE Form write_plane(const Plane& plane, size_t count, int width, uint8_t*& out) {
  Masks masks;
  const size_t found = find<Unit>(plane.data(), count, 0, false, masks);
  if (found == 0) return Form::kZero;
  if (mask_bytes(count) + packed_bytes(found, width) >= packed_bytes(count, width)) {
    out = write(plane.data(), count, width, out);
    return Form::kDense;
  }
  Form form = Form::kSparse;
  RareMasks rare;
  choose_masks<Unit>(masks, count, rare);
  const size_t rare_bytes = mask_bytes(whole_groups(mask_bytes(count)));
  if (rare_bytes + rare.count < mask_bytes(count)) {
    form = Form::kRare;
    out = write(reinterpret_cast<const uint8_t*>(rare.masks.data()), rare_bytes, 8, out);
    out = write(rare.chosen.data(), rare.count, 8, out);
  } else {
    out = write(reinterpret_cast<const uint8_t*>(masks.data()), mask_bytes(count), 8, out);
  }
  Plane chosen;
  compress<Unit>(plane.data(), count, masks, chosen.data());
  chosen[found] = 0;
  out = write(chosen.data(), found, width, out);
  return form;
}

// What of a code is not read yet. Once it has run out, ok is false.
struct Input {
  const uint8_t* at;
  size_t left;
  bool ok = true;

  INLINE const uint8_t* take(size_t bytes) {
    if (!ok || bytes > left) {
      ok = false;
      return nullptr;
    }
    left -= bytes;
    return std::exchange(at, at + bytes);
  }
};

// Fills the front of `plane`.
INLINE void read(Input& in, size_t count, int width, Plane& plane) {
  const size_t bytes = packed_bytes(count, width);
  const uint8_t* const from = in.take(bytes);
  if (!in.ok) return;
  if (width == 8) {
    std::memcpy(plane.data(), from, bytes);
  } else {
    unpack_nibbles(from, bytes, plane.data());
  }
}

INLINE void read_masks(Input& in, size_t bytes, Masks& masks) {
  const uint8_t* const from = in.take(bytes);
  if (in.ok) std::memcpy(masks.data(), from, bytes);
}

template <typename Unit>
INLINE void read_rare_masks(Input& in, size_t count, Masks& masks) {
  const size_t whole = whole_groups(mask_bytes(count));
  RareMasks rare;
  read_masks(in, mask_bytes(whole), rare.masks);
  if (!in.ok) return;
  rare.count = count_of(rare.masks, whole);
  const uint8_t* const from = in.take(rare.count);
  if (!in.ok) return;
  std::memcpy(rare.chosen.data(), from, rare.count);
  std::array<uint8_t, kBlock / 8> bytes;
  expand<Unit>(rare.chosen.data(), whole, rare.masks, bytes.data());
  std::memcpy(masks.data(), bytes.data(), mask_bytes(count));
}

template <typename Unit>
INLINE void read_plane(Input& in, Form form, size_t count, int width, Plane& plane) {
  if (form == Form::kZero) {
    std::memset(plane.data(), 0, count);
  } else if (form == Form::kDense) {
    read(in, count, width, plane);
  } else {
    Masks masks;
    if (form == Form::kRare) {
      read_rare_masks<Unit>(in, count, masks);
    } else {
      read_masks(in, mask_bytes(count), masks);
    }
    if (!in.ok) return;
    Plane chosen;
    read(in, count_of(masks, count), width, chosen);
    if (in.ok) expand<Unit>(chosen.data(), count, masks, plane.data());
  }
}

// The codes of exponents: in a short form where most of them are short.
template <typename Unit>
INLINE Form write_codes(const Plane& codes, size_t count, const Shortening& how, uint8_t*& out) {
  if (how.form == Form::kDense) return write_plane<Unit>(codes, count, 4, out);
  const uint8_t largest = largest_short(how.form);
  Plane shorts;
  Masks masks;
  shorten(codes.data(), count, how.first, largest, shorts.data());
  const size_t found = find<Unit>(shorts.data(), count, largest, true, masks);
  const size_t short_bytes = (how.form == Form::kShort ? 3 : 2) * count / 8;
  if (short_bytes + packed_bytes(found, 4) >= packed_bytes(count, 4)) return write_plane<Unit>(codes, count, 4, out);
  pack_pairs(shorts.data(), count / 4, out);
  if (how.form == Form::kShort) pack_bits(shorts.data(), count / 8, out + count / 4);
  out += short_bytes;
  Plane chosen;
  compress<Unit>(codes.data(), count, masks, chosen.data());
  chosen[found] = 0;
  out = write(chosen.data(), found, 4, out);
  return how.form;
}

template <typename Unit>
INLINE void read_codes(Input& in, const Shortening& how, size_t count, Plane& codes) {
  if (how.form < Form::kShort) return read_plane<Unit>(in, how.form, count, 4, codes);
  const uint8_t largest = largest_short(how.form);
  Plane shorts;
  Masks masks;
  Plane chosen;
  const uint8_t* from = in.take(count / 4);
  if (!in.ok) return;
  unpack_pairs(from, count / 4, shorts.data());
  if (how.form == Form::kShort) {
    from = in.take(count / 8);
    if (!in.ok) return;
    unpack_bits(from, count / 8, shorts.data());
  }
  const size_t found = find<Unit>(shorts.data(), count, largest, true, masks);
  read(in, found, 4, chosen);
  if (!in.ok) return;
  Plane others;
  expand<Unit>(chosen.data(), count, masks, others.data());
  lengthen(shorts.data(), count, how.first, largest, codes.data());
  for (size_t i = 0; i < count; ++i) codes[i] |= others[i];
}

// The exponents that have no code of 4 bits, one after the other.
template <typename Unit>
INLINE void write_others(const Plane& exponents, const Plane& codes, size_t count, uint8_t*& out) {
  Masks masks;
  const size_t found = find<Unit>(codes.data(), count, kOtherCode, true, masks);
  if (found == 0) return;
  Plane chosen;
  compress<Unit>(exponents.data(), count, masks, chosen.data());
  out = write(chosen.data(), found, 8, out);
}

template <typename Unit>
INLINE void read_others(Input& in, const Plane& codes, size_t count, Plane& exponents) {
  Masks masks;
  const size_t found = find<Unit>(codes.data(), count, kOtherCode, true, masks);
  if (found == 0) return;
  Plane chosen;
  read(in, found, 8, chosen);
  if (!in.ok) return;
  Plane others;
  expand<Unit>(chosen.data(), count, masks, others.data());
  for (size_t i = 0; i < count; ++i) exponents[i] |= others[i];
}

template <typename Unit, typename Word>
INLINE void write_block(const Word* words, size_t count, uint8_t*& out) {
  Planes<Word> planes;
  split(words, count, planes);
  const uint8_t largest = largest_exponent(planes[0].data(), count);
  Plane codes;
  code_exponents(planes[0].data(), count, largest, codes.data());
  uint8_t* const head = out;
  out += kHeadBytes;
  const Shortening how = shortening_of(codes.data(), count);
  auto forms = static_cast<unsigned>(write_codes<Unit>(codes, count, how, out));
  write_others<Unit>(planes[0], codes, count, out);
  for (size_t plane = 1; plane < planes.size(); ++plane) {
    forms |= static_cast<unsigned>(write_plane<Unit>(planes[plane], count, kWidths[plane], out)) << (kFormBits * plane);
  }
  head[0] = largest;
  head[1] = how.first;
  head[2] = static_cast<uint8_t>(forms);
  head[3] = static_cast<uint8_t>(forms >> 8);
}

template <typename Unit, typename Word>
INLINE void read_block(Input& in, size_t count, Word* words) {
  const uint8_t* const head = in.take(kHeadBytes);
  if (!in.ok) return;
  const unsigned forms = head[2] | static_cast<unsigned>(head[3]) << 8;
  const auto form_of = [&](size_t plane) { return static_cast<Form>(forms >> (kFormBits * plane) & 7); };
  Planes<Word> planes;
  Plane codes;
  in.ok = forms >> (kFormBits * planes.size()) == 0 && form_of(0) <= Form::kShorter;
  read_codes<Unit>(in, {form_of(0), head[1]}, count, codes);
  if (!in.ok) return;
  decode_exponents(codes.data(), count, head[0], planes[0].data());
  read_others<Unit>(in, codes, count, planes[0]);
  for (size_t plane = 1; plane < planes.size() && in.ok; ++plane) {
    in.ok = form_of(plane) <= Form::kRare;
    read_plane<Unit>(in, form_of(plane), count, kWidths[plane], planes[plane]);
  }
  if (in.ok) merge<Word>(planes, count, words);
}

// Of an incomplete block at the end, zeros complete the last group.
template <typename Unit, typename Word>
INLINE size_t encode_words(const Word* words, size_t count, uint8_t* const out) {
  uint8_t* at = out;
  for (size_t first = 0; first < count; first += kBlock) {
    const size_t elements = std::min(kBlock, count - first);
    if (elements == kBlock) {
      write_block<Unit>(words + first, kBlock, at);
    } else {
      std::array<Word, kBlock> rest;
      std::copy_n(words + first, elements, rest.begin());
      std::fill(rest.begin() + elements, rest.end(), Word{0});
      write_block<Unit>(rest.data(), whole_groups(elements), at);
    }
    if (static_cast<size_t>(at - out) >= (first + elements) * sizeof(Word)) return 0;
  }
  return static_cast<size_t>(at - out);
}

template <typename Unit, typename Word>
INLINE bool decode_words(Input in, size_t count, Word* words) {
  for (size_t first = 0; first < count && in.ok; first += kBlock) {
    const size_t elements = std::min(kBlock, count - first);
    if (elements == kBlock) {
      read_block<Unit>(in, kBlock, words + first);
    } else {
      std::array<Word, kBlock> rest;
      read_block<Unit>(in, whole_groups(elements), rest.data());
      if (in.ok) std::copy_n(rest.begin(), elements, words + first);
    }
  }
  return in.ok && in.left == 0;
}

template <typename Unit>
INLINE size_t encode_any(DType dtype, std::span<const std::byte> values, uint8_t* out) {
  if (dtype == DType::kF32) {
    return encode_words<Unit>(reinterpret_cast<const uint32_t*>(values.data()), values.size() / 4, out);
  }
  return encode_words<Unit>(reinterpret_cast<const uint16_t*>(values.data()), values.size() / 2, out);
}

template <typename Unit>
INLINE bool decode_any(DType dtype, Input in, std::span<std::byte> values) {
  if (dtype == DType::kF32) {
    return decode_words<Unit>(in, values.size() / 4, reinterpret_cast<uint32_t*>(values.data()));
  }
  return decode_words<Unit>(in, values.size() / 2, reinterpret_cast<uint16_t*>(values.data()));
}

#undef INLINE

// For each vector unit.
size_t encode_plain(DType dtype, std::span<const std::byte> values, uint8_t* out) {
  return encode_any<codec::Plain>(dtype, values, out);
}
bool decode_plain(DType dtype, Input in, std::span<std::byte> values) {
  return decode_any<codec::Plain>(dtype, in, values);
}
#if defined(__x86_64__)
JAXHETERO_AVX2 size_t encode_avx2(DType dtype, std::span<const std::byte> values, uint8_t* out) {
  return encode_any<codec::Avx2>(dtype, values, out);
}
JAXHETERO_AVX2 bool decode_avx2(DType dtype, Input in, std::span<std::byte> values) {
  return decode_any<codec::Avx2>(dtype, in, values);
}
JAXHETERO_AVX512 size_t encode_avx512(DType dtype, std::span<const std::byte> values, uint8_t* out) {
  return encode_any<codec::Avx512>(dtype, values, out);
}
JAXHETERO_AVX512 bool decode_avx512(DType dtype, Input in, std::span<std::byte> values) {
  return decode_any<codec::Avx512>(dtype, in, values);
}
#endif

struct Functions {
  size_t (*encode)(DType, std::span<const std::byte>, uint8_t*);
  bool (*decode)(DType, Input, std::span<std::byte>);
};

Functions functions_of(internal::Vectors vectors) {
#if defined(__x86_64__)
  if (vectors == internal::Vectors::kAvx512) return {encode_avx512, decode_avx512};
  if (vectors == internal::Vectors::kAvx2) return {encode_avx2, decode_avx2};
#endif
  return {encode_plain, decode_plain};
}

internal::Vectors best_vectors() {
  static const internal::Vectors best = [] {
    for (const auto vectors : {internal::Vectors::kAvx512, internal::Vectors::kAvx2}) {
      if (internal::have(vectors)) return vectors;
    }
    return internal::Vectors::kPlain;
  }();
  return best;
}

}  // namespace

namespace internal {

bool have(Vectors vectors) {
#if defined(__x86_64__)
  if (vectors == Vectors::kAvx2) return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("popcnt") != 0;
  if (vectors == Vectors::kAvx512) {
    return have(Vectors::kAvx2) && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
           __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
           __builtin_cpu_supports("avx512vbmi") != 0 && __builtin_cpu_supports("avx512vbmi2") != 0;
  }
#endif
  return vectors == Vectors::kPlain;
}

size_t encode(Vectors vectors, DType dtype, std::span<const std::byte> values, std::span<std::byte> out) {
  return functions_of(vectors).encode(dtype, values, reinterpret_cast<uint8_t*>(out.data()));
}

bool decode(Vectors vectors, DType dtype, std::span<const std::byte> coded, std::span<std::byte> values) {
  const Input in{reinterpret_cast<const uint8_t*>(coded.data()), coded.size()};
  return functions_of(vectors).decode(dtype, in, values);
}

}  // namespace internal

bool has_code(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16; }

bool has_fast_code() { return best_vectors() != internal::Vectors::kPlain; }

size_t most_coded_bytes(DType dtype, size_t plain_bytes) {
  // Blocks that are coded came before: the code was shorter than the values up to there.
  return plain_bytes + (dtype == DType::kF32 ? most_block_bytes<uint32_t>(kBlock) : most_block_bytes<uint16_t>(kBlock));
}

size_t encode(DType dtype, std::span<const std::byte> values, std::span<std::byte> out) {
  return internal::encode(best_vectors(), dtype, values, out);
}

bool decode(DType dtype, std::span<const std::byte> coded, std::span<std::byte> values) {
  return has_code(dtype) && internal::decode(best_vectors(), dtype, coded, values);
}

}  // namespace jaxhetero
