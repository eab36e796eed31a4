// The rule by which a link pushes: which chunk is next, and how far ahead of the totals. The rounds take turns, under
// one self-clocked window, and the links keep in step.
//
// It has no socket and no clock, so that the simulator runs the same rule as the transport. One for each link. One
// thread; nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/worker/round.h"
#include "xla_ffi/worker/window.h"

namespace jaxhetero {

// Where the rule's chunks go.
class ChunkSender {
 public:
  struct Sent {
    uint64_t frame = 0;  // the frame's number on the connection
    Round::Time at;
  };

  virtual ~ChunkSender() = default;
  // Sends this chunk of the round; a kPush header without payload where the rank contributes nothing to it.
  virtual Sent send_chunk(const Round& round, const FrameHeader& header) = 0;
};

class PushRule {
 public:
  // `job` outlives the rule.
  explicit PushRule(const JobShape& job) : job_(job), window_(0, kMostWindowBytes) {}

  // Pushes a segment from now on. Round and segment stay at their addresses until the segment is done or clear().
  void start_segment(Round& round, Segment& segment, ChunkSender& sender);
  // Pushes the chunks that the window has room for and whose inputs are ready.
  void push_chunks(ChunkSender& sender);
  // If the link stalls, pushes one chunk of a starved round, one that has none under way; at each further stall, of
  // twice as many rounds. Called every few tens of milliseconds.
  void feed_starved(Round::Time now, ChunkSender& sender);
  // The segment's next total is here; pushes the chunks that it makes room for.
  void finish_result(const Round& round, Segment& segment, const FrameHeader& header, Round::Time now,
                     ChunkSender& sender);
  // The round's segments are done on all links. Called before the round goes.
  void end_round(const Round& round);
  // Pushes nothing more of any segment.
  void clear() { queues_.clear(); }

 private:
  // The rounds of one group of workers. Each group has the whole window: one that waits for a late member must not hold
  // up those that do not.
  struct Queue {
    std::map<Round::Turn, std::pair<const Round*, Segment*>> unfinished;
    std::map<Round::Turn, std::pair<const Round*, Segment*>> ahead;  // done on this link, and not on another
    Round::Time last_result_at;  // the time of the latest total, or of the first start after the queue was empty
    size_t feed_limit = 1;       // the number of rounds to feed at the next stall
    bool is_held_back = false;   // no total of the first round has come for a while
  };

  void push_chunks(const Queue& queue, ChunkSender& sender);
  static void feed_starved(Queue& queue, Round::Time now, ChunkSender& sender);
  // All in bytes, headers included.
  [[nodiscard]] size_t limit_bytes(const Round& round, const Segment& segment) const;
  [[nodiscard]] size_t window_bytes(const Round& round, const Segment& segment) const;
  [[nodiscard]] size_t most_under_way(const Round& round, const Segment& segment, size_t window, size_t ahead) const;
  static size_t push_chunk(const Round& round, Segment& segment, ChunkSender& sender);

  const JobShape& job_;
  std::map<std::vector<uint32_t>, Queue> queues_;  // keyed by group; each queue has a round
  Window window_;
};

}  // namespace jaxhetero
