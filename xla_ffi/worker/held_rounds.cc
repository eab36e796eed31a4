#include "xla_ffi/worker/held_rounds.h"

#include <cstring>

#include "xla_ffi/base/buffers.h"

namespace jaxhetero {
namespace {

Bytes contents(const Leaves& leaves) {
  std::vector<iovec> pieces;
  leaves.slice(0, leaves.bytes(), pieces);
  Bytes bytes;
  for (const iovec& piece : pieces) {
    const std::span<const std::byte> part = bytes_of(piece);
    bytes.insert(bytes.end(), part.begin(), part.end());
  }
  return bytes;
}

}  // namespace

bool HeldRounds::hold(const Op& op) {
  Round& round = *op.running();
  const RoundRequest& request = round.request;
  if (is_given_at_once(request.spec)) {
    totals_[request.op] = contents(request.outputs);
    return true;
  }
  totals_.erase(request.op);
  round.is_held = true;
  ledger_.hold_part(*request.whole);
  return false;
}

bool HeldRounds::secure(Round& round) {
  round.is_safe = true;
  return ledger_.secure_part(*round.request.whole);
}

Op* HeldRounds::find(const WholeRound& whole) const {
  for (auto& [op_id, op] : schedule_.ops()) {
    if (op.running() != nullptr && op.running()->request.whole.get() == &whole) return &op;
  }
  return nullptr;
}

std::vector<Report::Op> HeldRounds::report() const {
  std::vector<Report::Op> ops;
  for (const auto& [op_id, op] : schedule_.ops()) {
    const Round* const running = op.running();
    const bool holds = running != nullptr && running->is_held && ledger_.is_held(*running->request.whole);
    Report::Op& report = ops.emplace_back(Report::Op{op_id, op.given_count(), holds});
    report.group = op.group();
    report.name = op.name();
    const auto total = totals_.find(op_id);
    report.is_small = total != totals_.end() && report.given_count > 0;
    if (report.is_small) report.total = total->second;
  }
  return ops;
}

Status HeldRounds::take(Op& op, const View::Commit& commit) {
  Round& round = *op.running();
  if (round.is_held) return {};
  const Leaves& outputs = round.request.outputs;
  if (!is_given_at_once(round.request.spec) || commit.total.size() != outputs.bytes()) {
    return {Code::kInternal, "the view has no total of " + round.name()};
  }
  pieces_.clear();
  outputs.slice(0, outputs.bytes(), pieces_);
  const std::byte* from = commit.total.data();
  for (const iovec& piece : pieces_) {
    std::memcpy(piece.iov_base, from, piece.iov_len);
    from += piece.iov_len;
  }
  round.request.sliced.revoke();
  round.request.sliced.report(0, round.request.stake.results.count * round.request.spec.result_item_bytes());
  totals_[round.request.op] = commit.total;
  round.times.progress_at = EventLoop::Clock::now();
  if (round.times.first_result_at == Round::Time()) round.times.first_result_at = round.times.progress_at;
  for (Segment& segment : round.segments) segment.done_at = round.times.progress_at;
  return {};
}

void HeldRounds::begin_anew() {
  for (auto& [op_id, op] : schedule_.ops()) {
    if (op.running() == nullptr) continue;
    Round& round = *op.running();
    ledger_.lose_hold(*round.request.whole, round.is_held, round.is_safe);
    round.request.sliced.revoke();
  }
  schedule_.stop_rounds();
}

}  // namespace jaxhetero
