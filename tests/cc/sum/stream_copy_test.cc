#include "xla_ffi/sum/stream_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace jaxhetero {
namespace {

// Wherever it begins and ends, and nothing beside it.
TEST(StreamCopy, CopiesEveryByteOnce) {
  constexpr size_t kMost = 1000;
  constexpr std::byte kUntouched{0xee};
  std::vector<std::byte> from(kMost + 64);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7);
  for (size_t bytes = 0; bytes <= kMost; bytes += bytes < 300 ? 1 : 57) {
    for (const size_t to_offset : {0, 1, 31, 32, 40}) {
      for (const size_t from_offset : {0, 3, 32}) {
        std::vector<std::byte> to(kMost + 64, kUntouched);
        stream_copy(from.data() + from_offset, to.data() + to_offset, bytes);
        std::vector<std::byte> expected(to.size(), kUntouched);
        std::copy_n(from.begin() + ptrdiff_t(from_offset), bytes, expected.begin() + ptrdiff_t(to_offset));
        ASSERT_EQ(to, expected) << bytes << " bytes from " << from_offset << " to " << to_offset;
      }
    }
  }
}

}  // namespace
}  // namespace jaxhetero
