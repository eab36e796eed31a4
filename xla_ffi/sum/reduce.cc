#include "xla_ffi/sum/reduce.h"

#include <algorithm>
#include <array>
#include <concepts>
#include <cstring>
#include <limits>
#include <type_traits>

#include "xla_ffi/sum/arithmetic.h"

namespace jaxhetero {
namespace {

// The type that an element has while it is reduced: 16-bit floats as float, integer summands as unsigned. Unsigned
// integers wrap; signed overflow would be undefined.
template <Arithmetic kArithmetic, typename T>
struct WideOf {
  using Type = T;
};
template <Arithmetic kArithmetic>
struct WideOf<kArithmetic, F16> {
  using Type = float;
};
template <Arithmetic kArithmetic>
struct WideOf<kArithmetic, BF16> {
  using Type = float;
};
template <std::signed_integral T>
struct WideOf<Arithmetic::kSum, T> {
  using Type = std::make_unsigned_t<T>;
};

// What fits a register: its operators work on each element. Unaligned is the same at any place in memory.
template <bool kIsWide, typename Element>
struct VectorOf {
  using Type [[gnu::vector_size(16)]] = Element;
  using Unaligned [[gnu::aligned(1), gnu::may_alias]] = Type;
};
template <typename Element>
struct VectorOf<true, Element> {
  using Type [[gnu::vector_size(32)]] = Element;
  using Unaligned [[gnu::aligned(1), gnu::may_alias]] = Type;
};

// Reduces strip by strip. The totals of a strip stay in vector registers while the pieces pass, so that each byte is
// read or written once. No function takes or returns a vector by value: how that is done depends on the instruction
// set that the function is compiled for.
template <bool kIsWide, Arithmetic kArithmetic, typename T>
class Reduction {
 public:
  [[gnu::always_inline]] static void reduce(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
    T* const target = reinterpret_cast<T*>(out);
    size_t start = 0;
    while (count - start >= kStrip) {
      const size_t strips = std::min(kBlock, (count - start) / kStrip);
      reduce_block(pieces, target, start, strips);
      start += strips * kStrip;
    }
    if (start < count) reduce_rest(pieces, target, start, count - start);
  }

 private:
  using Wide = typename WideOf<kArithmetic, T>::Type;
  static constexpr bool kConverts = sizeof(T) != sizeof(Wide);
  using Vector = typename VectorOf<kIsWide, Wide>::Type;
  using Unaligned = typename VectorOf<kIsWide, Wide>::Unaligned;
  // As many as leave registers for other things. No std::array: a template's argument loses [[gnu::vector_size]].
  static constexpr size_t kVectors = 128 / sizeof(Vector);
  using Strip = Vector[kVectors];
  static constexpr size_t kStrip = 128 / sizeof(Wide);
  // A processor follows only so many pieces at once. Of more, the others wait until a block of strips is through.
  static constexpr size_t kTogether = 16;
  static constexpr size_t kBlock = 32;
  // Each line of the cache is asked for some strips before it is needed. Past the end of a piece that does nothing.
  static constexpr size_t kLine = 64 / sizeof(T);
  static constexpr size_t kAhead = 512 / sizeof(T);

  [[gnu::always_inline]] static void reduce_block(std::span<const std::byte* const> pieces, T* target, size_t start,
                                                  size_t strips) {
    Strip partial[kBlock];
    for (size_t first = 0; first < pieces.size(); first += kTogether) {
      const auto together = pieces.subspan(first, std::min(kTogether, pieces.size() - first));
      const bool is_first = first == 0;
      const bool is_last = first + together.size() == pieces.size();
      for (size_t i = 0; i < strips; ++i) {
        const size_t at = start + i * kStrip;
        const auto strip_of = [at](const std::byte* piece) {
          const T* strip = reinterpret_cast<const T*>(piece) + at;
          for (size_t line = 0; line < kStrip; line += kLine) __builtin_prefetch(strip + kAhead + line);
          return strip;
        };
        Strip totals;
        is_first ? load(strip_of(together[0]), totals) : copy(partial[i], totals);
        combine_all(together.subspan(is_first ? 1 : 0), strip_of, totals);
        is_last ? finish(totals, target + at) : copy(totals, partial[i]);
      }
    }
  }

  // Less than a strip, in memory of a strip's size.
  [[gnu::always_inline]] static void reduce_rest(std::span<const std::byte* const> pieces, T* target, size_t start,
                                                 size_t count) {
    std::array<T, kStrip> padded{};
    const auto padded_of = [start, count, &padded](const std::byte* piece) {
      std::memcpy(padded.data(), reinterpret_cast<const T*>(piece) + start, count * sizeof(T));
      return padded.data();
    };
    Strip totals;
    load(padded_of(pieces[0]), totals);
    combine_all(pieces.subspan(1), padded_of, totals);
    finish(totals, padded.data());
    std::memcpy(target + start, padded.data(), count * sizeof(T));
  }

  template <typename StripOf>
  [[gnu::always_inline]] static void combine_all(std::span<const std::byte* const> pieces, const StripOf& strip_of,
                                                 Strip& totals) {
    for (const std::byte* piece : pieces) {
      Strip values;
      load(strip_of(piece), values);
      for (size_t i = 0; i < kVectors; ++i) combine(totals[i], values[i]);
    }
  }

