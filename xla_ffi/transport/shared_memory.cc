#include "xla_ffi/transport/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>

#include "xla_ffi/wire/auth.h"

namespace jaxhetero {
namespace {

constexpr size_t kHeadBytes = 4096;  // a page, which starts with the key
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

Status system_error(const char* call) { return {Code::kInternal, std::string(call) + ": " + std::strerror(errno)}; }

Result<std::span<std::byte>> map(int descriptor, size_t bytes, int protection, SharedMemory::Use use) {
  const int pages = use == SharedMemory::Use::kBothWrite ? MAP_POPULATE : MAP_NORESERVE;
  void* address = mmap(nullptr, bytes, protection, MAP_SHARED | pages, descriptor, 0);
  if (address == MAP_FAILED) return system_error("mmap");
  madvise(address, bytes, MADV_DONTFORK);  // a forked child would keep the pages when this process has gone
  return std::span(static_cast<std::byte*>(address), bytes);
}

}  // namespace

SharedMemory::~SharedMemory() {
  if (!mapped_.empty()) munmap(mapped_.data(), mapped_.size());
}

std::span<std::byte> SharedMemory::bytes() const { return mapped_.subspan(kHeadBytes); }

Result<SharedMemory> SharedMemory::create(size_t bytes, Use use) {
  const std::optional<Nonce> key = fresh_nonce();
  if (!key.has_value()) return Status(Code::kInternal, "the kernel gave no random numbers");
  Fd descriptor([] { return memfd_create("jaxhetero", MFD_CLOEXEC | MFD_ALLOW_SEALING); });
  if (!descriptor.valid()) return system_error("memfd_create");
  if (ftruncate(descriptor.get(), static_cast<off_t>(kHeadBytes + bytes)) != 0) return system_error("ftruncate");
  // If memory shrinks under a mapping, its reader is killed. So ours cannot shrink, and open() refuses memory that can.
  if (fcntl(descriptor.get(), F_ADD_SEALS, kSeals) != 0) return system_error("fcntl");
  Result<std::span<std::byte>> mapped = map(descriptor.get(), kHeadBytes + bytes, PROT_READ | PROT_WRITE, use);
  if (!mapped.ok()) return mapped.status();
  std::ranges::copy(*key, mapped->begin());
  const SharedOffer offer{static_cast<uint32_t>(getpid()), static_cast<uint32_t>(descriptor.get()), *key};
  return SharedMemory(std::move(descriptor), offer, *mapped);
}

// The process and descriptor of the offer are unchecked input. In another PID namespace, such as a container's, they
// can name another process's file. So the file must be memory, sealed, of the right size, and start with the key.
Result<SharedMemory> SharedMemory::open(const SharedOffer& offer, size_t bytes, Use use) {
  const bool writes = use == Use::kBothWrite;
  const std::string path = "/proc/" + std::to_string(offer.process) + "/fd/" + std::to_string(offer.descriptor);
  const Fd descriptor(
      [&] { return ::open(path.c_str(), (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); });
  if (!descriptor.valid()) return system_error("open");
  struct stat about{};
  if (fstat(descriptor.get(), &about) != 0) return system_error("fstat");
  const int seals = fcntl(descriptor.get(), F_GET_SEALS);  // fails for anything but a memfd
  if (about.st_size != static_cast<off_t>(kHeadBytes + bytes) || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Status(Code::kInvalidArgument, "the offered descriptor is not sealed memory of the expected size");
  }
  Result<std::span<std::byte>> mapped =
      map(descriptor.get(), kHeadBytes + bytes, PROT_READ | (writes ? PROT_WRITE : 0), use);
  if (!mapped.ok()) return mapped.status();
  SharedMemory memory(Fd(), offer, *mapped);
  if (!std::ranges::equal(offer.key, mapped->first(kSharedKeyBytes))) {
    return Status(Code::kInvalidArgument, "the offered memory has another key");
  }
  return memory;
}

}  // namespace jaxhetero
