// What all TCP connections of one event loop share: settings, counters, and the memory that they lend.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/counters.h"
#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/fabric/choice.h"
#include "xla_ffi/fabric/endpoint.h"
#include "xla_ffi/transport/cipher.h"
#include "xla_ffi/transport/lent_memory.h"
#include "xla_ffi/transport/tcp_address.h"
#include "xla_ffi/wire/codec.h"

namespace jaxhetero {

class TcpConnection;

// Outlives its connections. Owned by the loop's thread; only `counters` may be read on others.
struct TcpContext {
  TcpContext(EventLoop& loop, Bytes token, bool checksums = false)
      : loop(loop), token(std::move(token)), checksums(checksums) {}
  // A copy would end the lent_memory that it shares with the original.
  TcpContext(const TcpContext&) = delete;
  TcpContext& operator=(const TcpContext&) = delete;
  ~TcpContext() { lent_memory->end(); }

  EventLoop& loop;
  Bytes token;
  // Send a checksum with every frame, and refuse chunks that come without one.
  bool checksums;
  // The address of the local interface that outgoing connections bind to. Without one, the routing table decides.
  std::optional<TcpAddress> source = std::nullopt;
  // Of the processes that connections are made to: which of their strands takes them.
  uint16_t strand = 0;
  std::shared_ptr<Counters> counters = std::make_shared<Counters>();
  // What encrypts all that goes over sockets; null where nothing does.
  std::shared_ptr<const CryptoLibrary> crypto = nullptr;
  // Whether connections to peers on this host move to shared memory.
  bool shares_memory = true;
  // The fabric that connections move to else, or may; none without it.
  std::shared_ptr<FabricChoice> fabric = nullptr;
  // How long the messages of a peer that has ended in order may still be under way there: as long as the job waits.
  std::chrono::milliseconds message_patience{2000};
  // The endpoint of the connections that have moved there. The last one closes it.
  std::weak_ptr<FabricEndpoint> endpoint = {};
  // Where a fabric sends from in place: frames with an owner, which keeps their payload unchanged.
  LongLivedByStart long_lived = {};
  // Whether frames of lent memory have one. That memory then takes what it once took for good.
  bool owns_lent_frames = false;
  // Connections that this side has begun and that are not open yet. Nobody waits long for a handshake, and the loop
  // does nothing else while it opens an endpoint: connections offer theirs when no other begins.
  size_t connecting_count = 0;
  std::vector<std::weak_ptr<TcpConnection>> offering = {};
  // Whether payloads are lent to peers on this host. If not, they are copied through the ring.
  bool lends = true;
  // Payloads allocated here can be lent.
  std::shared_ptr<LentMemory> lent_memory = std::make_shared<LentMemory>();
  // Payloads that were lent, and not yet read, when their connection ended. A peer may still read them: they stay
  // until whoever owns the context knows better and clears this.
  std::vector<std::shared_ptr<const void>> unread = {};
};

}  // namespace jaxhetero
