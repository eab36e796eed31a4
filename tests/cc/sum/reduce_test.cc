#include "xla_ffi/sum/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "tests/cc/half_format.h"
#include "tests/cc/strange_rounding.h"

namespace jaxhetero {
namespace {

using Memory = std::vector<std::byte>;

constexpr DType kAllDTypes[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64, DType::kI8,  DType::kI16,
                                DType::kI32, DType::kI64,  DType::kU8,  DType::kU16, DType::kU32, DType::kU64};

bool is_float(DType dtype) { return dtype <= DType::kF64; }

template <typename T>
T read(const Memory& memory, size_t index) {
  T value;
  std::memcpy(&value, memory.data() + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void write(Memory& memory, size_t index, T value) {
  std::memcpy(memory.data() + index * sizeof(T), &value, sizeof(T));
}

constexpr Arithmetic kAllArithmetic[] = {Arithmetic::kSum, Arithmetic::kMax, Arithmetic::kMin};

std::string name_of(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kSum ? "sum" : arithmetic == Arithmetic::kMax ? "max" : "min";
}

// A sum, or, by the words of IEEE 754-2019, the maximum or minimum of two numbers.
template <typename T>
T combined(Arithmetic arithmetic, T a, T b) {
  if (arithmetic == Arithmetic::kSum) return static_cast<T>(a + b);
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
    if (a == 0 && b == 0) return std::signbit(a) == (arithmetic == Arithmetic::kMin) ? a : b;
  }
  return arithmetic == Arithmetic::kMax ? std::max(a, b) : std::min(a, b);
}

template <typename T>
void reference_of(Arithmetic arithmetic, const std::vector<Memory>& pieces, Memory& out) {
  for (size_t i = 0; i < out.size() / sizeof(T); ++i) {
    T value = read<T>(pieces[0], i);
    for (size_t rank = 1; rank < pieces.size(); ++rank) value = combined(arithmetic, value, read<T>(pieces[rank], i));
    write(out, i, value);
  }
}

// Two's complement: a sum that wraps has the same bits with and without a sign.
template <typename T>
void reference_of_integers(Arithmetic arithmetic, const std::vector<Memory>& pieces, Memory& out) {
  if (arithmetic == Arithmetic::kSum) return reference_of<std::make_unsigned_t<T>>(arithmetic, pieces, out);
  reference_of<T>(arithmetic, pieces, out);
}

void reference_of_halves(Arithmetic arithmetic, const HalfFormat& format, const std::vector<Memory>& pieces,
                         Memory& out) {
  for (size_t i = 0; i < out.size() / 2; ++i) {
    auto value = static_cast<float>(format.value_of(read<uint16_t>(pieces[0], i)));
    for (size_t rank = 1; rank < pieces.size(); ++rank) {
      value = combined(arithmetic, value, static_cast<float>(format.value_of(read<uint16_t>(pieces[rank], i))));
    }
    write(out, i, format.nearest(value));
  }
}

Memory reference(Arithmetic arithmetic, DType dtype, const std::vector<Memory>& pieces) {
  Memory out(pieces[0].size());
  switch (dtype) {
    case DType::kF16:
    case DType::kBF16:
      reference_of_halves(arithmetic, format_of(dtype), pieces, out);
      break;
    case DType::kF32:
      reference_of<float>(arithmetic, pieces, out);
      break;
    case DType::kF64:
      reference_of<double>(arithmetic, pieces, out);
      break;
    case DType::kI8:
      reference_of_integers<int8_t>(arithmetic, pieces, out);
      break;
    case DType::kU8:
      reference_of_integers<uint8_t>(arithmetic, pieces, out);
      break;
    case DType::kI16:
      reference_of_integers<int16_t>(arithmetic, pieces, out);
      break;
    case DType::kU16:
      reference_of_integers<uint16_t>(arithmetic, pieces, out);
      break;
    case DType::kI32:
      reference_of_integers<int32_t>(arithmetic, pieces, out);
      break;
    case DType::kU32:
      reference_of_integers<uint32_t>(arithmetic, pieces, out);
      break;
    case DType::kI64:
      reference_of_integers<int64_t>(arithmetic, pieces, out);
      break;
    case DType::kU64:
      reference_of_integers<uint64_t>(arithmetic, pieces, out);
      break;
  }
  return out;
}

bool is_nan(DType dtype, const Memory& memory, size_t index) {
  if (dtype == DType::kF32) return std::isnan(read<float>(memory, index));
  if (dtype == DType::kF64) return std::isnan(read<double>(memory, index));
  return is_float(dtype) && std::isnan(format_of(dtype).value_of(read<uint16_t>(memory, index)));
}

// Equal bits, but any NaN for a NaN: which one comes out is up to the processor.
void expect_same_values(DType dtype, const Memory& actual, const Memory& expected) {
  const size_t item = item_bytes(dtype);
  for (size_t i = 0; i < expected.size() / item; ++i) {
    if (std::memcmp(&actual[i * item], &expected[i * item], item) == 0) continue;
    if (is_nan(dtype, actual, i) && is_nan(dtype, expected, i)) continue;
    FAIL() << dtype_name(dtype) << " element " << i << " of " << expected.size() / item << " differs";
  }
}

using Function = decltype(&reduce_in_order);

// The pieces' memory is aligned to the element size and to no more, as reduce_in_order allows it.
Memory reduce(Arithmetic arithmetic, DType dtype, const std::vector<Memory>& pieces,
              Function function = &reduce_in_order, bool in_place = false) {
  const size_t item = item_bytes(dtype);
  const size_t bytes = pieces[0].size();
  std::vector<Memory> shifted;
  std::vector<const std::byte*> pointers;
  for (const Memory& piece : pieces) {
    shifted.emplace_back(item, std::byte{});
    shifted.back().insert(shifted.back().end(), piece.begin(), piece.end());
  }
  for (const Memory& piece : shifted) pointers.push_back(piece.data() + item);
  constexpr std::byte kGuard{0x5a};
  Memory target(item + bytes + 64, kGuard);
  std::byte* out = in_place ? shifted[0].data() + item : target.data() + item;
  function(arithmetic, dtype, pointers, out, bytes / item);
  EXPECT_TRUE(std::ranges::all_of(std::span(target).last(64), [](std::byte b) { return b == kGuard; }))
      << "it wrote past the end";
  return {out, out + bytes};
}

Memory sum(DType dtype, const std::vector<Memory>& pieces) { return reduce(Arithmetic::kSum, dtype, pieces); }

// Uniform over bits, but every fourth element has the highest exponent (infinities and, mostly, NaNs) or the lowest
// (subnormals).
std::vector<Memory> random_pieces(DType dtype, size_t piece_count, size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  const size_t item = item_bytes(dtype);
  std::vector<Memory> pieces(piece_count, Memory(count * item));
  for (Memory& piece : pieces) {
    for (size_t i = 0; i < piece.size(); i += sizeof(uint32_t)) {
      const uint32_t value = random();
      std::memcpy(piece.data() + i, &value, std::min(sizeof value, piece.size() - i));
    }
    for (size_t i = 0; i < count; ++i) {
      std::byte* high = &piece[i * item + item - 1];  // sign and exponent
      const uint32_t choice = random() % 8;
      if (choice == 0) *high |= std::byte{0x7f};
      if (choice == 1) *high &= std::byte{0x80};
      if (item < 2 || choice > 1) continue;
      const std::byte rest{static_cast<uint8_t>(dtype == DType::kF16 ? 0 : dtype == DType::kF64 ? 0xf0 : 0x80)};
      high[-1] = choice == 0 ? high[-1] | rest : high[-1] & ~rest;
      if (random() % 8 == 0) std::fill(&piece[i * item], high, std::byte{0});
    }
  }
  return pieces;
}

Memory halves(std::initializer_list<int> bits) {
  Memory memory(bits.size() * 2);
  size_t i = 0;
  for (int b : bits) write(memory, i++, static_cast<uint16_t>(b));
  return memory;
}

class ReduceInOrder : public testing::TestWithParam<std::tuple<Arithmetic, DType, size_t, size_t>> {};

TEST_P(ReduceInOrder, EqualsAPlainLoopInRankOrder) {
  const auto [arithmetic, dtype, count, piece_count] = GetParam();
  const std::vector<Memory> pieces = random_pieces(dtype, piece_count, count, 1);
  const Memory expected = reference(arithmetic, dtype, pieces);
  const Memory actual = reduce(arithmetic, dtype, pieces);
  expect_same_values(dtype, actual, expected);
  // Bits, NaNs included, do not depend on the machine's vector unit or on where the total goes. No EXPECT_EQ, which
  // would print all of them.
  const Memory baseline = reduce(arithmetic, dtype, pieces, &internal::reduce_in_order_baseline);
  EXPECT_TRUE(actual == baseline);
  EXPECT_TRUE(reduce(arithmetic, dtype, pieces, &reduce_in_order, /*in_place=*/true) == baseline);
  EXPECT_TRUE(reduce(arithmetic, dtype, pieces, &internal::reduce_in_order_baseline, /*in_place=*/true) == baseline);
}

INSTANTIATE_TEST_SUITE_P(All, ReduceInOrder,
                         testing::Combine(testing::ValuesIn(kAllArithmetic), testing::ValuesIn(kAllDTypes),
                                          testing::Values(0, 1, 7, 31, 32, 33, 1023, 1024, 1025, 10000),
                                          testing::Values(1, 2, 3, 4, 5)),
                         [](const auto& info) {
                           return name_of(std::get<0>(info.param)) + "_of_" +
                                  std::string(dtype_name(std::get<1>(info.param))) + "_" +
                                  std::to_string(std::get<2>(info.param)) + "_from_" +
                                  std::to_string(std::get<3>(info.param));
                         });

// Many pieces pass in groups, block by block; no number of them changes what a plain loop gives.
TEST(ReduceInOrder, EqualsAPlainLoopForAnyNumberOfPieces) {
  constexpr size_t kMost = 64;
  constexpr size_t kCount = 4096 + 129;  // more than a block of the narrowest type, and a rest
  for (const Arithmetic arithmetic : kAllArithmetic) {
    for (const DType dtype : kAllDTypes) {
      const std::vector<Memory> all = random_pieces(dtype, kMost, kCount, 3);
      for (size_t piece_count = 1; piece_count <= kMost; ++piece_count) {
        // Groups are of 16: what matters is whether one begins or ends.
        if (piece_count > 4 && piece_count % 16 > 1 && piece_count % 16 < 15) continue;
        SCOPED_TRACE(name_of(arithmetic) + " from " + std::to_string(piece_count));
        const std::vector<Memory> pieces(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(piece_count));
        const Memory actual = reduce(arithmetic, dtype, pieces, &reduce_in_order, /*in_place=*/true);
        expect_same_values(dtype, actual, reference(arithmetic, dtype, pieces));
        EXPECT_TRUE(reduce(arithmetic, dtype, pieces, &internal::reduce_in_order_baseline) == actual);
        if (HasFailure()) return;
      }
    }
  }
}

// The signs of zeros and NaNs by hand, in both orders.
TEST(ReduceInOrder, TellsZerosApartAndKeepsNaN) {
  const Memory a = halves({0x0000, 0x8000, 0x8000, 0x7e00, 0x3c00, 0xfc00});
  const Memory b = halves({0x8000, 0x0000, 0x8000, 0x3c00, 0xfe01, 0x7c00});
  const Memory largest = halves({0x0000, 0x0000, 0x8000, 0x7e00, 0x7e00, 0x7c00});
  const Memory smallest = halves({0x8000, 0x8000, 0x8000, 0x7e00, 0x7e00, 0xfc00});
  for (const std::vector<Memory>& pieces : {std::vector{a, b}, std::vector{b, a}}) {
    EXPECT_EQ(reduce(Arithmetic::kMax, DType::kF16, pieces), largest);
    EXPECT_EQ(reduce(Arithmetic::kMin, DType::kF16, pieces), smallest);
  }
}

class HalfPrecision : public testing::TestWithParam<DType> {};

// Every value of the format with the powers of two, the values next to them, and every kind of special value. This
// reaches each rounding step, both sides of each tie, and the edges of the range.
TEST_P(HalfPrecision, WidensAndRoundsExactly) {
  const DType dtype = GetParam();
  const HalfFormat& format = format_of(dtype);
  Memory every(65536 * 2);
  for (size_t i = 0; i < 65536; ++i) write(every, i, static_cast<uint16_t>(i));
  std::vector<uint16_t> partners;
  const int step = dtype == DType::kF16 ? 1 : 15;  // bfloat16 has eight times the exponents; 255 is a multiple
  for (int exponent = 0; exponent <= format.max_exponent - format.min_exponent + 2; exponent += step) {
    for (int neighbour : {-1, 0, 1}) {
      const int bits = (exponent << format.mantissa_bits) + neighbour;
      if (bits < 0) continue;
      partners.push_back(static_cast<uint16_t>(bits));
      partners.push_back(static_cast<uint16_t>(bits | 0x8000));
    }
  }
  for (uint16_t partner : partners) {
    Memory repeated(every.size());
    for (size_t i = 0; i < 65536; ++i) write(repeated, i, partner);
    const std::vector<Memory> pieces = {every, repeated};
    expect_same_values(dtype, sum(dtype, pieces), reference(Arithmetic::kSum, dtype, pieces));
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(All, HalfPrecision, testing::Values(DType::kF16, DType::kBF16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

// The corners by hand, so that the reference above is not believed blindly.
struct Corner {
  std::string name;
  DType dtype;
  std::vector<int> values;  // one per worker
  int total;
};

class HalfCorner : public testing::TestWithParam<Corner> {};

TEST_P(HalfCorner, IsRounded) {
  const auto& [name, dtype, values, total] = GetParam();
  std::vector<Memory> pieces;
  for (int value : values) pieces.push_back(halves({value}));
  EXPECT_EQ(read<uint16_t>(sum(dtype, pieces), 0), total);
}

INSTANTIATE_TEST_SUITE_P(
    All, HalfCorner,
    testing::Values(Corner{"tie_to_even_below", DType::kF16, {0x3c00, 0x1000}, 0x3c00},     // 1 + 2^-11
                    Corner{"tie_to_even_above", DType::kF16, {0x3c01, 0x1000}, 0x3c02},     // the next odd one
                    Corner{"past_the_tie", DType::kF16, {0x3c00, 0x1000, 0x0001}, 0x3c00},  // 2^-24 is lost in float32
                    Corner{"just_past_the_tie", DType::kF16, {0x3c00, 0x1001}, 0x3c01},
                    Corner{"largest", DType::kF16, {0x7bff, 0x0000}, 0x7bff},                   // 65504
                    Corner{"below_the_last_tie", DType::kF16, {0x7bff, 0x4b80}, 0x7bff},        // + 15
                    Corner{"overflow_at_the_last_tie", DType::kF16, {0x7bff, 0x4c00}, 0x7c00},  // + 16
                    Corner{"overflow_and_back", DType::kF16, {0x7bff, 0x7bff, 0xfbff}, 0x7bff},
                    Corner{"negative_overflow", DType::kF16, {0xfbff, 0xfbff}, 0xfc00},
                    Corner{"subnormals", DType::kF16, {0x0001, 0x0002}, 0x0003},
                    Corner{"subnormals_to_normal", DType::kF16, {0x03ff, 0x0001}, 0x0400},
                    Corner{"normal_to_subnormal", DType::kF16, {0x0400, 0x8001}, 0x03ff},
                    Corner{"minus_zero", DType::kF16, {0x8000, 0x8000}, 0x8000},
                    Corner{"zeros", DType::kF16, {0x8000, 0x0000}, 0x0000},
                    Corner{"infinity", DType::kF16, {0x7c00, 0x3c00}, 0x7c00},
                    Corner{"brain_tie_to_even_below", DType::kBF16, {0x3f80, 0x3b80}, 0x3f80},  // 1 + 2^-8
                    Corner{"brain_tie_to_even_above", DType::kBF16, {0x3f81, 0x3b80}, 0x3f82},
                    Corner{"brain_just_past_the_tie", DType::kBF16, {0x3f80, 0x3b81}, 0x3f81},
                    Corner{"brain_overflow", DType::kBF16, {0x7f7f, 0x7f7f}, 0x7f80},
                    Corner{"brain_subnormals", DType::kBF16, {0x0001, 0x0001}, 0x0002}),
    [](const auto& info) { return info.param.name; });

TEST(ReduceInOrder, DependsOnTheOrderOfRanks) {
  const auto f32 = [](float value) {
    Memory memory(4);
    write(memory, 0, value);
    return memory;
  };
  EXPECT_EQ(read<float>(sum(DType::kF32, {f32(1e8f), f32(-1e8f), f32(1)}), 0), 1.0f);
  EXPECT_EQ(read<float>(sum(DType::kF32, {f32(1), f32(1e8f), f32(-1e8f)}), 0), 0.0f);
}

// A thread may have been told to round otherwise, or to flush subnormals, by a library that it shares a process with.
class FloatingPointMode : public testing::TestWithParam<DType> {};

TEST_P(FloatingPointMode, DoesNotChangeTheSum) {
  const DType dtype = GetParam();
  const std::vector<Memory> pieces = random_pieces(dtype, 3, 5000, 2);
  const Memory expected = sum(dtype, pieces);
  const StrangeRounding mode;
  EXPECT_TRUE(sum(dtype, pieces) == expected);
  EXPECT_TRUE(mode.is_untouched());
}

INSTANTIATE_TEST_SUITE_P(All, FloatingPointMode, testing::Values(DType::kF16, DType::kBF16, DType::kF32, DType::kF64),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST(DTypes, HaveSizesAndNames) {
  constexpr size_t kBytes[] = {2, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8};
  for (size_t i = 0; i < std::size(kAllDTypes); ++i) EXPECT_EQ(item_bytes(kAllDTypes[i]), kBytes[i]);
  EXPECT_EQ(dtype_name(DType::kBF16), "bfloat16");
  EXPECT_EQ(dtype_name(DType::kU64), "uint64");
}

TEST(DTypes, OfUnknownNumberHaveNoSize) {
  for (int number : {0, 13, 14, 255}) EXPECT_EQ(item_bytes(static_cast<DType>(number)), 0u) << number;
}

}  // namespace
}  // namespace jaxhetero
