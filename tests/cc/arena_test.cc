// Memory that others on this host read in place: who finds what, and what becomes of it afterwards.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "xla_ffi/transport/lent_memory.h"

namespace jaxhetero {
namespace {

constexpr size_t kBytes = 3 * 4096;

std::shared_ptr<Arena> shared_arena() {
  auto arena = std::make_shared<Arena>();
  EXPECT_TRUE(arena->share().ok());
  return arena;
}

std::shared_ptr<const ArenaView> view_of(const Arena& arena) { return std::move(*ArenaView::open(*arena.offer())); }

std::span<std::byte> fill(const std::shared_ptr<std::byte>& memory, std::byte value, size_t bytes = kBytes) {
  std::memset(memory.get(), std::to_integer<int>(value), bytes);
  return {memory.get(), bytes};
}

bool is_all(std::optional<std::span<const std::byte>> memory, std::byte value) {
  return memory.has_value() && std::ranges::all_of(*memory, [=](std::byte byte) { return byte == value; });
}

size_t resident_bytes(const Arena& arena) {
  struct stat about{};
  EXPECT_EQ(fstat(static_cast<int>(arena.offer()->descriptor), &about), 0);
  return static_cast<size_t>(about.st_blocks) * 512;
}

TEST(Arena, IsReadWhereItIs) {
  const auto arena = shared_arena();
  const auto view = view_of(*arena);
  const auto one = arena->allocate(kBytes);
  const auto other = arena->allocate(kBytes);
  const uint32_t place = *arena->place_of(fill(one, std::byte{1}));
  const uint32_t within = *arena->place_of(fill(other, std::byte{2}).subspan(4096 + 8, 100));
  EXPECT_TRUE(is_all(view->at(place, kBytes), std::byte{1}));
  EXPECT_TRUE(is_all(view->at(within, kBytes - 4096 - 8), std::byte{2}));
  fill(one, std::byte{3});
  EXPECT_TRUE(is_all(view->at(place, kBytes), std::byte{3}));
}

TEST(Arena, IsSharedOnce) {
  const auto arena = shared_arena();
  const auto memory = arena->allocate(kBytes);
  ASSERT_TRUE(arena->share().ok());
  EXPECT_TRUE(arena->place_of({memory.get(), kBytes}).has_value());
}

TEST(Arena, IsPrivateUntilItIsShared) {
  const auto arena = std::make_shared<Arena>();
  const auto memory = arena->allocate(kBytes);
  EXPECT_FALSE(arena->offer().has_value());
  EXPECT_FALSE(arena->place_of(fill(memory, std::byte{1})).has_value());
  ASSERT_TRUE(arena->share().ok());
  EXPECT_FALSE(arena->place_of({memory.get(), kBytes}).has_value());
}

TEST(Arena, HasNoPlaceForWhatIsNotInIt) {
  const auto arena = shared_arena();
  const auto memory = arena->allocate(kBytes);
  const std::span<const std::byte> all(memory.get(), kBytes);
  const std::byte elsewhere{};
  EXPECT_FALSE(arena->place_of({&elsewhere, 1}).has_value());
  EXPECT_FALSE(arena->place_of({memory.get(), kBytes + 1}).has_value()) << "nobody has the rest";
  EXPECT_FALSE(arena->place_of(all.subspan(4)).has_value()) << "a double lies on a multiple of its size";
}

TEST(Arena, ShowsNothingBehindItsEnd) {
  const auto view = view_of(*shared_arena());
  constexpr uint32_t kEnd = (uint64_t{16} << 30) / 8;
  EXPECT_TRUE(view->at(kEnd - 1, 8).has_value());
  EXPECT_FALSE(view->at(kEnd - 1, 9).has_value());
  EXPECT_FALSE(view->at(kEnd, 1).has_value());
  EXPECT_FALSE(view->at(0xffffffff, 1).has_value());
}

// What finds no room is memory like any other.
TEST(Arena, GivesMoreThanItHas) {
  const auto arena = shared_arena();
  const auto most = arena->allocate((size_t{16} << 30) - 4096);
  const auto memory = arena->allocate(kBytes);
  fill(memory, std::byte{1});
  EXPECT_FALSE(arena->place_of({memory.get(), kBytes}).has_value());
  EXPECT_TRUE(arena->place_of({most.get(), 1}).has_value());
}

TEST(Arena, ReturnsTheMemoryThatIsFreedAndUsesItsPlaceAgain) {
  const auto arena = shared_arena();
  const auto stays = arena->allocate(kBytes);
  fill(stays, std::byte{1});
  const size_t before = resident_bytes(*arena);
  for (int i = 0; i < 3; ++i) {
    const auto memory = arena->allocate(kBytes);
    fill(memory, std::byte{2});
    EXPECT_EQ(resident_bytes(*arena), before + kBytes);
    EXPECT_EQ(*arena->place_of({memory.get(), kBytes}), kBytes / 8);
  }
  EXPECT_EQ(resident_bytes(*arena), before);
  EXPECT_TRUE(is_all(std::span<const std::byte>(stays.get(), kBytes), std::byte{1}));
}

// A job that fails lets go of everything, while a peer may be about to read.
TEST(Arena, LeavesWhatIsFreedInTheEndAsItIs) {
  auto arena = shared_arena();
  const auto view = view_of(*arena);
  auto memory = arena->allocate(kBytes);
  const uint32_t place = *arena->place_of(fill(memory, std::byte{7}));
  arena->end();
  memory.reset();
  EXPECT_TRUE(is_all(view->at(place, kBytes), std::byte{7}));
  arena.reset();
  EXPECT_TRUE(is_all(view->at(place, kBytes), std::byte{7}));
}

}  // namespace
}  // namespace jaxhetero
