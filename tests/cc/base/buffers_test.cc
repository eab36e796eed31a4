#include "xla_ffi/base/buffers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

namespace jaxhetero {
namespace {

class Slice : public testing::TestWithParam<std::vector<size_t>> {};  // the leaves' sizes

TEST_P(Slice, IsTheFlatRange) {
  const std::vector<size_t>& sizes = GetParam();
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::byte> flat;
  Leaves leaves;
  for (size_t size : sizes) {
    memory.emplace_back(size);
    for (std::byte& byte : memory.back()) {
      byte = static_cast<std::byte>(flat.size());
      flat.push_back(byte);
    }
  }
  for (std::vector<std::byte>& leaf : memory) leaves.append(leaf.data(), leaf.size());
  ASSERT_EQ(leaves.bytes(), flat.size());
  ASSERT_EQ(leaves.leaf_count(), sizes.size());

  for (size_t offset = 0; offset <= flat.size(); ++offset) {
    for (size_t bytes = 0; offset + bytes <= flat.size(); ++bytes) {
      std::vector<iovec> pieces = {{nullptr, 0}};  // slice() appends
      leaves.slice(offset, bytes, pieces);
      EXPECT_EQ(pieces.front().iov_base, nullptr);
      std::vector<std::byte> gathered;
      for (size_t i = 1; i < pieces.size(); ++i) {
        EXPECT_GT(pieces[i].iov_len, 0u) << "a system call would be bothered with nothing";
        const auto* begin = static_cast<const std::byte*>(pieces[i].iov_base);
        gathered.insert(gathered.end(), begin, begin + pieces[i].iov_len);
      }
      const auto begin = flat.begin() + static_cast<std::ptrdiff_t>(offset);
      EXPECT_EQ(gathered, std::vector(begin, begin + static_cast<std::ptrdiff_t>(bytes))) << offset << " + " << bytes;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Slice,
                         testing::Values(std::vector<size_t>{}, std::vector<size_t>{0}, std::vector<size_t>{0, 0},
                                         std::vector<size_t>{5}, std::vector<size_t>{3, 4, 5},
                                         std::vector<size_t>{0, 3, 4}, std::vector<size_t>{0, 0, 3, 4},
                                         std::vector<size_t>{3, 0, 4}, std::vector<size_t>{3, 0, 0, 4},
                                         std::vector<size_t>{3, 4, 0}, std::vector<size_t>{3, 4, 0, 0},
                                         std::vector<size_t>{0, 1, 0, 1, 0, 7, 0}, std::vector<size_t>(9, 1)));

// Both buckets have leaves of their own sizes, of which some are empty.
TEST(Copy, MovesTheRangeAndNothingElse) {
  std::vector<std::byte> from(12);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i + 1);
  Leaves sources;
  for (const auto& [offset, bytes] : {std::pair<size_t, size_t>{0, 5}, {5, 0}, {5, 4}, {9, 3}}) {
    sources.append(from.data() + offset, bytes);
  }
  for (size_t from_offset = 0; from_offset <= 12; ++from_offset) {
    for (size_t to_offset = 0; to_offset <= 12; ++to_offset) {
      for (size_t bytes = 0; bytes <= 12 - std::max(from_offset, to_offset); ++bytes) {
        std::vector<std::byte> to(12);
        Leaves targets;
        for (size_t i = 0; i < 4; ++i) targets.append(to.data() + 3 * i, 3);
        copy(sources, from_offset, targets, to_offset, bytes);
        for (size_t i = 0; i < 12; ++i) {
          const bool is_copied = i >= to_offset && i < to_offset + bytes;
          ASSERT_EQ(to[i], is_copied ? from[i - to_offset + from_offset] : std::byte{0});
        }
      }
    }
  }
}

TEST(AsPieces, OfNothingIsNothing) {
  std::vector<std::byte> memory(3);
  EXPECT_TRUE(as_pieces({}).empty());
  const std::vector<iovec> pieces = as_pieces(memory);
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(pieces[0].iov_base, memory.data());
  EXPECT_EQ(pieces[0].iov_len, memory.size());
}

TEST(Ranges, ReportEveryByteOnce) {
  std::mt19937 random(1);
  for (int repeat = 0; repeat < 200; ++repeat) {
    Ranges ranges;
    std::vector<bool> expected(64);
    std::vector<int> reports(64);
    for (int step = 0; step < 12; ++step) {
      const size_t begin = random() % 60;
      const size_t end = begin + 1 + random() % (64 - begin - 1);
      ranges.add(begin, end, [&](size_t from, size_t bytes) {
        for (size_t i = from; i < from + bytes; ++i) ++reports[i];
      });
      for (size_t i = begin; i < end; ++i) expected[i] = true;
      for (size_t i = 0; i < 64; ++i) ASSERT_EQ(reports[i], expected[i] ? 1 : 0) << i;
    }
  }
}

}  // namespace
}  // namespace jaxhetero
