// The memory of messages: slots of one size, registered once with the endpoint that they belong to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/fabric/abi.h"

namespace jaxhetero {

// Before a message's bytes: session, number, and how many messages the sender has consumed. See FabricMessage.
inline constexpr size_t kPrefixBytes = 24;
// A chunk of the largest size that the plan chooses by itself, in a frame, behind a prefix. The prefix and a frame's
// header are a cache line together, so that the payload of the first frame starts at one.
inline constexpr size_t kSlotBytes = kPrefixBytes + 40 + (size_t{256} << 10);
// What each session adds to the slots that receive, and so how many messages may be under way to it.
inline constexpr size_t kSlotsPerSession = 8;

class SlotBlock;

// Bytes that a message sends from where they lie. `owner` keeps them unchanged until the send is complete.
struct InPlace {
  std::span<const std::byte> bytes;
  void* descriptor = nullptr;
  std::shared_ptr<const void> owner;
};

// One operation at a time has a slot. The provider returns its address when the operation is complete.
struct FabricSlot {
  fi::OperationMemory operation;  // the first field: its address is that of the slot
  std::span<std::byte> bytes;
  SlotBlock* block = nullptr;  // whose memory it is
  void* descriptor = nullptr;
  bool receives = false;
  // Of a message under way: whose it is, and its last bytes where those are sent from where they lie.
  uint64_t session = 0;
  uint64_t number = 0;
  InPlace in_place;
};

// Memory for kSlotsPerSession slots. It outlives its registration: who reads a message in place may keep it for longer
// than the endpoint lives.
class SlotBlock : public std::enable_shared_from_this<SlotBlock> {
 public:
  static Result<std::shared_ptr<SlotBlock>> create();
  ~SlotBlock();
  SlotBlock(const SlotBlock&) = delete;
  SlotBlock& operator=(const SlotBlock&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }
  [[nodiscard]] std::span<FabricSlot> slots() { return slots_; }
  void set_descriptor(void* descriptor);

 private:
  explicit SlotBlock(std::span<std::byte> bytes);

  std::span<std::byte> bytes_;
  std::vector<FabricSlot> slots_;
};

}  // namespace jaxhetero
