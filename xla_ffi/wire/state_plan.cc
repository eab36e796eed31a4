#include "xla_ffi/wire/state_plan.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "xla_ffi/base/mix.h"
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

// Where a point of the ring is in a bucket. Beyond the whole, the bucket begins anew.
uint64_t element_at(uint64_t point, uint64_t count) {
  if (point >= kWhole) return count + (point == kWhole ? 0 : element_at(point - kWhole, count));
  const uint64_t element = (count >> 32) * point + ((count & (kWhole - 1)) * point >> 32);
  return element - element % kAlign;
}

Range between(uint64_t begin, uint64_t end, uint64_t count) {
  const uint64_t first = element_at(begin, count);
  return {first, element_at(end, count) - first};
}

// How far it is from one point of the ring to another.
uint64_t distance(uint64_t from, uint64_t to) { return (to - from) % kWhole; }

bool has(const StatePlan::Place& place, uint64_t point) { return distance(place.begin, point) < place.size(); }

void place_at(StatePlan::Place& place, uint64_t begin, uint64_t size) {
  place.begin = begin % kWhole;
  place.end = place.begin + size;
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
  Place& left = owners_[before(place)];
  Place& right = owners_[after(place)];
  if (owners_.size() == 2) {
    place_at(left, left.begin, kWhole);
  } else {
    const uint64_t rest = lost.end - lost.middle();
    left.end += lost.size() - rest;
    place_at(right, right.begin + kWhole - rest, right.size() + rest);
  }
  owners_.erase(owners_.begin() + static_cast<ptrdiff_t>(place));
  std::ranges::sort(owners_, {}, &Place::begin);
}

// Each candidate takes its part from the one or two owners that have it.
void StatePlan::promote() {
  for (Place& candidate : std::exchange(candidates_, {})) {
    for (Place& owner : owners_) {
      if (has(candidate, owner.begin)) {
        const uint64_t taken = candidate.size() - distance(candidate.begin, owner.begin);
        place_at(owner, owner.begin + taken, owner.size() - taken);
      } else if (has(owner, candidate.begin)) {
        owner.end = owner.begin + distance(owner.begin, candidate.begin);
      }
    }
    owners_.push_back(std::move(candidate));
  }
  std::ranges::sort(owners_, {}, &Place::begin);
}

// Each member that has joined and keeps nothing is to have a third of two neighbours, or half of an owner alone: of the
// largest ones, and no owner gives twice. Neither neighbour gets anything that it has not.
void StatePlan::nominate(std::span<const Member> members) {
  candidates_.clear();
  std::vector<bool> gives(owners_.size());
  for (const Member& member : members) {
    const auto is_member = [&](const Place& owner) { return owner.member.is(member); };
    if (member.since == 0 || std::ranges::any_of(owners_, is_member)) continue;
    std::optional<size_t> best;
    uint64_t most = 0;
    for (size_t place = 0; place < owners_.size(); ++place) {
      const size_t next = after(place);
      const uint64_t size = owners_[place].size() + (next == place ? 0 : owners_[next].size());
      if (gives[place] || gives[next] || size <= most) continue;
      best = place;
      most = size;
    }
    if (!best.has_value()) continue;
    const size_t next = after(*best);
    gives[*best] = gives[next] = true;
    const Place& left = owners_[*best];
    const uint64_t share = most / (next == *best ? 2 : 3);
    const uint64_t begin = left.begin + std::min(share, left.size());
    const uint64_t end = left.begin + std::max(2 * share, left.size());
    Place& candidate = candidates_.emplace_back(Place{member, 0, 0});
    place_at(candidate, begin, end - begin);
  }
  std::ranges::sort(candidates_, {}, &Place::begin);
}

std::vector<StateShare::Backup> StatePlan::backups(size_t place, uint64_t count) const {
  std::vector<StateShare::Backup> backups;
  const auto add = [&](const Place& keeper, uint64_t begin, uint64_t end) {
    if (begin >= end) return;
    for (const Range& part : unwrapped(between(begin, end, count), count)) {
      backups.push_back({keeper.member.number, part});
    }
  };
  const Place& owner = owners_[place];
  if (owners_.size() > 1) {
    add(owners_[before(place)], owner.begin, owner.middle());
    add(owners_[after(place)], owner.middle(), owner.end);
  }
  for (const Place& candidate : candidates_) {
    if (has(owner, candidate.begin)) {
      const uint64_t begin = owner.begin + distance(owner.begin, candidate.begin);
      add(candidate, begin, std::min(owner.end, begin + candidate.size()));
    } else if (has(candidate, owner.begin)) {
      const uint64_t size = candidate.size() - distance(candidate.begin, owner.begin);
      add(candidate, owner.begin, std::min(owner.end, owner.begin + size));
    }
  }
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
  // At a random point of the ring: whoever has that has the bucket, now and after every change.
  const uint64_t point = mix(number) >> 32;
  const auto has_point = [point](const Place& each) { return has(each, point); };
  const auto owner = std::ranges::find_if(owners_, has_point);
  const auto place = static_cast<size_t>(owner - owners_.begin());
  const bool is_left = distance(owner->begin, point) < owner->size() / 2;
  StateShare whole{owner->member.number, {0, count}, {}};
  if (owners_.size() > 1) {
    whole.backups.push_back({owners_[is_left ? before(place) : after(place)].member.number, {0, count}});
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
  const auto is_odd = [](const StatePlan::Place& place) {
    return place.begin >= kWhole || place.end < place.begin || place.size() > kWhole;
  };
  if (std::ranges::any_of(plan.owners_, is_odd) || std::ranges::any_of(plan.candidates_, is_odd)) {
    return malformed("plan of states");
  }
  for (size_t place = 0; place < plan.owners_.size(); ++place) {
    const bool is_last = place + 1 == plan.owners_.size();
    const uint64_t next = is_last ? plan.owners_.front().begin + kWhole : plan.owners_[place + 1].begin;
    if (plan.owners_[place].end != next) return malformed("plan of states");
  }
  return plan;
}

}  // namespace jaxhetero
