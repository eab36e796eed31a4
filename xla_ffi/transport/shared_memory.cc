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

constexpr size_t kHeadBytes = 4096;  // a page, which begins with the key
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

Status system_error(const char* call) { return {Code::kInternal, std::string(call) + ": " + std::strerror(errno)}; }

Result<std::span<std::byte>> map(int descriptor, size_t bytes, int protection, SharedMemory::Use use) {
  const int pages = use == SharedMemory::Use::kBothWrite ? MAP_POPULATE : MAP_NORESERVE;
  void* address = mmap(nullptr, bytes, protection, MAP_SHARED | pages, descriptor, 0);
  if (address == MAP_FAILED) return system_error("mmap");
  return std::span(static_cast<std::byte*>(address), bytes);
}

}  // namespace

SharedMemory::~SharedMemory() {
  if (!mapped_.empty()) munmap(mapped_.data(), mapped_.size());
}

std::span<std::byte> SharedMemory::bytes() const { return mapped_.subspan(kHeadBytes); }

Result<SharedMemory> SharedMemory::create(size_t bytes, Use use) {
  const std::optional<Nonce> key = fresh_nonce();
  if (!key.has_value()) return Status(Code::kInternal, "the system gives no random numbers");
  Fd descriptor(memfd_create("jaxhetero", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor.valid()) return system_error("memfd_create");
  if (ftruncate(descriptor.get(), static_cast<off_t>(kHeadBytes + bytes)) != 0) return system_error("ftruncate");
  // Memory that shrinks under a process kills it: so ours cannot, and open() takes none that could.
  if (fcntl(descriptor.get(), F_ADD_SEALS, kSeals) != 0) return system_error("fcntl");
  Result<std::span<std::byte>> mapped = map(descriptor.get(), kHeadBytes + bytes, PROT_READ | PROT_WRITE, use);
  if (!mapped.ok()) return mapped.status();
  std::ranges::copy(*key, mapped->begin());
  const SharedOffer offer{static_cast<uint32_t>(getpid()), static_cast<uint32_t>(descriptor.get()), *key};
  return SharedMemory(std::move(descriptor), offer, *mapped);
}

// The process and the descriptor are a word of the peer's. What is found there counts only if it is memory of the right
// kind and size with the right key: behind another list of processes, as a container has it, it is somebody else's.
Result<SharedMemory> SharedMemory::open(const SharedOffer& offer, size_t bytes, Use use) {
  const bool writes = use == Use::kBothWrite;
  const std::string path = "/proc/" + std::to_string(offer.process) + "/fd/" + std::to_string(offer.descriptor);
  const Fd descriptor(::open(path.c_str(), (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!descriptor.valid()) return system_error("open");
  struct stat about{};
  if (fstat(descriptor.get(), &about) != 0) return system_error("fstat");
  const int seals = fcntl(descriptor.get(), F_GET_SEALS);  // only memory has any
  if (about.st_size != static_cast<off_t>(kHeadBytes + bytes) || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Status(Code::kInvalidArgument, "the memory offered is not of the kind that can be shared");
  }
  Result<std::span<std::byte>> mapped =
      map(descriptor.get(), kHeadBytes + bytes, PROT_READ | (writes ? PROT_WRITE : 0), use);
  if (!mapped.ok()) return mapped.status();
  SharedMemory memory(Fd(), offer, *mapped);
  if (!std::ranges::equal(offer.key, mapped->first(kSharedKeyBytes))) {
    return Status(Code::kInvalidArgument, "the memory offered is another one's");
  }
  return memory;
}

}  // namespace jaxhetero
