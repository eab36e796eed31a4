#include "shared_channel.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "auth.h"

namespace jaxhetero {
namespace {

constexpr size_t kRingBytes = size_t{512} << 10;
constexpr size_t kLineBytes = 64;  // of a processor's cache
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

bool lower(std::atomic<uint32_t>& flag) { return flag != 0 && flag.exchange(0) != 0; }

Status system_error(const char* call) { return {Code::kInternal, std::string(call) + ": " + std::strerror(errno)}; }

}  // namespace

// Positions count bytes from the beginning. All of them, and the flags, are in one order that both sides see alike
// (std::memory_order_seq_cst): a side that raises its flag and then finds nothing is seen by a side that adds something
// and then looks for the flag.
struct SharedChannel::Ring {
  alignas(kLineBytes) std::atomic<uint64_t> written_bytes = 0;
  std::atomic<uint32_t> writer_sleeps = 0;
  alignas(kLineBytes) std::atomic<uint64_t> read_bytes = 0;
  std::atomic<uint32_t> reader_sleeps = 0;
  alignas(kLineBytes) std::array<std::byte, kRingBytes> bytes;

  static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

  // The part of the ring from a position on, as far as it is in one piece.
  [[nodiscard]] std::span<std::byte> from(uint64_t position) { return std::span(bytes).subspan(position % kRingBytes); }
};

struct SharedChannel::Layout {
  std::array<std::byte, kSharedKeyBytes> key;
  Ring from_maker;
  Ring to_maker;
};

SharedChannel::SharedChannel(Fd memory, Layout* layout, bool is_maker)
    : memory_(std::move(memory)),
      layout_(layout),
      out_(is_maker ? &layout->from_maker : &layout->to_maker),
      in_(is_maker ? &layout->to_maker : &layout->from_maker) {}

SharedChannel::~SharedChannel() { munmap(layout_, sizeof(Layout)); }

Result<std::unique_ptr<SharedChannel>> SharedChannel::create() {
  const std::optional<Nonce> key = fresh_nonce();
  if (!key.has_value()) return Status(Code::kInternal, "the system gives no random numbers");
  Fd memory(memfd_create("jaxhetero", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.valid()) return system_error("memfd_create");
  if (ftruncate(memory.get(), sizeof(Layout)) != 0) return system_error("ftruncate");
  // Memory that shrinks under a process kills it: so ours cannot, and open() takes none that could.
  if (fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0) return system_error("fcntl");
  void* address = mmap(nullptr, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, memory.get(), 0);
  if (address == MAP_FAILED) return system_error("mmap");
  auto* layout = ::new (address) Layout;
  std::ranges::copy(*key, layout->key.begin());
  std::unique_ptr<SharedChannel> channel(new SharedChannel(std::move(memory), layout, true));
  channel->offer_ = {static_cast<uint32_t>(getpid()), static_cast<uint32_t>(channel->memory_.get()), layout->key};
  return channel;
}

// The process and the descriptor are a word of the peer's. What is found there counts only if it is memory of the right
// kind and size with the right key: behind another list of processes, as a container has it, it is somebody else's.
Result<std::unique_ptr<SharedChannel>> SharedChannel::open(const SharedOffer& offer) {
  const std::string path = "/proc/" + std::to_string(offer.process) + "/fd/" + std::to_string(offer.descriptor);
  Fd memory(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!memory.valid()) return system_error("open");
  struct stat about{};
  if (fstat(memory.get(), &about) != 0) return system_error("fstat");
  const int seals = fcntl(memory.get(), F_GET_SEALS);  // only memory has any
  if (about.st_size != sizeof(Layout) || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Status(Code::kInvalidArgument, "the memory offered is not of the kind that can be shared");
  }
  void* address = mmap(nullptr, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, memory.get(), 0);
  if (address == MAP_FAILED) return system_error("mmap");
  std::unique_ptr<SharedChannel> channel(new SharedChannel(Fd(), static_cast<Layout*>(address), false));
  if (channel->layout_->key != offer.key) return Status(Code::kInvalidArgument, "the memory offered is another one's");
  channel->offer_ = offer;
  return channel;
}

Result<size_t> SharedChannel::write(std::span<const iovec> pieces) {
  const uint64_t unread = unread_bytes();
  if (unread > kRingBytes) return Status(Code::kProtocol, "it has read more of the shared memory than there was");
  size_t room = kRingBytes - unread;
  const uint64_t begin = written_bytes_;
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
  if (written_bytes_ != begin) out_->written_bytes = written_bytes_;
  return written_bytes_ - begin;
}

Result<size_t> SharedChannel::read(std::span<const iovec> pieces) {
  uint64_t left = in_->written_bytes - read_bytes_;
  if (left > kRingBytes) return Status(Code::kProtocol, "it has written more to the shared memory than there is room");
  const uint64_t begin = read_bytes_;
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
  if (read_bytes_ != begin) in_->read_bytes = read_bytes_;
  return read_bytes_ - begin;
}

bool SharedChannel::reader_slept() { return lower(out_->reader_sleeps); }

// Who waits for room is not woken for a little of it.
bool SharedChannel::writer_slept() {
  return in_->written_bytes - read_bytes_ <= kRingBytes / 2 && lower(in_->writer_sleeps);
}

bool SharedChannel::sleep_for_bytes() {
  in_->reader_sleeps = 1;
  if (in_->written_bytes == read_bytes_) return true;
  in_->reader_sleeps = 0;
  return false;
}

bool SharedChannel::sleep_for_room() {
  out_->writer_sleeps = 1;
  if (unread_bytes() >= kRingBytes) return true;
  out_->writer_sleeps = 0;
  return false;
}

uint64_t SharedChannel::unread_bytes() const { return written_bytes_ - out_->read_bytes; }

}  // namespace jaxhetero
