#include "xla_ffi/membership/history.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <string>

#include "xla_ffi/wire/messages.h"

namespace jaxhetero {
namespace {

std::string text_of(const std::string& file) {
  std::ifstream stream(file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::string line_of(uint32_t view) {
  return "{\"view\": " + std::to_string(view) + R"(, "members": [0, 2], "joining": [], "gate": 7, "rounds": [)" +
         R"({"op": "a \"sum\"", "complete": 3, "group": [0, 1]}]})" + "\n";
}

Status note(History& history, uint32_t view_number) {
  View view;
  view.number = view_number;
  view.members = {{0, 0}, {2, 0}};
  view.gate = 7;
  return history.note(view, {{5, {5, 3, false, false, {0, 1}, {}, "a \"sum\""}}});
}

void note(const std::string& file, uint32_t view_number) {
  History history;
  ASSERT_TRUE(history.open(file).ok());
  EXPECT_TRUE(note(history, view_number).ok());
}

TEST(History, HasALineForEachView) {
  const std::string file = testing::TempDir() + "history_of_views";
  std::ofstream(file).close();
  note(file, 1);
  note(file, 2);
  EXPECT_EQ(text_of(file), line_of(1) + line_of(2));
}

// Of one that was killed while it wrote, whose view nobody has been told.
TEST(History, DropsTheUnfinishedLineOfAnEarlierCoordinator) {
  const std::string file = testing::TempDir() + "history_with_an_unfinished_line";
  std::ofstream(file) << line_of(1) << line_of(2).substr(0, 40);
  note(file, 3);
  EXPECT_EQ(text_of(file), line_of(1) + line_of(3));
  std::ofstream(file) << "{";
  note(file, 4);
  EXPECT_EQ(text_of(file), line_of(4));
}

// As when a disk is full: what cannot be written is said, and nothing follows behind the gap.
TEST(History, EndsWhereALineCannotBeWritten) {
  const std::string file = testing::TempDir() + "history_of_a_full_disk";
  std::ofstream(file).close();
  History history;
  ASSERT_TRUE(history.open(file).ok());
  ASSERT_TRUE(note(history, 1).ok());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit full{line_of(1).size(), before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &full), 0);
  const Status status = note(history, 2);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(status.message().find("it ends before view 2"), std::string::npos) << status.message();
  EXPECT_TRUE(note(history, 3).ok());  // said once
  EXPECT_EQ(text_of(file), line_of(1));
}

TEST(History, SaysWhereItCannotBeWritten) {
  EXPECT_FALSE(History().open("/nowhere/history").ok());
  EXPECT_NE(History().open(testing::TempDir()).message().find("is not a file"), std::string::npos);
  const std::string pipe = testing::TempDir() + "history_in_a_pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(History().open(pipe).message().find("is not a file"), std::string::npos);
  ::unlink(pipe.c_str());
}

}  // namespace
}  // namespace jaxhetero