  [[gnu::always_inline]] static void load(const T* elements, Strip& strip) {
    std::array<Wide, kStrip> converted;
    const void* from = elements;
    if constexpr (kConverts) {
      load_all<kIsWide>(elements, converted.data(), kStrip);
      from = converted.data();
    }
    for (size_t i = 0; i < kVectors; ++i) strip[i] = static_cast<const Unaligned*>(from)[i];
  }

  [[gnu::always_inline]] static void copy(const Strip& from, Strip& to) {
    for (size_t i = 0; i < kVectors; ++i) to[i] = from[i];
  }

  [[gnu::always_inline]] static void finish(Strip& totals, T* target) {
    std::array<Wide, kStrip> converted;
    void* to = target;
    if constexpr (kConverts) to = converted.data();
    for (size_t i = 0; i < kVectors; ++i) {
      make_canonical(totals[i]);
      static_cast<Unaligned*>(to)[i] = totals[i];
    }
    if constexpr (kConverts) store_all<kIsWide>(converted.data(), target, kStrip);
  }

  [[gnu::always_inline]] static void combine(Vector& total, const Vector& value) {
    if constexpr (kArithmetic == Arithmetic::kSum) {
      total += value;
    } else if constexpr (std::is_floating_point_v<Wide>) {
      combine_extreme(total, value);
    } else {
      total = (kArithmetic == Arithmetic::kMax ? value > total : value < total) ? value : total;
    }
  }

  // maximum and minimum of IEEE 754-2019: NaN if either operand is, and -0 is below +0. Unlike std::max, symmetric.
  [[gnu::always_inline]] static void combine_extreme(Vector& total, const Vector& value) {
    constexpr bool kIsMax = kArithmetic == Arithmetic::kMax;
    using Bits = typename VectorOf<kIsWide, std::conditional_t<sizeof(Wide) == 4, uint32_t, uint64_t>>::Type;
    const Bits a = __builtin_bit_cast(Bits, total);
    const Bits b = __builtin_bit_cast(Bits, value);
    const Vector equal = __builtin_bit_cast(Vector, kIsMax ? a & b : a | b);  // they differ in a zero's sign only
    const Vector chosen = (kIsMax ? total > value : total < value) ? total : value;
    const Vector number = total == value ? equal : chosen;
    total = ((total != total) | (value != value)) ? Vector{} + kNaN : number;
  }

  // Replaces every NaN by one. Which of two NaNs an addition returns depends on how the compiler orders the operands,
  // and that differs between instruction sets.
  [[gnu::always_inline]] static void make_canonical(Vector& value) {
    if constexpr (std::is_floating_point_v<Wide>) value = value != value ? Vector{} + kNaN : value;
  }

  static constexpr Wide kNaN = std::numeric_limits<Wide>::quiet_NaN();
};

using Kernel = void (*)(std::span<const std::byte* const>, std::byte*, size_t);
using Kernels = std::array<Kernel, 3>;  // by Arithmetic

template <Arithmetic kArithmetic, typename T>
void reduce_baseline(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  Reduction<false, kArithmetic, T>::reduce(pieces, out, count);
}

template <Arithmetic kArithmetic, typename T>
JAXHETERO_WIDE void reduce_wide(std::span<const std::byte* const> pieces, std::byte* out, size_t count) {
  Reduction<true, kArithmetic, T>::reduce(pieces, out, count);
}

struct Entry {
  size_t item_bytes = 0;
  std::string_view name = "?";
  Kernels baseline = {};
  Kernels wide = {};
};

template <typename T>
constexpr Entry entry(std::string_view name) {
  using enum Arithmetic;
  return {sizeof(T),
          name,
          {&reduce_baseline<kSum, T>, &reduce_baseline<kMax, T>, &reduce_baseline<kMin, T>},
          {&reduce_wide<kSum, T>, &reduce_wide<kMax, T>, &reduce_wide<kMin, T>}};
}

// In the order of DType, which starts at 1.
constexpr std::array<Entry, 13> kEntries = {
    Entry{},
    entry<F16>("float16"),
    entry<BF16>("bfloat16"),
    entry<float>("float32"),
    entry<double>("float64"),
    entry<int8_t>("int8"),
    entry<int16_t>("int16"),
    entry<int32_t>("int32"),
    entry<int64_t>("int64"),
    entry<uint8_t>("uint8"),
    entry<uint16_t>("uint16"),
    entry<uint32_t>("uint32"),
    entry<uint64_t>("uint64"),
};

const Entry& entry_of(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  return kEntries[index < kEntries.size() ? index : 0];
}

}  // namespace

size_t item_bytes(DType dtype) { return entry_of(dtype).item_bytes; }

std::string_view dtype_name(DType dtype) { return entry_of(dtype).name; }

void reduce_in_order(Arithmetic arithmetic, DType dtype, std::span<const std::byte* const> pieces, std::byte* out,
                     size_t count) {
  const Entry& chosen = entry_of(dtype);
  const DefaultFloatingPoint mode;
  (have_wide_vectors() ? chosen.wide : chosen.baseline)[static_cast<size_t>(arithmetic)](pieces, out, count);
}

namespace internal {
void reduce_in_order_baseline(Arithmetic arithmetic, DType dtype, std::span<const std::byte* const> pieces,
                              std::byte* out, size_t count) {
  const DefaultFloatingPoint mode;
  entry_of(dtype).baseline[static_cast<size_t>(arithmetic)](pieces, out, count);
}
}  // namespace internal

}  // namespace jaxhetero
