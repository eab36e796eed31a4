// The coordinator of an elastic job: workers, too, may be lost, and so may itself.
//
// It runs in a process of its own, and takes the job's settings from the first worker that registers.
//
// Changes. A lost worker makes a new view, as a lost reducer does, and goes together with the reducer inside it. The
// workers report how far they are with each op (kReport), and the next view says which rounds are complete: see
// commits.h. The job fails when fewer workers are left than it needs at least.
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
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/membership/coordinator.h"
#include "xla_ffi/wire/elastic_messages.h"

namespace jaxhetero {

class ElasticCoordinator final : public Coordinator {
 public:
  // `on_end` is called once, when all workers have left, or when the job has failed and everybody was told.
  ElasticCoordinator(TcpContext& context, std::string version, EventLog& log, std::chrono::milliseconds lost_after,
                     std::function<void(const Status&)> on_end);

 private:
  [[nodiscard]] bool takes(const Guest& guest, FrameType type) const override;
  Status on_frame_of_elastic(Guest& guest, FrameType type) override;
  void on_fault(const Guest& guest, const Status& why) override;
  void on_goodbye(Guest& guest, const Idle& idle) override;
  void release_leavers();
  Status admit(Guest& guest, Registration registration) override;

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
  Status on_accusation(const Guest& guest);

  // Returning.
  Status on_return(Guest& guest);
  [[nodiscard]] const View* newest_view() const;
  [[nodiscard]] Guest* returned_worker(const View& view, uint32_t rank);
  [[nodiscard]] Guest* returned_reducer(const View::Reducer& reducer);
  [[nodiscard]] bool have_all_returned(const View& view);
  void resume();

  const std::chrono::milliseconds lost_after_;
  std::function<void(const Status&)> on_end_;
  std::vector<std::pair<Connection*, Registration>> early_;  // of reducers, while the job's settings are not known
  std::map<uint32_t, Report> reports_;                       // by rank, while the view changes
  std::map<uint32_t, std::set<uint32_t>> accusers_;          // by rank: those who call it stuck, in this view
  std::map<Connection*, Return> returns_;                    // while members of an earlier coordinator's job come
};

}  // namespace jaxhetero
