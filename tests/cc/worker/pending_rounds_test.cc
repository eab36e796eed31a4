#include "xla_ffi/worker/pending_rounds.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "xla_ffi/base/block_pool.h"
#include "xla_ffi/base/counters.h"
#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/worker/callback_threads.h"

namespace jaxhetero {
namespace {

class PendingRoundsTest : public testing::Test {
 protected:
  Ticket add(const std::string& name) { return rounds_.add(name, {pool_.allocate(64), 64, std::nullopt}); }

  // How the round ends for who takes it.
  std::future<Status> take(const Ticket& ticket, size_t bytes = 64) {
    const auto promise = std::make_shared<std::promise<Status>>();
    std::future<Status> end = promise->get_future();
    const Status refused = rounds_.take(
        ticket, bytes, [promise](const Status& status, const PendingTotal& /*total*/) { promise->set_value(status); });
    if (!refused.ok()) promise->set_value(refused);
    return end;
  }

  Counters counters_;
  EventLog log_;
  BlockPool pool_;
  CallbackThreads threads_;
  PendingRounds rounds_{counters_, log_, threads_};
};

TEST_F(PendingRoundsTest, ATotalIsTakenBeforeItComesAndAfterwards) {
  const Ticket early = add("early");
  const Ticket late = add("late");
  EXPECT_EQ(counters_.pending_bytes, 128u);
  rounds_.end(early, {});
  EXPECT_TRUE(take(early).get().ok());
  std::future<Status> waiting = take(late);
  rounds_.end(late, {Code::kReducerLost, "gone"});
  EXPECT_EQ(waiting.get().code(), Code::kReducerLost);
  EXPECT_EQ(counters_.pending_count, 0u);
  EXPECT_EQ(counters_.pending_bytes, 0u);
  EXPECT_EQ(rounds_.describe_untaken(), "");
}

TEST_F(PendingRoundsTest, RefusesWhatIsNoneOfItsRounds) {
  const Ticket ticket = add("one");
  EXPECT_NE(take(ticket, 32).get().message().find("of one, whose total has another size"), std::string::npos);
  EXPECT_NE(take({ticket.owner + 1, ticket.number}).get().message().find("another process"), std::string::npos);
  std::future<Status> waiting = take(ticket);
  EXPECT_NE(take(ticket).get().message().find("finished already"), std::string::npos);
  rounds_.end(ticket, {});
  EXPECT_TRUE(waiting.get().ok());
  EXPECT_NE(take(ticket).get().message().find("finished already"), std::string::npos);
}

TEST_F(PendingRoundsTest, NamesWhatNobodyHasTaken) {
  for (int i = 0; i < 7; ++i) add("op " + std::to_string(i));
  EXPECT_EQ(rounds_.describe_untaken(), "op 0, op 1, op 2, op 3, op 4 and 2 more");
}

TEST_F(PendingRoundsTest, WarnsOnceOfAnOpThatNobodyTakes) {
  constexpr std::chrono::milliseconds kNow{0};
  for (int i = 0; i < 255; ++i) add("forgotten");
  EXPECT_FALSE(log_.next(kNow).has_value());
  for (int i = 0; i < 300; ++i) add("forgotten");
  const std::optional<Event> line = log_.next(kNow);
  ASSERT_TRUE(line.has_value());
  EXPECT_NE(line->text.find("256 rounds of forgotten were started and not finished"), std::string::npos);
  EXPECT_FALSE(log_.next(kNow).has_value());
}

TEST(BlockPool, KeepsNoMoreThanWasInUse) {
  BlockPool pool;
  const std::byte* first = nullptr;
  {
    const auto block = pool.allocate(1000);
    first = block.get();
  }
  EXPECT_EQ(pool.allocate(1000).get(), first);
  {
    const auto other = pool.allocate(600);
  }
  EXPECT_NE(pool.allocate(1000).get(), nullptr);
}

}  // namespace
}  // namespace jaxhetero
