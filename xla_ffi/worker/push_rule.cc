#include "xla_ffi/worker/push_rule.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "xla_ffi/sum/reduce.h"

namespace jaxhetero {
namespace {

constexpr std::chrono::milliseconds kStall{20};
// The least window of a round that goes one way, as a measure or an update after one. Measured; see
// notebook/links.md.
constexpr size_t kLeastChunksOneWay = 8;

// Of every chunk but the shard's last one, header included.
size_t frame_bytes(const Round& round, const Segment& segment) {
  return kHeaderBytes + segment.items_per_chunk * item_bytes(round.request.spec.dtype);
}

// Whether the segment has a next chunk and its inputs are ready.
bool can_push(const Round& round, const Segment& segment) {
  if (segment.all_pushed) return false;
  const ByteRange part = round.pushed(segment.next_chunk());
  return round.request.sliced.is_ready(part.offset, part.bytes);
}

bool sends(const Round& round) { return round.request.stake.operands.count > 0; }

bool receives(const Round& round) { return round.request.stake.results.count > 0; }

// How far the segment is ahead of the round's slowest one, where all should end at the same time. most_under_way() lets
// no segment get further ahead than a window. Otherwise links that share an interface would run at one rate; where
// shards are of unequal size, the small ones would be done early, and for the rest of the round only the interfaces of
// the reducers with large shards would have work.
size_t lead_bytes(const Round& round, const Segment& segment) {
  if (round.request.plan || round.is_measured) return 0;
  const double lead = (segment.done_part() - round.slowest_part) * static_cast<double>(segment.shard.count);
  return static_cast<size_t>(std::round(lead / static_cast<double>(segment.items_per_chunk))) *
         frame_bytes(round, segment);
}

// What is under way on a link, each way. A round that contributes nothing, as an update after a measure, takes no room
// from those that do; nor does a round that nothing comes back of.
class UnderWay {
 public:
  void add(const Round& round, size_t bytes) {
    if (sends(round)) out_bytes_ += bytes;
    if (receives(round)) in_bytes_ += bytes;
  }
  // Where this round's chunks have to find room.
  [[nodiscard]] size_t bytes(const Round& round) const {
    return std::max(sends(round) ? out_bytes_ : 0, receives(round) ? in_bytes_ : 0);
  }
  [[nodiscard]] bool fills(size_t room_bytes) const { return std::min(out_bytes_, in_bytes_) >= room_bytes; }

