#include "xla_ffi/transport/shared_ring.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <new>
#include <utility>

namespace jaxhetero {
namespace {

constexpr size_t kRingBytes = size_t{512} << 10;
constexpr size_t kLineBytes = 64;  // a cache line

bool lower(std::atomic<uint32_t>& flag) { return flag != 0 && flag.exchange(0) != 0; }

}  // namespace

// Positions count bytes since the ring was made. Positions and flags use sequentially consistent atomics. So no wake-up
// is lost: if a side sets its flag and then finds nothing, the other side, which first adds bytes or room and then
// looks at the flag, sees it set.
struct SharedRing::Ring {
  alignas(kLineBytes) std::atomic<uint64_t> written_bytes = 0;
  std::atomic<uint32_t> writer_sleeps = 0;
  alignas(kLineBytes) std::atomic<uint64_t> read_bytes = 0;
  std::atomic<uint32_t> reader_sleeps = 0;
  alignas(kLineBytes) std::array<std::byte, kRingBytes> bytes;

  static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

  // The memory from a position to the end of the ring.
  [[nodiscard]] std::span<std::byte> from(uint64_t position) { return std::span(bytes).subspan(position % kRingBytes); }
};

struct SharedRing::Layout {
  Ring from_maker;
  Ring to_maker;
};

SharedRing::SharedRing(SharedMemory memory, Layout& layout, bool is_maker)
    : memory_(std::move(memory)),
      out_(is_maker ? &layout.from_maker : &layout.to_maker),
      in_(is_maker ? &layout.to_maker : &layout.from_maker) {}

Result<std::unique_ptr<SharedRing>> SharedRing::create() {
  Result<SharedMemory> memory = SharedMemory::create(sizeof(Layout), SharedMemory::Use::kBothWrite);
  if (!memory.ok()) return memory.status();
  Layout& layout = *::new (memory->bytes().data()) Layout;
  return std::unique_ptr<SharedRing>(new SharedRing(std::move(*memory), layout, true));
}

Result<std::unique_ptr<SharedRing>> SharedRing::open(const SharedOffer& offer) {
  Result<SharedMemory> memory = SharedMemory::open(offer, sizeof(Layout), SharedMemory::Use::kBothWrite);
  if (!memory.ok()) return memory.status();
  Layout& layout = *reinterpret_cast<Layout*>(memory->bytes().data());
  return std::unique_ptr<SharedRing>(new SharedRing(std::move(*memory), layout, false));
}

Result<size_t> SharedRing::write(std::span<const iovec> pieces) {
  const uint64_t unread = unread_bytes();
  if (unread > kRingBytes)
    return Status(Code::kProtocol, "it claims to have read more bytes of the shared memory than we wrote");
  size_t room = kRingBytes - unread;
  const uint64_t before = written_bytes_;
  for (const iovec& piece : pieces) {
    const size_t wanted = std::min(room, piece.iov_len);
    for (size_t done = 0; done < wanted;) {
      const auto to = out_->from(written_bytes_);
      const size_t part = std::min(wanted - done, to.size());
      std::memcpy(to.data(), static_cast<const std::byte*>(piece.iov_base) + done, part);
      done += part;
      written_bytes_ += part;
    }
    room -= wanted;
    if (room == 0) break;
  }
  if (written_bytes_ != before) out_->written_bytes = written_bytes_;
  return written_bytes_ - before;
}

Result<size_t> SharedRing::read(std::span<const iovec> pieces) {
  uint64_t left = in_->written_bytes - read_bytes_;
  if (left > kRingBytes)
    return Status(Code::kProtocol, "it claims to have written more bytes than the shared memory holds");
  const uint64_t before = read_bytes_;
  for (const iovec& piece : pieces) {
    const size_t wanted = std::min<uint64_t>(left, piece.iov_len);
    for (size_t done = 0; done < wanted;) {
      const auto from = in_->from(read_bytes_);
      const size_t part = std::min(wanted - done, from.size());
      std::memcpy(static_cast<std::byte*>(piece.iov_base) + done, from.data(), part);
      done += part;
      read_bytes_ += part;
    }
    left -= wanted;
    if (left == 0) break;
  }
  return read_bytes_ - before;
}

void SharedRing::release() { in_->read_bytes = read_bytes_; }

bool SharedRing::reader_slept() { return lower(out_->reader_sleeps); }

// A sleeping writer is woken only once half the ring is free.
bool SharedRing::writer_slept() {
  return in_->written_bytes - read_bytes_ <= kRingBytes / 2 && lower(in_->writer_sleeps);
}

bool SharedRing::sleep_for_bytes() {
  in_->reader_sleeps = 1;
  if (in_->written_bytes == read_bytes_) return true;
  in_->reader_sleeps = 0;
  return false;
}

bool SharedRing::sleep_for_room() {
  out_->writer_sleeps = 1;
  if (unread_bytes() >= kRingBytes) return true;
  out_->writer_sleeps = 0;
  return false;
}

uint64_t SharedRing::unread_bytes() const { return written_bytes_ - out_->read_bytes; }

}  // namespace jaxhetero
