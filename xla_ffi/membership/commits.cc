#include "xla_ffi/membership/commits.h"

#include <algorithm>
#include <optional>
#include <string>

namespace jaxhetero {
namespace {

// How far the survivors in an op's group are.
struct OpProgress {
  const Report::Op* furthest = nullptr;
  uint64_t least = 0;
  uint32_t holder_count = 0;  // that hold the next round of the least, or have been given it
};

OpProgress progress_of(const std::vector<const Report::Op*>& reported, uint32_t member_count) {
  OpProgress progress;
  const auto given_count = [](const Report::Op* op) { return op->given_count; };
  progress.furthest = std::ranges::max(reported, {}, given_count);
  // A member that does not know the op has been given nothing of it.
  if (reported.size() == member_count) progress.least = given_count(std::ranges::min(reported, {}, given_count));
  for (const Report::Op* op : reported) {
    if (op->given_count > progress.least || op->holds) ++progress.holder_count;
  }
  return progress;
}

uint32_t member_count(const std::vector<uint32_t>& group, const std::map<uint32_t, Report>& reports) {
  if (group.empty()) return static_cast<uint32_t>(reports.size());
  return static_cast<uint32_t>(std::ranges::count_if(group, [&](uint32_t rank) { return reports.contains(rank); }));
}

Result<std::optional<View::Commit>> decide(uint64_t op, const std::vector<const Report::Op*>& reported,
                                           uint32_t members) {
  const auto [furthest, least, holder_count] = progress_of(reported, members);
  const bool is_given = furthest->given_count > least;
  const std::string name = "round " + std::to_string(least) + " of op " + std::to_string(op);
  if (furthest->given_count > least + 1) {
    return Status(Code::kInternal, "a member was given a later round, and another one not " + name);
  }
  if (is_given && furthest->is_small) return std::optional(View::Commit{op, least, furthest->total});
  if (holder_count == members) return std::optional(View::Commit{op, least, {}});
  if (is_given) return Status(Code::kInternal, "a member was given what another one does not hold: " + name);
  return std::optional<View::Commit>();
}

}  // namespace

Result<std::vector<View::Commit>> decide_commits(const std::map<uint32_t, Report>& reports_by_rank) {
  std::map<uint64_t, std::vector<const Report::Op*>> reported;
  for (const auto& [rank, report] : reports_by_rank) {
    for (const Report::Op& op : report.ops) reported[op.op].push_back(&op);
  }
  std::vector<View::Commit> commits;
  for (const auto& [op, of_members] : reported) {
    Result<std::optional<View::Commit>> commit =
        decide(op, of_members, member_count(of_members.front()->group, reports_by_rank));
    if (!commit.ok()) return commit.status();
    if (commit->has_value()) commits.push_back(**commit);
  }
  return commits;
}

}  // namespace jaxhetero
