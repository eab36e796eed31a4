#include "xla_ffi/wire/op_spec.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace jaxhetero {

Range overlap(const Range& range, const Range& other) {
  const uint64_t first = std::max(range.offset, other.offset);
  const uint64_t end = std::min(range.offset + range.count, other.offset + other.count);
  return first < end ? Range{first, end - first} : Range{range.offset, 0};
}

std::vector<Range> unwrapped(const Range& range, uint64_t count) {
  std::vector<Range> ranges;
  const uint64_t end = range.offset + range.count;
  if (range.offset < std::min(end, count)) ranges.push_back({range.offset, std::min(end, count) - range.offset});
  const uint64_t begin = std::max(range.offset, count);
  if (begin < end) ranges.push_back({begin - count, end - begin});
  return ranges;
}

Stake stake_of(const OpSpec& spec, uint32_t worker_count, uint32_t rank) {
  const Range nothing;
  const Range all{0, spec.total_count};
  const uint64_t row_count = spec.total_count / spec.member_count(worker_count);
  const Range row{spec.place_of(rank) * row_count, row_count};
  switch (spec.kind) {
    case Kind::kScatter:
      return {all, row, false};
    case Kind::kGather:
      return {row, all, true};
    case Kind::kBroadcast:
      return {spec.root == rank ? all : nothing, all, true};
    case Kind::kStore:
      return {spec.root == rank || spec.state.is_of_all ? all : nothing, nothing, false};
    case Kind::kLoad:
      return {nothing, all, false};
    case Kind::kMeasure:
      return {spec.state.resumes ? nothing : all, nothing, false};
    case Kind::kUpdate:
      return {spec.state.resumes ? nothing : all, all, false};
    default:
      return {all, all, false};
  }
}

namespace {

// Of what is about an optimizer's state.
Status check_state(const OpSpec& spec) {
  const StateUse& use = spec.state;
  if (!uses_state(spec.kind)) return use == StateUse() ? Status() : malformed("op: a state that it does not use");
  const bool is_float = spec.dtype == DType::kF32 || spec.dtype == DType::kBF16 || spec.dtype == DType::kF16;
  const bool moves = spec.kind == Kind::kStore || spec.kind == Kind::kLoad;
  const bool is_sane = use.number != 0 && use.slot < use.slot_count && use.slot_count <= kMaxStateSlots &&
                       (moves ? spec.dtype == DType::kF32 : is_float) &&
                       (use.weights == DType::kF32 || use.weights == DType::kBF16) &&
                       use.first <= std::numeric_limits<uint64_t>::max() / 16 && spec.group.empty() &&
                       !(moves && use.averages) && (spec.kind == Kind::kStore || !use.is_of_all) &&
                       (use.numbers == Numbers::kNone || (!moves && spec.dtype == DType::kF32));
  return is_sane ? Status() : malformed("op: impossible use of a state");
}

}  // namespace

Status check(const OpSpec& spec) {
  if (spec.kind < Kind::kSum || spec.kind > Kind::kMeanFloat8) return malformed("op: unknown kind");
  if (item_bytes(spec.dtype) == 0) return malformed("op: unknown dtype");
  if (is_mean(spec.kind) && spec.dtype != DType::kI8) return malformed("op: a mean of another dtype");
  if (spec.root >= kMaxWorkers) return malformed("op: impossible root");
  if (std::max(spec.total_count, spec.bucket_count) > std::numeric_limits<uint64_t>::max() / 16)
    return malformed("op: impossible total count");
  if (std::ranges::adjacent_find(spec.group, std::greater_equal()) != spec.group.end())
    return malformed("op: a group whose ranks are not in order");
  return check_state(spec);
}

Status check(const OpSpec& spec, uint32_t worker_count) {
  if (spec.root >= worker_count) return malformed("op: rank " + std::to_string(spec.root) + " as the root");
  if (!spec.group.empty() && spec.group.back() >= worker_count)
    return malformed("op: rank " + std::to_string(spec.group.back()) + " in the group");
  const bool has_root = spec.kind == Kind::kBroadcast || (spec.kind == Kind::kStore && !spec.state.is_of_all);
  if (has_root && !spec.has_member(spec.root)) return malformed("op: a root outside of " + describe_ranks(spec.group));
  const uint32_t row_count = spec.member_count(worker_count);
  if (has_rows(spec.kind) && spec.total_count % row_count != 0) {
    return malformed("op: " + std::to_string(spec.total_count) + " elements in " + std::to_string(row_count) + " rows");
  }
  return {};
}

std::string_view kind_name(Kind kind) {
  switch (kind) {
    case Kind::kSum:
      return "sum";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kMax:
      return "maximum";
    case Kind::kMin:
      return "minimum";
    case Kind::kScatter:
      return "scattered sum";
    case Kind::kGather:
      return "gather";
    case Kind::kStore:
      return "store";
    case Kind::kLoad:
      return "load";
    case Kind::kMeasure:
      return "measure";
    case Kind::kUpdate:
      return "update";
    case Kind::kMean8:
      return "mean";
    case Kind::kMean4:
      return "mean of pairs";
    case Kind::kMeanFloat8:
      return "mean of floats";
  }
  return "?";
}

std::string_view numbers_name(Numbers numbers) {
  switch (numbers) {
    case Numbers::kInt8:
      return "int8";
    case Numbers::kInt4:
      return "int4";
    case Numbers::kFloat8:
      return "float8_e4m3fn";
    case Numbers::kNone:
      return "float32";
  }
  return "?";
}

std::string describe_ranks(std::span<const uint32_t> ranks) {
  constexpr size_t kMostNamed = 16;
  std::string text = "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kMostNamed); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (ranks.size() > kMostNamed) text += " and " + std::to_string(ranks.size() - kMostNamed) + " more";
  return text;
}

std::string describe(const OpSpec& spec) {
  const uint64_t count = std::max(spec.bucket_count, spec.total_count);
  std::string text = std::string(kind_name(spec.kind)) + " of " + std::string(dtype_name(spec.dtype)) + "[" +
                     std::to_string(count) + "]";
  if (spec.leaf_count != 1) text += " in " + std::to_string(spec.leaf_count) + " leaves";
  if (spec.state.numbers != Numbers::kNone) text += " as " + std::string(numbers_name(spec.state.numbers));
  if (uses_state(spec.kind))
    text += " of slot " + std::to_string(spec.state.slot) + " of " + std::to_string(spec.state.slot_count);
  if (spec.kind == Kind::kBroadcast || spec.kind == Kind::kStore) text += " from rank " + std::to_string(spec.root);
  if (!spec.group.empty()) text += " over " + describe_ranks(spec.group);
  if (spec.call_bytes > count * item_bytes(spec.dtype)) {
    text += " in a call of " + std::to_string(spec.call_bytes) + " bytes";
  }
  return text;
}

}  // namespace jaxhetero
