#include "xla_ffi/wire/state_plan.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "xla_ffi/wire/job_shape.h"

namespace jaxhetero {

// Not in an unnamed namespace: Writer and Reader have to find it.
template <typename Codec, IsA<StatePlan::Place> Message>
void fields(Codec& codec, Message& place) {
  codec(place.member.number, place.member.since, place.member.address, place.member.port, place.begin, place.end);
}

namespace {

constexpr uint64_t kWhole = uint64_t{1} << 32;
constexpr uint64_t kAlign = 16;  // elements: a cache line of float32
// A bucket of fewer elements is kept by one reducer: every message has a cost. It depends on nothing that changes, or
// what is kept would have to move.
constexpr uint64_t kLeastCut = 16 << 10;

// Where a place in the whole is in a bucket.
uint64_t element_at(uint64_t place, uint64_t count) {
  if (place == kWhole) return count;
  const uint64_t element = (count >> 32) * place + ((count & (kWhole - 1)) * place >> 32);
  return element - element % kAlign;
}

Range between(uint64_t begin, uint64_t end, uint64_t count) {
  const uint64_t first = element_at(begin, count);
  return {first, element_at(std::max(begin, end), count) - first};
}

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
uint64_t spread(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace

StatePlan::StatePlan(std::span<const Member> members) {
  uint64_t whole = 0;
  for (const Member& member : members) whole += member.share;
  uint64_t before = 0;
  for (const Member& member : members) {
    const uint64_t after = before + member.share;
    if (member.share > 0) owners_.push_back({member, kWhole * before / whole, kWhole * after / whole});
    before = after;
  }
}

void StatePlan::enter(std::span<const Member> members, bool settled) {
  const auto is_there = [members](const Place& place) {
    return std::ranges::any_of(members, [&](const Member& member) { return member.is(place.member); });
  };
  std::erase_if(candidates_, [&](const Place& place) { return !is_there(place); });
  // After a loss, what a candidate is to have may not be what is left to it; it waits for the next time.
  if (settled && std::ranges::all_of(owners_, is_there)) promote();
  for (size_t place = 0; place < owners_.size();) {
    if (is_there(owners_[place])) {
      ++place;
    } else {
      leave(place);
    }
  }
  if (owners_.empty()) return start_anew(members);
  nominate(members);
}

// Whatever was kept is lost with those that had it. Other states can begin.
void StatePlan::start_anew(std::span<const Member> members) {
  std::vector<Member> equal(members.begin(), members.end());
  for (Member& member : equal) member.share = 1;
  *this = StatePlan(equal);
}

// The neighbours get what they back up.
void StatePlan::leave(size_t place) {
  const Place lost = owners_[place];
  owners_.erase(owners_.begin() + static_cast<ptrdiff_t>(place));
  const bool has_left = place > 0;
  const bool has_right = place < owners_.size();
  if (has_left) owners_[place - 1].end = has_right ? lost.middle() : lost.end;
  if (has_right) owners_[place].begin = has_left ? lost.middle() : lost.begin;
}

// Each candidate takes its part from the one or two owners that have it.
void StatePlan::promote() {
  for (Place& candidate : std::exchange(candidates_, {})) {
    const auto right =
        std::ranges::find_if(owners_, [&](const Place& owner) { return owner.begin >= candidate.begin; });
    if (right != owners_.end()) right->begin = std::max(right->begin, candidate.end);
    if (right != owners_.begin()) std::prev(right)->end = std::min(std::prev(right)->end, candidate.begin);
    owners_.insert(right, std::move(candidate));
  }
}

// Each member that has joined and keeps nothing is to have a third of two neighbours, or half of an owner alone: of the
// largest ones, and no owner gives twice. Neither neighbour gets anything that it has not.
void StatePlan::nominate(std::span<const Member> members) {
  candidates_.clear();
  std::vector<bool> gives(owners_.size());
  for (const Member& member : members) {
    const auto is_member = [&](const Place& owner) { return owner.member.is(member); };
    if (member.since == 0 || std::ranges::any_of(owners_, is_member)) continue;
    const size_t width = std::min<size_t>(owners_.size(), 2);
    std::optional<size_t> best;
    uint64_t most = 0;
    for (size_t place = 0; place + width <= owners_.size(); ++place) {
      const uint64_t size = owners_[place + width - 1].end - owners_[place].begin;
      if (gives[place] || gives[place + width - 1] || size <= most) continue;
      best = place;
      most = size;
    }
    if (!best.has_value() || width == 0) continue;
    gives[*best] = gives[*best + width - 1] = true;
    const uint64_t begin = owners_[*best].begin;
    const uint64_t border = owners_[*best].end;  // of the two, or the end of the owner alone
    const uint64_t share = most / (width + 1);
    candidates_.push_back({member, std::min(begin + share, border), std::max(begin + 2 * share, border)});
  }
  std::ranges::sort(candidates_, {}, &Place::begin);
}

std::vector<StateShare::Backup> StatePlan::backups(size_t place, uint64_t count) const {
  const Place& owner = owners_[place];
  const bool has_left = place > 0;
  const bool has_right = place + 1 < owners_.size();
  const uint64_t middle = !has_left ? owner.begin : !has_right ? owner.end : owner.middle();
  std::vector<StateShare::Backup> backups;
  if (has_left) backups.push_back({owners_[place - 1].member.number, between(owner.begin, middle, count)});
  if (has_right) backups.push_back({owners_[place + 1].member.number, between(middle, owner.end, count)});
  for (const Place& candidate : candidates_) {
    const uint64_t begin = std::max(owner.begin, candidate.begin);
    const uint64_t end = std::min(owner.end, candidate.end);
    if (begin < end) backups.push_back({candidate.member.number, between(begin, end, count)});
  }
  std::erase_if(backups, [](const StateShare::Backup& backup) { return backup.part.count == 0; });
  return backups;
}

std::vector<StateShare> StatePlan::cut(uint64_t number, uint64_t count) const {
  std::vector<StateShare> shares;
  if (owners_.empty()) return shares;
  if (count >= kLeastCut) {
    for (size_t place = 0; place < owners_.size(); ++place) {
      const Range part = between(owners_[place].begin, owners_[place].end, count);
      if (part.count > 0) shares.push_back({owners_[place].member.number, part, backups(place, count)});
    }
    return shares;
  }
  // At a random point of the whole: whoever has that has the bucket, now and after every change.
  const uint64_t point = spread(number) >> 32;
  const auto has_point = [point](const Place& each) { return each.begin <= point && point < each.end; };
  const auto owner = std::ranges::find_if(owners_, has_point);
  const auto place = static_cast<size_t>(owner - owners_.begin());
  const bool is_left = place > 0 && (place + 1 == owners_.size() || point < owner->middle());
  StateShare whole{owner->member.number, {0, count}, {}};
  if (owners_.size() > 1) {
    whole.backups.push_back({owners_[is_left ? place - 1 : place + 1].member.number, {0, count}});
  }
  for (const Place& candidate : candidates_) {
    if (has_point(candidate)) whole.backups.push_back({candidate.member.number, {0, count}});
  }
  return {whole};
}

const StatePlan::Member* StatePlan::find(uint32_t number) const {
  for (const auto* places : {&owners_, &candidates_}) {
    const auto found =
        std::ranges::find_if(*places, [number](const Place& each) { return each.member.number == number; });
    if (found != places->end()) return &found->member;
  }
  return nullptr;
}

Bytes encode(const StatePlan& plan) {
  Writer writer;
  writer.list(plan.owners_, kMaxReducers);
  writer.list(plan.candidates_, kMaxReducers);
  return writer.take();
}

Result<StatePlan> decode_state_plan(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  StatePlan plan;
  reader.list(plan.owners_, kMaxReducers);
  reader.list(plan.candidates_, kMaxReducers);
  if (!reader.finished()) return malformed("plan of states");
  uint64_t end = 0;
  for (const StatePlan::Place& owner : plan.owners_) {
    if (owner.begin != end || owner.end < owner.begin) return malformed("plan of states");
    end = owner.end;
  }
  const auto is_odd = [](const StatePlan::Place& place) { return place.begin > place.end || place.end > kWhole; };
  if ((!plan.owners_.empty() && end != kWhole) || std::ranges::any_of(plan.candidates_, is_odd)) {
    return malformed("plan of states");
  }
  return plan;
}

}  // namespace jaxhetero