 private:
  size_t out_bytes_ = 0;
  size_t in_bytes_ = 0;
};

}  // namespace

void PushRule::start_segment(Round& round, Segment& segment, ChunkSender& sender) {
  if (queues_.empty()) window_.restart(2 * frame_bytes(round, segment), round.times.started_at);
  Queue& queue = queues_[round.request.spec.group];
  if (queue.unfinished.empty()) queue.last_result_at = round.times.started_at;
  queue.unfinished.emplace(round.turn(), std::pair(&round, &segment));
  push_chunks(queue, sender);
}

void PushRule::push_chunks(ChunkSender& sender) {
  for (const auto& [group, queue] : queues_) push_chunks(queue, sender);
}

// Fills the window, round by round. A round counts the bytes under way of itself and of earlier turns only: later
// rounds, which other workers may not have reached, cannot hold it up. It also counts what this link is ahead in
// earlier rounds of unequal shards that are done here: else the links with small shards would run through all rounds
// that have begun, and at the end only those with large ones would have work. While the others hold the first round
// back, one that was fed, and of which a total has come, is what they are at: it counts its own bytes only.
void PushRule::push_chunks(const Queue& queue, ChunkSender& sender) {
  UnderWay under_way;
  size_t done_bytes = 0;  // what this link is ahead in earlier rounds that are done here
  auto done = queue.ahead.begin();
  for (const auto& [turn, entry] : queue.unfinished) {
    const auto [round, segment] = entry;
    for (; done != queue.ahead.end() && done->first < turn; ++done) {
      const auto [round, segment] = done->second;
      if (round->is_uneven) done_bytes += lead_bytes(*round, *segment);
    }
    under_way.add(*round, segment->in_flight_bytes);
    const size_t window = window_bytes(*round, *segment);
    const bool is_wanted = queue.is_held_back && segment->was_fed && segment->next_result > segment->shard.offset;
    const size_t ahead_bytes = lead_bytes(*round, *segment) + (is_wanted ? 0 : done_bytes);
    const size_t room_bytes = most_under_way(*round, *segment, window, ahead_bytes);
    const auto has_room = [&, round = round, segment = segment] {
      const size_t before_bytes = is_wanted ? 0 : under_way.bytes(*round);
      return std::max(before_bytes, segment->in_flight_bytes) < room_bytes;
    };
    while (can_push(*round, *segment) && has_room()) {
      under_way.add(*round, push_chunk(*round, *segment, sender));
    }
    if (under_way.fills(window) && !queue.is_held_back) return;
  }
}

// Where workers start rounds in orders that turns cannot settle, each could fill its windows with chunks of rounds that
// the others hold back, for ever. A worker does not know which round the others want, so it tries more and more of them
// for as long as no total comes.
void PushRule::feed_starved(Round::Time now, ChunkSender& sender) {
  for (auto& [group, queue] : queues_) feed_starved(queue, now, sender);
}

void PushRule::feed_starved(Queue& queue, Round::Time now, ChunkSender& sender) {
  if (queue.unfinished.size() < 2) return;
  queue.is_held_back = now - queue.unfinished.begin()->second.first->times.progress_at >= kStall;
  if (now - queue.last_result_at < kStall) return;
  size_t left = std::exchange(queue.feed_limit, std::min(2 * queue.feed_limit, queue.unfinished.size()));
  for (const auto& [turn, entry] : queue.unfinished) {
    const auto [round, segment] = entry;
    if (!segment->in_flight.empty() || !can_push(*round, *segment)) continue;
    if (left-- == 0) return;
    segment->was_fed = true;
    push_chunk(*round, *segment, sender);
  }
}

void PushRule::end_round(const Round& round) {
  const auto found = queues_.find(round.request.spec.group);
  if (found != queues_.end()) found->second.ahead.erase(round.turn());
}

// What a reducer holds of a worker.
size_t PushRule::limit_bytes(const Round& round, const Segment& segment) const {
  const size_t frame = frame_bytes(round, segment);
  return most_chunks_under_way(job_, frame - kHeaderBytes) * frame;
}

size_t PushRule::window_bytes(const Round& round, const Segment& segment) const {
  const size_t limit = limit_bytes(round, segment);
  if (job_.window_chunks > 0) return limit;
  const size_t frame = frame_bytes(round, segment);
  const bool both_ways = sends(round) && receives(round);
  const size_t least = std::max(round.least_window_bytes, both_ways ? 0 : kLeastChunksOneWay * frame);
  return std::clamp(window_.bytes(least), 2 * frame, limit);
}

// What a link may have under way: a window, or less of it where it is ahead. Its lead and what it has under way are two
// windows together at most, and a window and a quarter where shards are of unequal size. There the link that the others
// wait for has half a window more, as soon as its window has opened so far: its chunks wait behind theirs at the
// interface that all share. Measured; see notebook/links.md.
size_t PushRule::most_under_way(const Round& round, const Segment& segment, size_t window, size_t ahead) const {
  if (round.is_uneven && ahead == 0) {
    const size_t more = std::min({window + window / 2, window_.opened_bytes(), limit_bytes(round, segment)});
    return std::max(window, more);
  }
  const size_t most = round.is_uneven ? window + window / 4 : 2 * window;
  return std::min(window, most - std::min(most, ahead));
}

// Returns the chunk's bytes, header included.
size_t PushRule::push_chunk(const Round& round, Segment& segment, ChunkSender& sender) {
  const Range chunk = segment.next_chunk();
  segment.next_push += chunk.count;
  segment.all_pushed = segment.next_push == segment.end();
  FrameHeader header;
  header.type = FrameType::kPush;
  header.op = round.request.op;
  header.round = round.number;
  header.offset = chunk.offset;
  header.count = static_cast<uint32_t>(chunk.count);
  header.last = segment.all_pushed;
  header.payload_bytes = static_cast<uint32_t>(round.pushed(chunk).bytes);
  const ChunkSender::Sent sent = sender.send_chunk(round, header);
  const auto bytes = static_cast<uint32_t>(kHeaderBytes + chunk.count * item_bytes(round.request.spec.dtype));
  segment.in_flight.push_back({sent.frame, bytes, sent.at});
  segment.in_flight_bytes += bytes;
  return bytes;
}

void PushRule::finish_result(const Round& round, Segment& segment, const FrameHeader& header, Round::Time now,
                             ChunkSender& sender) {
  const InFlightChunk pushed = segment.in_flight.front();
  segment.in_flight.pop_front();
  segment.in_flight_bytes -= pushed.bytes;
  segment.next_result += header.count;
  segment.done = header.last;
  window_.returned(pushed.pushed_at, pushed.bytes, now);
  const auto found = queues_.find(round.request.spec.group);
  Queue& queue = found->second;
  queue.last_result_at = now;
  queue.feed_limit = 1;
  if (queue.unfinished.begin()->second.first == &round) queue.is_held_back = false;
  if (segment.done) {
    queue.unfinished.erase(round.turn());
    queue.ahead.emplace(round.turn(), std::pair(&round, &segment));
  }
  if (queue.unfinished.empty()) {
    queues_.erase(found);
  } else {
    push_chunks(queue, sender);
  }
}

}  // namespace jaxhetero
