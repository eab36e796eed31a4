// Two rings of bytes, one each way, in memory that the two processes of a connection share. Each byte is copied in and
// copied out. There is no system call unless the peer sleeps: then the connection's socket wakes it.
//
// The peer can write anything to this memory at any time. So its positions are checked, and bytes are copied out before
// they are interpreted.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "xla_ffi/base/status.h"
#include "xla_ffi/transport/shared_memory.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

// Used by a SharedSession on the loop's thread. Nothing here blocks.
class SharedRing {
 public:
  // One side creates the memory and sends its offer(); the other side opens it.
  static Result<std::unique_ptr<SharedRing>> create();
  static Result<std::unique_ptr<SharedRing>> open(const SharedOffer& offer);

  [[nodiscard]] const SharedOffer& offer() const { return memory_.offer(); }
  // The peer has opened the memory: from now on nobody else can.
  void close_descriptor() { memory_.close_descriptor(); }

  // Copies bytes from the front of `pieces`, as many as there is room for, and returns how many.
  Result<size_t> write(std::span<const iovec> pieces);
  // Copies as many bytes into `pieces` as there are, or as fit, and returns how many.
  Result<size_t> read(std::span<const iovec> pieces);
  // Gives the room of the bytes that were read back to the peer.
  void release();
  // After write(), or after release(): whether the peer slept until then, and must be woken. Clears its flag.
  [[nodiscard]] bool reader_slept();
  [[nodiscard]] bool writer_slept();

  // Before we sleep until there are bytes to read, or room to write: sets our flag. False if there are some by now.
  [[nodiscard]] bool sleep_for_bytes();
  [[nodiscard]] bool sleep_for_room();

  // Written bytes that the peer has not released.
  [[nodiscard]] uint64_t unread_bytes() const;
  [[nodiscard]] uint64_t written_bytes() const { return written_bytes_; }

 private:
  struct Ring;
  struct Layout;

  SharedRing(SharedMemory memory, Layout& layout, bool is_maker);

  SharedMemory memory_;
  Ring* out_;
  Ring* in_;
  // Our own positions. Their copies in the memory are for the peer, and never read back.
  uint64_t written_bytes_ = 0;
  uint64_t read_bytes_ = 0;
};

}  // namespace jaxhetero
