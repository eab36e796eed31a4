// An endpoint of a fabric: it sends messages to peers and receives those of its sessions, in whatever order they
// complete. All sessions of an event loop share one.
//
// The fabric promises little. Anybody on the network can send to an endpoint, messages overtake each other, a send can
// find no room for as long as it takes, and the completion of an operation may be late or never come. So a message
// names its session by a random number that only the peer was told, over a connection that proved the job token; and
// memory stays with an operation until it is complete, or the endpoint closed.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/counters.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/fabric/abi.h"
#include "xla_ffi/fabric/library.h"
#include "xla_ffi/fabric/slots.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {

struct FabricMessage {
  uint64_t number = 0;    // in its session, from 1 on; 0 where only `consumed` counts
  uint64_t consumed = 0;  // how many messages of this side the peer has consumed
  // The bytes behind the prefix. The slot goes back to the endpoint when the pointer is dropped: on the loop's thread.
  std::shared_ptr<const std::byte> memory;
  size_t bytes = 0;
  FabricSlot* slot = nullptr;
};

// Who has a session is told of it through this.
class FabricListener {
 public:
  virtual ~FabricListener() = default;
  // Takes note only: on_progress() follows once all that is there was told.
  virtual void on_message(FabricMessage message) = 0;
  // The send of the session's message of this number is complete. Takes note only.
  virtual void on_sent(uint64_t number) = 0;
  // Messages have come, or there may be room to send. May close any session.
  virtual void on_progress() = 0;
  // No message passes any more. May close any session.
  virtual void on_broken(const Status& why) = 0;
};

// On the loop's thread. Nothing blocks but opening and closing, which take as long as the provider does.
class FabricEndpoint : public std::enable_shared_from_this<FabricEndpoint> {
 public:
  // At the address `source` of this host, if that is not empty and the provider has a device there; else at one of its
  // devices, which the endpoints of several strands take in turn. `loop` outlives the endpoint.
  static Result<std::shared_ptr<FabricEndpoint>> open(EventLoop& loop, std::shared_ptr<const FabricLibrary> library,
                                                      const std::string& provider, const std::string& source,
                                                      size_t strand, std::shared_ptr<Counters> counters);
  ~FabricEndpoint();
  FabricEndpoint(const FabricEndpoint&) = delete;
  FabricEndpoint& operator=(const FabricEndpoint&) = delete;

  [[nodiscard]] const std::string& provider() const { return provider_; }
  [[nodiscard]] const std::string& domain() const { return domain_name_; }
  // What a peer gives to add_peer().
  [[nodiscard]] const Bytes& name() const { return name_; }
  // How many messages there is memory for.
  [[nodiscard]] size_t slot_count() const { return blocks_.size() * kSlotsPerSession; }
  // Whether the event loop sleeps until a message comes. If not, it looks for them every millisecond.
  [[nodiscard]] bool has_descriptor() const { return descriptor_ >= 0; }

  // Receives the messages of a session from now on; returns its number. `listener` outlives the session.
  Result<uint64_t> open_session(FabricListener& listener);
  void close_session(uint64_t session);
  Result<fi::Address> add_peer(const Bytes& name);

  // Whoever has the message keeps it for long: another slot receives in place of its own.
  Status keep(const FabricMessage& message);

  // A slot to fill, kPrefixBytes and what follows them.
  Result<FabricSlot*> take_slot();
  void give_back(FabricSlot& slot);
  // Lets the message in `slot` end with `bytes`, which are sent from where they lie: in one of `homes`, whose keeper
  // the endpoint has from now on. `owner` keeps them unchanged. False: they are to be copied into the slot. An error,
  // which is reported once, says why all of them are.
  Result<bool> attach(FabricSlot& slot, std::span<const std::byte> bytes, std::shared_ptr<const void> owner,
                      const LongLivedByStart& homes);
  // Sends the first `bytes` of the slot, which belongs to the endpoint then, and what it has in place. False: there is
  // no room now. The slot stays the caller's, and the listener of `session` hears on_progress() when it is worth
  // another try.
  Result<bool> send(FabricSlot& slot, size_t bytes, fi::Address target, uint64_t session);

 private:
  struct Closer {
    template <typename Object>
    void operator()(Object* object) const {
      object->fid.ops->close(&object->fid);
    }
  };
  template <typename Object>
  using Owned = std::unique_ptr<Object, Closer>;

  FabricEndpoint(EventLoop& loop, std::shared_ptr<const FabricLibrary> library, std::shared_ptr<Counters> counters)
      : loop_(loop), library_(std::move(library)), counters_(std::move(counters)) {}

  Status open_device(fi::Info& info);
  Status open_queue();
  Status find_name();
  Status watch();
  Result<Owned<fi::MemoryRegion>> register_memory(std::span<const std::byte> memory);
  Status add_block();
  Result<void*> hold(const LongLived& window);

  bool poll();
  bool read_completions();
  Status read_error();
  void complete(FabricSlot& slot, size_t bytes);
  void complete_receive(FabricSlot& slot, size_t bytes);
  void give_up(FabricSlot& slot, int error);
  void receive();
  void tell();
  void break_all(const Status& why);
  bool may_sleep();
  void wake_after(std::chrono::milliseconds delay);

  EventLoop& loop_;
  const std::shared_ptr<const FabricLibrary> library_;
  const std::shared_ptr<Counters> counters_;
  FabricLibrary::Infos infos_;
  std::string provider_;
  std::string domain_name_;
  Bytes name_;
  bool registers_ = false;       // memory of operations must be registered
  bool sends_in_place_ = false;  // a message may have two pieces of memory
  uint64_t next_key_ = 1;
  int descriptor_ = -1;  // of the queue, which owns it

  std::vector<std::shared_ptr<SlotBlock>> blocks_;
  std::vector<FabricSlot*> free_slots_;
  std::vector<FabricSlot*> idle_receivers_;  // slots that are to receive and wait for room in the provider
  size_t surplus_count_ = 0;                 // of slots that receive for sessions that have closed

  std::unordered_map<uint64_t, FabricListener*> sessions_;
  std::map<Bytes, fi::Address> peers_;
  std::vector<uint64_t> touched_;                    // sessions that are to hear on_progress()
  std::vector<uint64_t> blocked_;                    // sessions whose latest send found no room
  std::vector<std::pair<uint64_t, Status>> broken_;  // sessions of which a message is lost
  size_t sending_count_ = 0;                         // sends that are not complete
  Status end_;                                       // why nothing passes any more
  EventLoop::PollerId poller_ = 0;
  EventLoop::TimerId timer_ = 0;
  EventLoop::Clock::time_point last_completion_;

  // The endpoint closes first, so that no operation touches memory any more; then what it used.
  Owned<fi::Fabric> fabric_;
  Owned<fi::Domain> domain_;
  Owned<fi::AddressVector> address_vector_;
  Owned<fi::CompletionQueue> queue_;
  std::vector<Owned<fi::MemoryRegion>> regions_;
  // Of long-lived memory, keyed by the first byte.
  struct Window {
    std::shared_ptr<const void> keeper;
    Owned<fi::MemoryRegion> region;  // null where nothing is registered
  };
  std::map<const std::byte*, Window> windows_;
  Owned<fi::Endpoint> endpoint_;
};

}  // namespace jaxhetero
