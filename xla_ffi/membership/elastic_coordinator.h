// The coordinator of an elastic job: workers, too, may be lost, and so may itself.
//
// It runs in a process of its own, and takes the job's settings from the first worker that registers.
//
// Changes. A lost worker makes a new view, as a lost reducer does, and goes together with the reducer inside it. The
// workers report how far they are with each op (kReport), and the next view says which rounds are complete: see
// commits.h. Where fewer workers are left than the job needs, they wait at their gates for others, and the job fails if
// none come.
//
// Gates. A worker that comes to a running job, or comes before it has started and is not needed, is a candidate until
// its program waits at a gate. Then all members meet (kMeet, kMet), and the next view lets candidates in and leavers
// out. Candidates may have the rank of a member: they wait until it is free. See elastic_gates.cc.
//
// Returning. It has nothing on disk. One that is started anew learns from the members how the job is (kReturn). It
// takes the newest view, waits until every member of it has come or counts as lost, and makes the next one. It cannot
// know which numbers of views the last coordinator has used, and so numbers its views by the time at which it was
// started, or from one more than any that it hears of.
//
// Leaving. A worker that has no more rounds says goodbye, and remains a member until all have said so, or for a moment.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/membership/coordinator.h"
#include "xla_ffi/membership/history.h"
#include "xla_ffi/wire/elastic_messages.h"

namespace jaxhetero {

class ElasticCoordinator final : public Coordinator {
 public:
  // `on_end` is called once, when all workers have left, or when the job has failed and everybody was told.
  ElasticCoordinator(TcpContext& context, std::string version, EventLog& log, std::chrono::milliseconds lost_after,
                     std::chrono::milliseconds rejoin_timeout, std::function<void(const Status&)> on_end);

  // Before start(), if the job's history is to be written.
  Status write_history(const std::string& file) { return history_.open(file); }
  Status start(std::chrono::milliseconds patience, std::chrono::milliseconds timeout) override;

 private:
  [[nodiscard]] bool takes(const Guest& guest, FrameType type) const override;
  [[nodiscard]] bool is_early(const Guest& guest) const;
  Status on_frame_of_elastic(Guest& guest, const FrameHeader& header) override;
  void on_fault(const Guest& guest, const Status& why) override;
  void on_goodbye(Guest& guest, const Idle& idle) override;
  void note_settled() override;
  void release_later();
  void end_in_order();
  void release_leavers();
  bool release(const std::set<int32_t>& ranks);

  // The start.
  Status admit(Guest& guest, Registration registration) override;
  void admit_early();
  void consider_start() override;

  // Changes.
  void lose_worker(uint32_t rank, const std::string& why) override;
  void lose(const Registration& process, const std::string& why) override;
  void let_go_all(const std::function<bool(const Guest&)>& is_lost, const std::string& why);
  void lose_silent(const std::vector<Registration>& workers, const std::string& why) override;
  void change_view(const std::string& why) override;
  void note_members() override;
  void tell_view() override;
  bool beat() override;
  void refuse_all(const Status& why) override;
  Status on_report(Guest& guest);
  void decide();
  void note_states();
  Status on_accusation(const Guest& guest);

  // Gates.
  Status on_ready(Guest& guest) override;
  Status on_presence(Guest& guest, const Presence& presence);
  void on_wish_to_leave(const Guest& guest);
  [[nodiscard]] bool may_come_in(const Guest& guest);
  [[nodiscard]] Guest* find_inside(uint32_t rank);
  [[nodiscard]] std::set<uint32_t> ranks_to_leave() const;
  [[nodiscard]] bool keep_states() const;
  [[nodiscard]] bool are_states_backed_up() const;
  void keep_backups(std::set<uint32_t>& ranks) const;
  void consider_meeting();
  void on_answer(const Guest& guest, const Meeting& answer);
  void on_met(const Guest& guest, const Meeting& meeting);
  [[nodiscard]] std::vector<uint32_t> ranks_awaited() const;
  void let_in_and_out();
  void await_more(const Status& why);
  void deal(uint64_t gate);
  void note_complete();
  void to_members(const OutFrame& frame);

  // Returning.
  Status on_return(Guest& guest);
  void await_members();
  [[nodiscard]] const View* newest_view() const;
  [[nodiscard]] bool has_returned(const View& view, Role role, uint32_t number) const;
  [[nodiscard]] bool have_all_returned(const View& view) const;
  void resume();

  // All members run up to one gate, and end their programs there.
  struct Gathering {
    uint64_t number = 0;
    std::map<uint32_t, uint64_t> gates;  // the next gate of each member, by rank
    std::set<uint32_t> met;              // the ranks of those that stand there
  };

  const std::chrono::milliseconds lost_after_;
  Heartbeat own_beat_;
  const std::chrono::milliseconds rejoin_timeout_;
  std::function<void(const Status&)> on_end_;
  bool may_start_ = false;  // members of an earlier coordinator would have come
  std::vector<std::pair<std::shared_ptr<TcpConnection>, Registration>> early_;  // whoever is admitted later
  std::map<uint32_t, Report> reports_;       // keyed by rank; empty but while the view changes
  std::map<uint64_t, Report::Op> complete_;  // by op, how many rounds were when the view changed last
  History history_;
  std::map<uint32_t, std::set<uint32_t>> accusers_;  // by rank, those who call it stuck in this view
  std::optional<Gathering> meeting_;
  uint64_t meeting_count_ = 0;
  uint64_t shortage_count_ = 0;  // how often too few were left
  bool has_met_ = false;         // the change of view that is under way lets workers in and out
  std::set<uint32_t> leavers_;   // the ranks of members that want to leave
  std::set<uint32_t> going_;     // those of them that leave in the change of view that is under way
  // Empty but while members of an earlier coordinator's job come back.
  std::map<std::shared_ptr<TcpConnection>, Return> returns_;
};

}  // namespace jaxhetero
