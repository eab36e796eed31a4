// What becomes of open rounds when a view of an elastic job ends.
#include "xla_ffi/membership/commits.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "tests/cc/job.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/elastic_messages.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

constexpr uint64_t kOp = 7;

using Ops = std::vector<Report::Op>;

Result<std::vector<View::Commit>> decide(const std::map<uint32_t, Ops>& by_rank) {
  std::map<uint32_t, Report> reports;
  for (const auto& [rank, ops] : by_rank) reports[rank] = {1, ops};
  return decide_commits(reports);
}

Report::Op large(uint64_t given_count, bool holds) { return {kOp, given_count, holds}; }

Report::Op small(uint64_t given_count, std::string_view total) {
  return {kOp, given_count, false, true, {}, bytes_of(total)};
}

TEST(Commits, BeginAnewWhatSomebodyDoesNotHold) {
  EXPECT_TRUE(decide({})->empty());
  EXPECT_TRUE(decide({{0, {large(3, false)}}, {1, {large(3, false)}}})->empty());
  EXPECT_TRUE(decide({{0, {large(3, true)}}, {1, {large(3, false)}}})->empty());
  EXPECT_TRUE(decide({{0, {large(0, true)}}, {1, {}}})->empty()) << "the second one does not know the op yet";
}

TEST(Commits, CompleteWhatAllHoldOrSomebodyWasGiven) {
  for (const auto& other : {large(3, true), large(4, false)}) {
    auto commits = decide({{0, {large(3, true)}}, {2, {other}}});
    ASSERT_EQ(commits->size(), 1u);
    EXPECT_EQ(commits->front().op, kOp);
    EXPECT_EQ(commits->front().round, 3u);
    EXPECT_TRUE(commits->front().total.empty());
  }
}

TEST(Commits, CarryTheTotalOfASmallRound) {
  auto commits = decide({{0, {small(4, "new")}}, {1, {small(3, "old")}}});
  ASSERT_EQ(commits->size(), 1u);
  EXPECT_EQ(commits->front().round, 3u);
  EXPECT_EQ(commits->front().total, bytes_of("new"));
  EXPECT_TRUE(decide({{0, {small(4, "new")}}, {1, {small(4, "new")}}})->empty());
}

TEST(Commits, AskTheMembersOfTheGroupAlone) {
  Report::Op of_group = large(0, true);
  of_group.group = {0, 2, 3};  // 3 is lost
  EXPECT_EQ(decide({{0, {of_group}}, {1, {}}, {2, {of_group}}})->size(), 1u);
  EXPECT_TRUE(decide({{0, {of_group}}, {1, {}}, {2, {}}})->empty());
}

TEST(Commits, RefuseReportsThatContradictEachOther) {
  EXPECT_EQ(decide({{0, {large(5, false)}}, {1, {large(3, false)}}}).status().code(), Code::kInternal);
  EXPECT_EQ(decide({{0, {large(4, false)}}, {1, {large(3, false)}}}).status().code(), Code::kInternal);
}

}  // namespace
}  // namespace jaxhetero
