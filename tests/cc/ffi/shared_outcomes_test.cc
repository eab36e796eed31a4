#include "xla_ffi/ffi/shared_outcomes.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "xla_ffi/base/status.h"

namespace jaxhetero {
namespace {

TEST(SharedOutcomes, ThoseThatComeBeforeAndAfterTheEndAreTold) {
  SharedOutcomes outcomes(2);
  std::vector<std::string> told;
  const auto tell = [&told](const Status& status) { told.push_back(status.message()); };
  outcomes.wait(1, tell);
  EXPECT_TRUE(told.empty());
  outcomes.end(1, {Code::kReducerLost, "lost"});
  EXPECT_EQ(told, std::vector<std::string>{"lost"});
  outcomes.wait(1, tell);
  EXPECT_EQ(told, (std::vector<std::string>{"lost", "lost"}));
}

TEST(SharedOutcomes, RunsAreApart) {
  SharedOutcomes outcomes(1);
  std::vector<int> told;
  outcomes.wait(1, [&](const Status& status) { told.push_back(status.ok() ? 1 : -1); });
  outcomes.end(2, {});
  EXPECT_TRUE(told.empty());
  outcomes.end(1, {Code::kRoundTimeout, "late"});
  EXPECT_EQ(told, std::vector<int>{-1});
  outcomes.wait(2, [&](const Status& status) { told.push_back(status.ok() ? 2 : -2); });
  EXPECT_EQ(told, (std::vector<int>{-1, 2}));
}

TEST(SharedOutcomes, ARunThatAllHaveHeardOfIsForgotten) {
  SharedOutcomes outcomes(1);
  int ends = 0;
  outcomes.wait(7, [&](const Status&) { ++ends; });
  outcomes.end(7, {});
  outcomes.wait(7, [&](const Status&) { ++ends; });
  EXPECT_EQ(ends, 1);
}

}  // namespace
}  // namespace jaxhetero
