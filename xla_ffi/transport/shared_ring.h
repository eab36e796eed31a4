// Memory that the two processes of a connection share when they are on one host: a ring of bytes each way. Bytes in it
// take one copy in and one out, and neither side asks the kernel for anything unless the other one sleeps. The
// connection's socket stays to wake it, and to tell that a side is gone.
//
// The peer may write here what it likes at any time: its positions are checked, and bytes are copied before anybody
// looks at them.
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

class SharedRing {
 public:
  // The memory is made by one side, which tells the other where to find it.
  static Result<std::unique_ptr<SharedRing>> create();
  static Result<std::unique_ptr<SharedRing>> open(const SharedOffer& offer);

  [[nodiscard]] const SharedOffer& offer() const { return memory_.offer(); }
  // The peer has it open: nobody else shall.
  void close_descriptor() { memory_.close_descriptor(); }

  // As many bytes as there is room for, from the front of `pieces`.
  Result<size_t> write(std::span<const iovec> pieces);
  // As many as there are, up to what `pieces` take.
  Result<size_t> read(std::span<const iovec> pieces);
  // What was read is done with: its room is the peer's again.
  void release();
  // To be asked after write() and after release(): whether the peer sleeps for want of that, and shall be woken.
  [[nodiscard]] bool reader_slept();
  [[nodiscard]] bool writer_slept();

  // We are about to sleep until there is something to read, or room to write. False: there is by now.
  [[nodiscard]] bool sleep_for_bytes();
  [[nodiscard]] bool sleep_for_room();

  // Of all that was written, what the peer is not done with.
  [[nodiscard]] uint64_t unread_bytes() const;
  [[nodiscard]] uint64_t written_bytes() const { return written_bytes_; }

 private:
  struct Ring;
  struct Layout;

  SharedRing(SharedMemory memory, Layout& layout, bool is_maker);

  SharedMemory memory_;
  Ring* out_;
  Ring* in_;
  // Our own positions: what the memory says of them is for the peer.
  uint64_t written_bytes_ = 0;
  uint64_t read_bytes_ = 0;
};

}  // namespace jaxhetero
