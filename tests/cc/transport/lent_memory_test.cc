// Memory that others on this host read in place: who finds what, and what becomes of it afterwards.
#include "xla_ffi/transport/lent_memory.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>

namespace jaxhetero {
namespace {

constexpr size_t kBytes = 3 * 4096;

std::shared_ptr<LentMemory> shared_memory() {
  auto lent_memory = std::make_shared<LentMemory>();
  EXPECT_TRUE(lent_memory->share().ok());
  return lent_memory;
}

std::shared_ptr<const BorrowedMemory> view_of(const LentMemory& lent_memory) {
  return std::move(*BorrowedMemory::open(*lent_memory.offer()));
}

std::span<std::byte> fill(const std::shared_ptr<std::byte>& memory, std::byte value, size_t bytes = kBytes) {
  std::memset(memory.get(), std::to_integer<int>(value), bytes);
  return {memory.get(), bytes};
}

bool is_all(std::optional<std::span<const std::byte>> memory, std::byte value) {
  return memory.has_value() && std::ranges::all_of(*memory, [=](std::byte byte) { return byte == value; });
}

size_t resident_bytes(const LentMemory& lent_memory) {
  struct stat about{};
  EXPECT_EQ(fstat(static_cast<int>(lent_memory.offer()->descriptor), &about), 0);
  return static_cast<size_t>(about.st_blocks) * 512;
}

TEST(LentMemory, IsReadWhereItIs) {
  const auto lent_memory = shared_memory();
  const auto view = view_of(*lent_memory);
  const auto one = lent_memory->allocate(kBytes);
  const auto other = lent_memory->allocate(kBytes);
  const uint32_t place = *lent_memory->place_of(fill(one, std::byte{1}));
  const uint32_t within = *lent_memory->place_of(fill(other, std::byte{2}).subspan(4096 + 8, 100));
  EXPECT_TRUE(is_all(view->at(place, kBytes), std::byte{1}));
  EXPECT_TRUE(is_all(view->at(within, kBytes - 4096 - 8), std::byte{2}));
  fill(one, std::byte{3});
  EXPECT_TRUE(is_all(view->at(place, kBytes), std::byte{3}));
}

TEST(LentMemory, IsSharedOnce) {
  const auto lent_memory = shared_memory();
  const auto memory = lent_memory->allocate(kBytes);
  ASSERT_TRUE(lent_memory->share().ok());
  EXPECT_TRUE(lent_memory->place_of({memory.get(), kBytes}).has_value());
}

TEST(LentMemory, IsPrivateUntilItIsShared) {
  const auto lent_memory = std::make_shared<LentMemory>();
  const auto memory = lent_memory->allocate(kBytes);
  EXPECT_FALSE(lent_memory->offer().has_value());
  EXPECT_FALSE(lent_memory->place_of(fill(memory, std::byte{1})).has_value());
  ASSERT_TRUE(lent_memory->share().ok());
  EXPECT_FALSE(lent_memory->place_of({memory.get(), kBytes}).has_value());
}

// A device that knows memory by its pages would read others than those that are written next.
TEST(LentMemory, KeepsItsPagesForDevices) {
  const auto lent_memory = std::make_shared<LentMemory>();
  Result<LongLived> all = lent_memory->keep_pages();
  ASSERT_TRUE(all.ok());
  auto memory = lent_memory->allocate(kBytes);
  const std::byte* const start = fill(memory, std::byte{1}).data();
  EXPECT_TRUE(start >= all->bytes.data() && start + kBytes <= all->bytes.data() + all->bytes.size());
  memory.reset();
  EXPECT_EQ(resident_bytes(*lent_memory), 4096 + kBytes);
  EXPECT_TRUE(is_all(std::span(start, kBytes), std::byte{1}));
}

TEST(LentMemory, HasNoPlaceForWhatIsNotInIt) {
  const auto lent_memory = shared_memory();
  const auto memory = lent_memory->allocate(kBytes);
  const std::span<const std::byte> all(memory.get(), kBytes);
  const std::byte elsewhere{};
  EXPECT_FALSE(lent_memory->place_of({&elsewhere, 1}).has_value());
  EXPECT_FALSE(lent_memory->place_of({memory.get(), kBytes + 1}).has_value()) << "nobody has the rest";
  EXPECT_FALSE(lent_memory->place_of(all.subspan(4)).has_value()) << "a double lies on a multiple of its size";
}

TEST(LentMemory, ShowsNothingBehindItsEnd) {
  const auto view = view_of(*shared_memory());
  constexpr uint32_t kEnd = (uint64_t{16} << 30) / 8;
  EXPECT_TRUE(view->at(kEnd - 1, 8).has_value());
  EXPECT_FALSE(view->at(kEnd - 1, 9).has_value());
  EXPECT_FALSE(view->at(kEnd, 1).has_value());
  EXPECT_FALSE(view->at(0xffffffff, 1).has_value());
}

// What finds no room is memory like any other.
TEST(LentMemory, GivesMoreThanItHas) {
  const auto lent_memory = shared_memory();
  const auto most = lent_memory->allocate((size_t{16} << 30) - 4096);
  const auto memory = lent_memory->allocate(kBytes);
  fill(memory, std::byte{1});
  EXPECT_FALSE(lent_memory->place_of({memory.get(), kBytes}).has_value());
  EXPECT_TRUE(lent_memory->place_of({most.get(), 1}).has_value());
}

TEST(LentMemory, ReturnsTheMemoryThatIsFreedAndUsesItsPlaceAgain) {
  const auto lent_memory = shared_memory();
  const auto stays = lent_memory->allocate(kBytes);
  fill(stays, std::byte{1});
  const size_t before = resident_bytes(*lent_memory);
  for (int i = 0; i < 3; ++i) {
    const auto memory = lent_memory->allocate(kBytes);
    fill(memory, std::byte{2});
    EXPECT_EQ(resident_bytes(*lent_memory), before + kBytes);
    EXPECT_EQ(*lent_memory->place_of({memory.get(), kBytes}), kBytes / 8);
  }
  EXPECT_EQ(resident_bytes(*lent_memory), before);
  EXPECT_TRUE(is_all(std::span<const std::byte>(stays.get(), kBytes), std::byte{1}));
}

// A job that fails lets go of everything, while a peer may be about to read.
TEST(LentMemory, LeavesWhatIsFreedInTheEndAsItIs) {
  auto lent_memory = shared_memory();
  const auto view = view_of(*lent_memory);
  auto memory = lent_memory->allocate(kBytes);
  const uint32_t place = *lent_memory->place_of(fill(memory, std::byte{7}));
  lent_memory->end();
  memory.reset();
  EXPECT_TRUE(is_all(view->at(place, kBytes), std::byte{7}));
  lent_memory.reset();
  EXPECT_TRUE(is_all(view->at(place, kBytes), std::byte{7}));
}

}  // namespace
}  // namespace jaxhetero
