// Which reducer keeps which part of every bucket of an optimizer's state, and which others back it up.
//
// Shares lie in a ring, and the two neighbours of a share back up its halves. So when a reducer is lost, its neighbours
// have its share at once, and every reducer still has one part. All first halves are computed at one time, and all
// second halves: at any time every reducer backs up one share. A reducer that joins is a candidate at first: it backs
// up what it is to have, between two owners. Once it has all of that, the next view makes it an owner.
//
// A value. All workers go through the same views, and so come to the same plan, which they tell the reducers.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {

// What one reducer has of a bucket.
struct StateShare {
  struct Backup {
    uint32_t reducer = 0;  // the reducer's number
    Range part;
  };

  uint32_t reducer = 0;         // the reducer's number
  Range part;                   // a part that may go on at the bucket's beginning: see unwrapped()
  std::vector<Backup> backups;  // their parts may overlap, and do not wrap
};

class StatePlan {
 public:
  // A reducer of a view.
  struct Member {
    uint32_t number = 0;
    uint32_t since = 0;  // the view in which it came: a number may be another reducer's later
    std::string address;
    uint16_t port = 0;
    uint32_t share = 0;  // relative to those of the others; only at the start

    [[nodiscard]] bool is(const Member& other) const { return number == other.number && since == other.since; }
    bool operator==(const Member&) const = default;
  };
  // A member, and the part of every bucket that it has or is to have, in units of 2^-32 of the ring.
  struct Place {
    Member member;
    uint64_t begin = 0;
    uint64_t end = 0;  // beyond the whole where the part goes on at the beginning

    [[nodiscard]] uint64_t size() const { return end - begin; }
    [[nodiscard]] uint64_t middle() const { return begin + size() / 2; }
    bool operator==(const Place&) const = default;
  };

  StatePlan() = default;
  // In the first view.
  explicit StatePlan(std::span<const Member> members);

  // Another view starts. `settled`: the candidates have what they are to have.
  void enter(std::span<const Member> members, bool settled);

  // The shares of a bucket of so many elements; `number` is that of its state. They cover it without overlap, in the
  // order of the ring. A small bucket has one.
  [[nodiscard]] std::vector<StateShare> cut(uint64_t number, uint64_t count) const;
  // Where a reducer of the plan is; null if it is not in it.
  [[nodiscard]] const Member* find(uint32_t number) const;

  [[nodiscard]] const std::vector<Place>& owners() const { return owners_; }
  [[nodiscard]] const std::vector<Place>& candidates() const { return candidates_; }
  bool operator==(const StatePlan&) const = default;

 private:
  friend Bytes encode(const StatePlan& plan);
  friend Result<StatePlan> decode_state_plan(std::span<const std::byte> bytes);

  [[nodiscard]] size_t before(size_t place) const { return (place + owners_.size() - 1) % owners_.size(); }
  [[nodiscard]] size_t after(size_t place) const { return (place + 1) % owners_.size(); }
  void leave(size_t place);
  void promote();
  void start_anew(std::span<const Member> members);
  void nominate(std::span<const Member> members);
  [[nodiscard]] std::vector<StateShare::Backup> backups(size_t place, uint64_t count) const;

  std::vector<Place> owners_;      // the members that have something, in the order of the ring
  std::vector<Place> candidates_;  // the members that are to have something, in the order of the ring
};

Bytes encode(const StatePlan& plan);
Result<StatePlan> decode_state_plan(std::span<const std::byte> bytes);

}  // namespace jaxhetero
