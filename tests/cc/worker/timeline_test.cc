#include "xla_ffi/worker/timeline.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

namespace jaxhetero {
namespace {

using std::chrono::microseconds;

// A round with a part at each of `number` reducers.
void add(Timeline& timeline, uint64_t number, microseconds time = microseconds(300)) {
  RoundRecord record;
  record.description = "op";
  record.number = number;
  record.end = record.requested + time;
  std::vector<RoundRecord::Part> parts;
  for (uint32_t reducer = 0; reducer < number; ++reducer) parts.push_back({reducer, 10 * number + reducer, record.end});
  timeline.add(record, parts);
}

std::vector<uint64_t> numbers(const Timeline::Entries& entries) {
  std::vector<uint64_t> found;
  for (const Timeline::Entry& entry : entries.rounds) found.push_back(entry.record.number);
  return found;
}

TEST(TimelineTest, GivesTheRoundsSinceTheLastLook) {
  Timeline timeline;
  for (uint64_t number = 0; number < 5; ++number) add(timeline, number);
  EXPECT_EQ(timeline.since(3).first, 3u);
  EXPECT_EQ(numbers(timeline.since(3)), (std::vector<uint64_t>{3, 4}));
  EXPECT_EQ(timeline.since(5).first, 5u);
  EXPECT_TRUE(timeline.since(5).rounds.empty());
  EXPECT_EQ(timeline.since(99).first, 5u);
}

TEST(TimelineTest, KeepsTheLatestAndSaysHowManyWent) {
  Timeline timeline;
  timeline.keep(3);
  for (uint64_t number = 0; number < 10; ++number) add(timeline, number);
  const Timeline::Entries entries = timeline.since(2);
  EXPECT_EQ(entries.first, 7u);
  EXPECT_EQ(numbers(entries), (std::vector<uint64_t>{7, 8, 9}));
  for (const Timeline::Entry& entry : entries.rounds) {
    const uint64_t number = entry.record.number;
    ASSERT_EQ(entry.parts.size(), number);
    EXPECT_EQ(entry.parts.front().bytes, 10 * number);
    EXPECT_EQ(entry.parts.back().bytes, 10 * number + number - 1);
  }
}

TEST(TimelineTest, CountsAllRoundsByTheirTime) {
  Timeline timeline;
  timeline.keep(1);
  for (const int us : {0, 100, 101, 1000, 99'000'000}) add(timeline, 1, microseconds(us));
  const RoundTimes times = timeline.times();
  EXPECT_EQ(times.counts[0], 2u);  // to 0.1 ms
  EXPECT_EQ(times.counts[1], 1u);  // to 0.25 ms
  EXPECT_EQ(times.counts[3], 1u);  // to 1 ms
  EXPECT_EQ(times.counts.back(), 1u);
  EXPECT_NEAR(times.sum_s, 99.001201, 1e-9);
}

}  // namespace
}  // namespace jaxhetero
