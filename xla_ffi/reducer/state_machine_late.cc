// The part of the state machine that tells for whom its rounds wait.
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/reducer/state_machine.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/elastic_messages.h"

namespace jaxhetero {

std::vector<ProcessState::LateWorker> latest_first(const std::map<uint32_t, int64_t>& waited_ms) {
  std::vector<ProcessState::LateWorker> late;
  for (const auto& [rank, ms] : waited_ms) late.push_back({rank, static_cast<uint32_t>(ms)});
  std::ranges::stable_sort(late, std::greater(), &ProcessState::LateWorker::waited_ms);
  if (late.size() > kMaxLateWorkers) late.resize(kMaxLateWorkers);
  return late;
}

// The workers that the first open chunk waits for.
std::vector<uint32_t> ReducerStateMachine::missing_workers(const OpState& op) {
  std::vector<uint32_t> ranks;
  const std::vector<Piece>& pieces = op.open.front().pieces;
  for (uint32_t place = 0; place < pieces.size(); ++place) {
    if (!pieces[place].arrived) ranks.push_back(op.spec.rank_at(place));
  }
  return ranks;
}

void ReducerStateMachine::note_waiting(uint32_t rank, std::string round, int64_t now_ms) {
  waiting_[rank] = {std::move(round), now_ms};
}

void ReducerStateMachine::report_late(int64_t now_ms, int64_t patience_ms, std::vector<Outgoing>& outgoing,
                                      const std::vector<bool>& moving) const {
  if (!fault_.ok()) return;
  for (const auto& [op_id, op] : ops_) {
    report_holders(op_id, op, now_ms - patience_ms, outgoing);
    if (!op.is_late(now_ms, patience_ms)) continue;
    const std::string own_round = op_name(op_id, op) + " round " + std::to_string(op.round);
    std::string names;
    Late late{op_id, op.round};
    for (const uint32_t rank : missing_workers(op)) {
      names += (names.empty() ? "" : ", ") + worker_name(rank);
      const Waiting& waiting = waiting_[rank];
      if (const OpState* other = find_other_group(op, rank, now_ms, patience_ms); other != nullptr) {
        names += ", which waits in " + other->descriptions[rank]->text + " instead";
        late.disagree = true;
      } else if (!waiting.round.empty() && now_ms - waiting.told_ms < patience_ms && waiting.round != own_round) {
        names += ", which waits in " + waiting.round + " instead";
      }
      late.moving_count += rank < moving.size() && moving[rank] ? 1 : 0;
    }
    const auto text = std::make_shared<const Bytes>(encode(names));
    FrameHeader header = header_of(late);
    header.type = FrameType::kLate;
    header.payload_bytes = static_cast<uint32_t>(text->size());
    const std::vector<Piece>& pieces = op.open.front().pieces;
    for (uint32_t place = 0; place < pieces.size(); ++place) {
      if (!pieces[place].arrived) continue;
      if (!job_.members.empty()) tell_absent(op_id, op.round, op.spec.rank_at(place), missing_workers(op), outgoing);
      outgoing.push_back({op.spec.rank_at(place), header, text, *text});
    }
  }
}

// The machine-readable part of a kLate.
void ReducerStateMachine::tell_absent(uint64_t op_id, uint64_t round, uint32_t rank, std::vector<uint32_t> ranks,
                                      std::vector<Outgoing>& outgoing) {
  const auto payload = std::make_shared<const Bytes>(encode(Absent{std::move(ranks)}));
  FrameHeader header;
  header.type = FrameType::kAbsent;
  header.op = op_id;
  header.round = round;
  header.payload_bytes = static_cast<uint32_t>(payload->size());
  outgoing.push_back({rank, header, payload, *payload});
}

// Of a round that has ended, and that some members have held for so long while others do not.
void ReducerStateMachine::report_holders(uint64_t op_id, const OpState& op, int64_t since_ms,
                                         std::vector<Outgoing>& outgoing) const {
  if (op.holders.empty() || op.progress_ms > since_ms) return;
  std::vector<uint32_t> missing;
  for (uint32_t place = 0; place < op.holders.size(); ++place) {
    if (!op.holders[place]) missing.push_back(op.spec.rank_at(place));
  }
  for (uint32_t place = 0; place < op.holders.size(); ++place) {
    if (op.holders[place]) tell_absent(op_id, op.round - 1, op.spec.rank_at(place), missing, outgoing);
  }
}

// The op in which a worker waits that `op` waits for: the same call over another group, which some member of `op` has
// not come to either. Null if there is none.
const ReducerStateMachine::OpState* ReducerStateMachine::find_other_group(const OpState& op, uint32_t rank,
                                                                          int64_t now_ms, int64_t patience_ms) const {
  if (op.spec.site == 0 || op.descriptions[rank].has_value()) return nullptr;
  for (const auto& entry : ops_) {
    const OpState& other = entry.second;
    if (other.spec.site != op.spec.site || !other.is_late(now_ms, patience_ms)) continue;
    const auto waits_for = [&](uint32_t member) {
      return op.descriptions[member].has_value() && !other.descriptions[member].has_value();
    };
    if (other.descriptions[rank].has_value() && std::ranges::any_of(other.spec.group, waits_for)) return &other;
  }
  return nullptr;
}

std::vector<ProcessState::LateWorker> ReducerStateMachine::late_workers(int64_t now_ms) const {
  std::map<uint32_t, int64_t> waited_ms;  // keyed by rank
  for (const auto& [op_id, op] : ops_) {
    if (!op.running || op.open.empty()) continue;
    for (const uint32_t rank : missing_workers(op)) {
      waited_ms[rank] = std::max(waited_ms[rank], now_ms - op.progress_ms);
    }
  }
  return latest_first(waited_ms);
}

}  // namespace jaxhetero
