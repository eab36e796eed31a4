#include "xla_ffi/wire/elastic_messages.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/cc/job.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/wire/state_plan.h"

namespace jaxhetero {
namespace {

View a_view() {
  View view;
  view.job.worker_count = 3;
  view.job.least_worker_count = 2;
  view.job.first_worker_count = 3;
  view.worker_hosts.resize(3);
  view.worker_endpoints.resize(3);
  view.is_candidate = true;
  view.members = {{0, 5}, {2, 7}};
  view.commits = {{1, 2, {}}, {3, 4, bytes_of("total")}};
  view.joining = {2};
  view.gate = 6;
  view.counts = {{1, 3, {}}, {3, 5, {0, 2}}};
  view.deals = {{0, {0, 1}}, {6, {0, 2}}};
  return view;
}

TEST(ViewOfAnElasticJob, KeepsItsMembersAndCommits) {
  const Bytes bytes = encode(a_view());
  Result<View> back = decode_view(bytes);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->ranks(), (std::vector<uint32_t>{0, 2}));
  EXPECT_TRUE(back->has_member(2));
  EXPECT_FALSE(back->has_member(1));
  EXPECT_EQ(encode(*back), bytes);
}

TEST(ViewOfAnElasticJob, HasItsMembersInOrder) {
  View view = a_view();
  view.members = {{2, 7}, {0, 5}};
  EXPECT_EQ(decode_view(encode(view)).status().code(), Code::kProtocol);
}

// Byte for byte as before there were elastic jobs.
TEST(ViewOfAFixedJob, HasNoMembers) {
  View view = a_view();
  view.job.least_worker_count = view.job.first_worker_count = 0;
  const Bytes with = encode(view);
  view.members.clear();
  view.commits.clear();
  view.joining.clear();
  view.counts.clear();
  view.deals.clear();
  EXPECT_EQ(encode(view), with);
  EXPECT_TRUE(decode_view(with)->has_member(1));
}

TEST(JoinOfAFixedJob, HasNoMembers) {
  EXPECT_EQ(encode(Join{1, 2, 3, 4, 5}).size(), 28u);
  EXPECT_EQ(decode_join(encode(Join{1, 2, 3, 4, 5}))->to, 5u);
  EXPECT_EQ(decode_join(encode(Join{1, 2, 3, 4, 5, {0, 2}}))->members, (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(decode_join(encode(Join{1, 2, 3, 4, 5, {2, 0}})).status().code(), Code::kProtocol);
}

TEST(Report, KeepsEveryField) {
  Report report;
  report.view = 9;
  report.ops = {{1, 2, true, false, {0, 3}, {}}, {4, 5, false, true, {}, bytes_of("x")}};
  report.planned_view = 8;
  report.states = encode(StatePlan(std::vector<StatePlan::Member>{{0, 0, "a", 1, 1}}));
  const Bytes bytes = encode(report);
  Result<Report> decoded = decode_report(bytes);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(encode(*decoded), bytes);
  EXPECT_EQ(decoded->planned_view, 8u);
  EXPECT_EQ(decoded->states, report.states);
  report.states.pop_back();
  EXPECT_EQ(decode_report(encode(report)).status().code(), Code::kProtocol) << "half a plan";
  report.states.clear();
  report.ops = {{1, 2, true, false, {3, 3}, {}}};
  EXPECT_EQ(decode_report(encode(report)).status().code(), Code::kProtocol);
}

TEST(Meeting, IsInTheHeader) {
  EXPECT_EQ(decode_meeting(header_of(Meeting{1, 2, true})), (Meeting{1, 2, true}));
  EXPECT_EQ(decode_presence(header_of(Presence{3}))->view, 3u);
  FrameHeader header;
  header.round = uint64_t{1} << 32;
  EXPECT_EQ(decode_presence(header).status().code(), Code::kProtocol);
}

TEST(Return, KeepsEveryField) {
  Registration registration;
  registration.rank = 2;
  registration.host_name = "b";
  const Bytes bytes = encode(Return{registration, 8, a_view()});
  Result<Return> back = decode_return(bytes);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->heard_view, 8u);
  EXPECT_EQ(back->registration.host_name, "b");
  EXPECT_EQ(encode(*back), bytes);
}

TEST(Return, IsOfAnElasticJob) {
  View view = a_view();
  view.job.least_worker_count = 0;
  EXPECT_EQ(decode_return(encode(Return{Registration(), 8, view})).status().code(), Code::kProtocol);
}

TEST(Accusation, KeepsEveryField) {
  const Bytes bytes = encode(Accusation{4, {1, 2}, "why"});
  EXPECT_EQ(encode(*decode_accusation(bytes)), bytes);
  EXPECT_EQ(decode_absent(encode(Absent{{1, 2}}))->ranks, (std::vector<uint32_t>{1, 2}));
  EXPECT_EQ(decode_absent(encode(Absent{{2, 1}})).status().code(), Code::kProtocol);
}

}  // namespace
}  // namespace jaxhetero
