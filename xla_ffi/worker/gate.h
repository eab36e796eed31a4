// The gate that the program of an elastic job passes between two steps. There, workers come and go.
//
// Gates are numbered. The program passes one at once, unless the job is about to change:
//
// While the view changes, nobody passes: the next view says to whom the steps from the furthest gate on are dealt.
// When somebody wants to come or go, all members meet: each tells the gate where it stands (Meeting), runs up to the
// furthest of them, and ends its programs. The view that follows has the new members.
// Then nobody passes before those who have come have the state of the others (Presence).
//
// The communicator owns it, and tells it what the coordinator says. Any thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/elastic_messages.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

class Gate {
 public:
  using Clock = std::chrono::steady_clock;

  // What the program does now.
  struct Turn {
    enum class What : uint8_t {
      kPass,  // it may go on
      kMeet,  // it ends its programs, and says so
      kGive,  // it sends its state to those who have come
      kTake,  // it receives the state, and says so
      kLeave  // it ends: this worker, or the whole job, has no more to do
    };
    What what = What::kPass;
    uint64_t gate = 0;
    uint32_t view = 0;
    std::vector<uint32_t> ranks = {};    // to whom the step is dealt; with kGive and kTake, all members
    std::vector<uint32_t> joining = {};  // with kGive and kTake
  };

  explicit Gate(uint32_t rank) : rank_(rank) {}

  // --- The program.

  // It has come to a gate. Returns whether that is news.
  bool arrive();
  // What it does next; nothing if that is not known after `patience`, and an error if the job has failed.
  Result<std::optional<Turn>> wait(std::chrono::milliseconds patience);
  // Its programs have ended, where a kMeet was.
  std::optional<Meeting> meet();
  // It has sent what a kGive of this view asks for, or need not.
  void note_given(uint32_t view);
  // It has the state of a kTake: in this view. Nothing if that is over, or ends: the worker may have said that it has
  // none, and then gets it again in the next one.
  std::optional<Presence> take_state(uint32_t view);

  // --- The coordinator, by way of the communicator.

  void enter(const View& view);
  void halt();
  // Returns the answer, if one is due.
  std::optional<Meeting> meet(const Meeting& meeting);
  void go(const Presence& presence);
  // Nobody passes any more: the job has failed, or ended.
  void end(const Status& why);

  // Of a member of the view: whom the job waits for at this gate, and for how long it has done so.
  struct Delay {
    bool is_own = false;    // the program has not come for the state; else others have not come to where all meet
    bool is_first = false;  // that is the first gate of all: others may compile
    Clock::duration waited{0};
  };
  [[nodiscard]] std::optional<Delay> delay(Clock::time_point now) const;
  // Something moves, or could not: from now on it counts anew.
  void restart_delay();

  // Whether the program waits to be let into the job.
  [[nodiscard]] std::optional<Presence> candidacy() const;
  [[nodiscard]] uint64_t next() const;
  [[nodiscard]] bool has_state() const;

 private:
  static constexpr uint64_t kNoGate = std::numeric_limits<uint64_t>::max();

  [[nodiscard]] std::optional<Turn> turn();
  void note_wait(bool waits_for_others);
  [[nodiscard]] bool is_joining() const;

  const uint32_t rank_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  View view_;
  bool is_member_ = false;
  bool is_waiting_ = false;  // the program has come to a gate
  bool is_halted_ = true;
  bool has_state_ = true;
  bool has_given_ = false;  // in this view
  uint64_t next_ = 0;
  uint64_t end_ = kNoGate;  // the first that nobody may pass
  std::optional<Meeting> meeting_;
  bool waits_for_others_ = false;  // the program stands at a gate, and nothing but others keeps it there
  Clock::time_point waits_since_;
  bool has_ended_ = false;
  Status why_;
};

}  // namespace jaxhetero
