#include "lab/fake_fabric/fake_fabric.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "xla_ffi/fabric/abi.h"

namespace {

namespace fi = jaxhetero::fi;

constexpr size_t kMostPieces = 2;
constexpr size_t kMostMessageBytes = size_t{1} << 20;
constexpr size_t kMostUnderWay = 64;  // operations of an endpoint, each way
constexpr size_t kNameBytes = 16;
constexpr size_t kPartBytes = size_t{32} << 10;  // of a message, in a datagram
constexpr uint32_t kLateCalls = 12;              // a completion is held back for fewer looks at the queue than this
constexpr uint32_t kStormOdds = 64;              // one in so many calls begins a storm
constexpr uint32_t kLongestStorm = 24;           // calls
constexpr uintptr_t kMark = 0x6661627269630000;  // in the memory that operations give to the provider
constexpr std::array<const char*, 2> kDomains = {"fake0", "fake1"};

std::atomic<bool> is_full = false;
std::atomic<bool> is_scarce = false;
std::atomic<int64_t> calls_to_failure = 0;
std::atomic<int> failure = 0;
std::atomic<int64_t> lost_count = 0;
std::atomic<int64_t> open_count = 0;
std::atomic<uint64_t> next_seed = std::random_device()();

[[noreturn]] void refuse(const char* what) {
  std::fprintf(stderr, "fake_fabric: %s\n", what);
  std::abort();
}

using Name = std::array<std::byte, kNameBytes>;

sockaddr_un address_of(const Name& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, "fake_fabric/", 12);  // abstract: the first byte is 0
  std::memcpy(address.sun_path + 13, name.data(), name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 13 + name.size());
  return address;
}

// --- Objects. Each starts with what libfabric's header says.

struct Queue;
struct EndpointObject;

struct DomainObject : fi::Domain {
  std::map<const std::byte*, std::pair<size_t, fi::MemoryRegion*>> regions;  // keyed by their start
  int64_t child_count = 0;

  void check(const void* memory, size_t bytes, void* descriptor) const {
    auto region = regions.upper_bound(static_cast<const std::byte*>(memory));
    if (region == regions.begin()) refuse("an operation uses memory that is not registered");
    --region;
    const auto offset = static_cast<size_t>(static_cast<const std::byte*>(memory) - region->first);
    if (offset + bytes > region->second.first) refuse("an operation uses memory that is not registered");
    if (descriptor != region->second.second->descriptor) refuse("an operation has another region's descriptor");
  }
};

struct VectorObject : fi::AddressVector {
  DomainObject* domain;
  std::vector<Name> names;
};

struct RegionObject : fi::MemoryRegion {
  DomainObject* domain;
  const std::byte* memory;
};

struct Queue : fi::CompletionQueue {
  DomainObject* domain;
  EndpointObject* endpoint = nullptr;
  struct Held {
    fi::Completion completion;
    int error;
    uint32_t calls_left;
  };
  std::vector<Held> held;
  std::deque<Held> errors;
};

struct Piece {
  const std::byte* memory;
  size_t bytes;
  void* descriptor;
};

struct Sending {
  std::vector<Piece> pieces;
  size_t bytes;
  Name target;
  fi::OperationMemory* operation;
  uint64_t number;
  size_t sent_bytes = 0;
};

struct Receiving {
  std::byte* memory;
  size_t bytes;
  void* descriptor;
  fi::OperationMemory* operation;
};

struct PartHeader {
  Name sender;
  uint64_t number;
  uint64_t total_bytes;
  uint64_t offset;
};

struct Incoming {
  std::vector<std::byte> bytes;
  size_t received_bytes = 0;
};

struct EndpointObject : fi::Endpoint {
  DomainObject* domain;
  Queue* queue = nullptr;
  VectorObject* vector = nullptr;
  int socket = -1;
  Name name{};
  uint64_t next_number = 1;
  std::vector<Sending> sending;
  std::vector<Receiving> receiving;
  std::map<std::pair<Name, uint64_t>, Incoming> incoming;
  std::vector<std::vector<std::byte>> complete;  // messages that wait for memory to be received into
  std::mt19937_64 random{next_seed++};
  uint32_t storm_left = 0;

  uint32_t draw(uint32_t count) { return static_cast<uint32_t>(random() % count); }

  bool has_room() {
    if (storm_left > 0) return --storm_left == 0;
    if (draw(kStormOdds) == 0) storm_left = 1 + draw(kLongestStorm);
    return true;
  }

  void finish(fi::OperationMemory* operation, uint64_t flags, size_t bytes, int error) {
    for (const void* word : operation->reserved) {
      if (word != reinterpret_cast<void*>(kMark)) refuse("an operation's own memory was used before it was complete");
    }
    queue->held.push_back({{operation, flags, bytes}, error, draw(kLateCalls)});
  }

  void send_parts() {
    for (size_t turn = 0; turn < 8 && !sending.empty(); ++turn) {
      const size_t index = draw(static_cast<uint32_t>(sending.size()));
      Sending& message = sending[index];
      if (!send_part(message)) continue;
      if (message.sent_bytes < message.bytes) continue;
      finish(message.operation, fi::kTransmit | fi::kMsg, 0, 0);
      sending.erase(sending.begin() + static_cast<std::ptrdiff_t>(index));
    }
  }

  // The memory is looked at only now: what was freed, or written to, since the send shows.
  bool send_part(Sending& message) {
    const size_t part = std::min(kPartBytes, message.bytes - message.sent_bytes);
    PartHeader header{name, message.number, message.bytes, message.sent_bytes};
    std::vector<iovec> pieces = {{&header, sizeof header}};
    size_t skipped = message.sent_bytes;
    size_t left = part;
    for (const Piece& piece : message.pieces) {
      domain->check(piece.memory, piece.bytes, piece.descriptor);
      const size_t offset = std::min(skipped, piece.bytes);
      skipped -= offset;
      const size_t taken = std::min(left, piece.bytes - offset);
      if (taken > 0) pieces.push_back({const_cast<std::byte*>(piece.memory) + offset, taken});
      left -= taken;
    }
    socklen_t length = 0;
    sockaddr_un address = address_of(message.target, length);
    msghdr datagram{};
    datagram.msg_name = &address;
    datagram.msg_namelen = length;
    datagram.msg_iov = pieces.data();
    datagram.msg_iovlen = pieces.size();
    // A peer that is gone, or does not take messages: it stays under way, for ever if need be.
    if (::sendmsg(socket, &datagram, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) return false;
    message.sent_bytes += part;
    return true;
  }

  void take_parts() {
    std::array<std::byte, sizeof(PartHeader) + kPartBytes> datagram;
    for (int turn = 0; turn < 32; ++turn) {
      const ssize_t got = ::recv(socket, datagram.data(), datagram.size(), MSG_DONTWAIT);
      if (got < static_cast<ssize_t>(sizeof(PartHeader))) return;
      PartHeader header;
      std::memcpy(&header, datagram.data(), sizeof header);
      const auto part = std::span(datagram).first(static_cast<size_t>(got)).subspan(sizeof header);
      Incoming& message = incoming[{header.sender, header.number}];
      message.bytes.resize(header.total_bytes);
      std::ranges::copy(part, message.bytes.begin() + static_cast<std::ptrdiff_t>(header.offset));
      message.received_bytes += part.size();
      if (message.received_bytes < message.bytes.size()) continue;
      complete.push_back(std::move(message.bytes));
      incoming.erase({header.sender, header.number});
    }
  }

  void match() {
    while (!complete.empty() && !receiving.empty()) {
      const size_t from = draw(static_cast<uint32_t>(complete.size()));
      const size_t into = draw(static_cast<uint32_t>(receiving.size()));
      const std::vector<std::byte> message = std::move(complete[from]);
      const Receiving place = receiving[into];
      complete.erase(complete.begin() + static_cast<std::ptrdiff_t>(from));
      receiving.erase(receiving.begin() + static_cast<std::ptrdiff_t>(into));
      domain->check(place.memory, place.bytes, place.descriptor);
      std::copy_n(message.begin(), std::min(message.size(), place.bytes), place.memory);
      const bool fits = message.size() <= place.bytes;
      finish(place.operation, fi::kReceive | fi::kMsg, std::min(message.size(), place.bytes), fits ? 0 : 265);
    }
  }
};

// --- Functions of the objects.

template <typename Object>
void open_object(Object& object, fi::Ops& ops) {
  object.fid.ops = &ops;
  ++open_count;
}

template <typename Object>
int close_object(fi::Fid* fid) {
  auto* object = reinterpret_cast<Object*>(fid);
  if constexpr (requires { object->domain; }) --object->domain->child_count;
  if constexpr (std::is_same_v<Object, DomainObject>) {
    if (object->child_count > 0) refuse("a domain closes before what is in it");
  }
  if constexpr (std::is_same_v<Object, RegionObject>) {
    if (object->domain->regions.erase(object->memory) == 0) refuse("a region was registered twice");
  }
  if constexpr (std::is_same_v<Object, EndpointObject>) {
    if (object->queue != nullptr) object->queue->endpoint = nullptr;
    if (object->socket >= 0) ::close(object->socket);
  }
  if constexpr (std::is_same_v<Object, Queue>) {
    if (object->endpoint != nullptr) refuse("a queue closes before its endpoint");
  }
  --open_count;
  delete object;
  return 0;
}

int no_bind(fi::Fid*, fi::Fid*, uint64_t) { return -ENOSYS; }
int no_control(fi::Fid*, int, void*) { return -ENOSYS; }

template <typename Object>
fi::Ops plain_ops = {sizeof(fi::Ops), close_object<Object>, no_bind, no_control};

int open_socket(EndpointObject& endpoint) {
  if (getrandom(endpoint.name.data(), endpoint.name.size(), 0) != static_cast<ssize_t>(endpoint.name.size())) {
    return -EIO;
  }
  endpoint.socket = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  socklen_t length = 0;
  const sockaddr_un address = address_of(endpoint.name, length);
  return ::bind(endpoint.socket, reinterpret_cast<const sockaddr*>(&address), length) == 0 ? 0 : -errno;
}

int bind_endpoint(fi::Fid* fid, fi::Fid* to, uint64_t flags) {
  auto& endpoint = *reinterpret_cast<EndpointObject*>(fid);
  if (flags == 0) {
    endpoint.vector = reinterpret_cast<VectorObject*>(to);
  } else {
    endpoint.queue = reinterpret_cast<Queue*>(to);
    endpoint.queue->endpoint = &endpoint;
  }
  return 0;
}

int control_endpoint(fi::Fid* fid, int command, void*) {
  auto& endpoint = *reinterpret_cast<EndpointObject*>(fid);
  if (command != fi::kEnable || endpoint.queue == nullptr || endpoint.vector == nullptr) return -EINVAL;
  return open_socket(endpoint);
}

int set_option(fi::Fid*, int, int, const void*, size_t) { return -ENOSYS; }

int get_name(fi::Fid* fid, void* name, size_t* bytes) {
  const auto& endpoint = *reinterpret_cast<EndpointObject*>(fid);
  if (*bytes < kNameBytes) return -ENOSPC;
  std::memcpy(name, endpoint.name.data(), kNameBytes);
  *bytes = kNameBytes;
  return 0;
}

void mark(void* context) {
  auto& operation = *static_cast<fi::OperationMemory*>(context);
  operation.reserved.fill(reinterpret_cast<void*>(kMark));
}

ssize_t receive(fi::Endpoint* object, void* memory, size_t bytes, void* descriptor, fi::Address, void* context) {
  auto& endpoint = *static_cast<EndpointObject*>(object);
  if (endpoint.receiving.size() >= kMostUnderWay * 16 || !endpoint.has_room()) return -EAGAIN;
  endpoint.domain->check(memory, bytes, descriptor);
  mark(context);
  endpoint.receiving.push_back(
      {static_cast<std::byte*>(memory), bytes, descriptor, static_cast<fi::OperationMemory*>(context)});
  return 0;
}

ssize_t send_vector(fi::Endpoint* object, const iovec* iov, void** descriptors, size_t count, fi::Address target,
                    void* context) {
  auto& endpoint = *static_cast<EndpointObject*>(object);
  if (count > kMostPieces) refuse("a message of more pieces than the provider takes");
  if (target >= endpoint.vector->names.size()) refuse("a message for an address that was not inserted");
  if (is_full || endpoint.sending.size() >= kMostUnderWay || !endpoint.has_room()) return -EAGAIN;
  Sending message{
      {}, 0, endpoint.vector->names[target], static_cast<fi::OperationMemory*>(context), endpoint.next_number++};
  for (const iovec& piece : std::span(iov, count)) {
    void* const descriptor = descriptors[&piece - iov];
    endpoint.domain->check(piece.iov_base, piece.iov_len, descriptor);
    message.pieces.push_back({static_cast<const std::byte*>(piece.iov_base), piece.iov_len, descriptor});
    message.bytes += piece.iov_len;
  }
  if (message.bytes > kMostMessageBytes) refuse("a message of more bytes than the provider takes");
  mark(context);
  if (calls_to_failure > 0 && --calls_to_failure == 0) {
    endpoint.finish(message.operation, fi::kTransmit, 0, failure);
    return 0;
  }
  if (lost_count > 0 && lost_count-- > 0) return 0;
  endpoint.sending.push_back(std::move(message));
  return 0;
}

fi::Ops endpoint_ops = {sizeof(fi::Ops), close_object<EndpointObject>, bind_endpoint, control_endpoint};
fi::EndpointOps option_ops = {sizeof(fi::EndpointOps), nullptr, nullptr, set_option};
fi::ConnectionOps name_ops = {sizeof(fi::ConnectionOps), nullptr, get_name};
fi::MessageOps message_ops = {sizeof(fi::MessageOps), receive, nullptr, nullptr, nullptr, send_vector};

// In no order: of those that were held back for long enough, any.
ssize_t read_queue(fi::CompletionQueue* object, void* entries, size_t count) {
  auto& queue = *static_cast<Queue*>(object);
  if (queue.endpoint != nullptr) {
    queue.endpoint->send_parts();
    queue.endpoint->take_parts();
    queue.endpoint->match();
    std::ranges::shuffle(queue.held, queue.endpoint->random);
  }
  if (!queue.errors.empty()) return -fi::kErrorAvailable;
  auto* const completions = static_cast<fi::Completion*>(entries);
  ssize_t read_count = 0;
  for (auto held = queue.held.begin(); held != queue.held.end() && read_count < static_cast<ssize_t>(count);) {
    if (held->calls_left > 0) {
      --held->calls_left;
      ++held;
      continue;
    }
    if (held->error != 0) {
      queue.errors.push_back(*held);
    } else {
      completions[read_count++] = held->completion;
    }
    held = queue.held.erase(held);
  }
  if (read_count > 0) return read_count;
  return queue.errors.empty() ? -EAGAIN : -fi::kErrorAvailable;
}

ssize_t read_error(fi::CompletionQueue* object, fi::CompletionError* error, uint64_t) {
  auto& queue = *static_cast<Queue*>(object);
  if (queue.errors.empty()) return -EAGAIN;
  error->context = queue.errors.front().completion.context;
  error->flags = queue.errors.front().completion.flags;
  error->error = queue.errors.front().error;
  queue.errors.pop_front();
  return 1;
}

fi::CompletionQueueOps queue_ops = {sizeof(fi::CompletionQueueOps), read_queue, nullptr, read_error};

int insert(fi::AddressVector* object, const void* name, size_t count, fi::Address* address, uint64_t, void*) {
  auto& vector = *static_cast<VectorObject*>(object);
  if (count != 1) return -EINVAL;
  Name copy;
  std::memcpy(copy.data(), name, copy.size());
  *address = vector.names.size();
  vector.names.push_back(copy);
  return 1;
}

fi::AddressVectorOps vector_ops = {sizeof(fi::AddressVectorOps), insert, nullptr, nullptr, nullptr};

int open_vector(fi::Domain* domain, fi::AddressVectorAttributes*, fi::AddressVector** found, void*) {
  auto* vector = new VectorObject{};
  open_object(*vector, plain_ops<VectorObject>);
  vector->ops = &vector_ops;
  vector->domain = static_cast<DomainObject*>(domain);
  ++vector->domain->child_count;
  *found = vector;
  return 0;
}

int open_queue(fi::Domain* domain, fi::CompletionQueueAttributes* attributes, fi::CompletionQueue** found, void*) {
  if (attributes->wait_object != fi::kWaitNone) return -ENOSYS;
  auto* queue = new Queue{};
  open_object(*queue, plain_ops<Queue>);
  queue->ops = &queue_ops;
  queue->domain = static_cast<DomainObject*>(domain);
  ++queue->domain->child_count;
  *found = queue;
  return 0;
}

int open_endpoint(fi::Domain* domain, fi::Info*, fi::Endpoint** found, void*) {
  auto* endpoint = new EndpointObject{};
  open_object(*endpoint, endpoint_ops);
  endpoint->ops = &option_ops;
  endpoint->connection = &name_ops;
  endpoint->message = &message_ops;
  endpoint->domain = static_cast<DomainObject*>(domain);
  ++endpoint->domain->child_count;
  *found = endpoint;
  return 0;
}

int register_memory(fi::Fid* fid, const void* memory, size_t bytes, uint64_t, uint64_t, uint64_t key, uint64_t,
                    fi::MemoryRegion** found, void*) {
  if (is_scarce) return -ENOMEM;
  auto* region = new RegionObject{};
  open_object(*region, plain_ops<RegionObject>);
  region->domain = reinterpret_cast<DomainObject*>(fid);
  region->memory = static_cast<const std::byte*>(memory);
  region->descriptor = region;
  region->key = key;
  ++region->domain->child_count;
  if (!region->domain->regions.try_emplace(region->memory, bytes, region).second)
    refuse("a region was registered twice");
  *found = region;
  return 0;
}

fi::DomainOps domain_ops = {sizeof(fi::DomainOps), open_vector, open_queue, open_endpoint};
fi::MemoryOps memory_ops = {sizeof(fi::MemoryOps), register_memory};

int open_domain(fi::Fabric*, fi::Info*, fi::Domain** found, void*) {
  auto* domain = new DomainObject{};
  open_object(*domain, plain_ops<DomainObject>);
  domain->ops = &domain_ops;
  domain->memory = &memory_ops;
  *found = domain;
  return 0;
}

int no_wait(fi::Fabric*, fi::Fid**, int) { return -EINVAL; }

fi::FabricOps fabric_ops = {sizeof(fi::FabricOps), open_domain, nullptr, nullptr, nullptr, no_wait};

// --- What there is.

struct WholeInfo : fi::Info {
  fi::TransmitAttributes transmit_attributes{};
  fi::ReceiveAttributes receive_attributes{};
  fi::EndpointAttributes endpoint_attributes{};
  fi::DomainAttributes domain_attributes{};
  fi::FabricAttributes fabric_attributes{};
};

bool is_set(const char* name, const char* wanted) {
  const char* const text = std::getenv(name);
  return text != nullptr && std::strcmp(text, wanted) == 0;
}

WholeInfo* make_info() {
  auto* info = new WholeInfo{};
  info->transmit = &info->transmit_attributes;
  info->receive = &info->receive_attributes;
  info->endpoint = &info->endpoint_attributes;
  info->domain = &info->domain_attributes;
  info->fabric = &info->fabric_attributes;
  return info;
}

}  // namespace

FAKE_FABRIC_EXPORT uint32_t fi_version() { return fi::version(2, 0); }
FAKE_FABRIC_EXPORT const char* fi_strerror(int error) { return std::strerror(error); }
FAKE_FABRIC_EXPORT fi::Info* fi_dupinfo(const fi::Info* /*info*/) { return make_info(); }

FAKE_FABRIC_EXPORT void fi_freeinfo(fi::Info* info) {
  while (info != nullptr) {
    fi::Info* const next = info->next;
    std::free(info->fabric->provider);
    std::free(info->domain->name);
    delete static_cast<WholeInfo*>(info);
    info = next;
  }
}

FAKE_FABRIC_EXPORT int fi_getinfo(uint32_t /*version*/, const char* /*node*/, const char* /*service*/,
                                  uint64_t /*flags*/, const fi::Info* hints, fi::Info** found) {
  static const bool has_no_monitor = is_set("FI_MR_CACHE_MONITOR", "disabled");
  if (!has_no_monitor) refuse("a provider would write over functions of libc, to watch what the process maps");
  static const bool has_no_segments = is_set("FI_OFI_RXM_SAR_LIMIT", "1");
  if (!has_no_segments) refuse("ofi_rxm would cut messages into segments, and crash where a peer dies between them");
  const char* wanted = hints->fabric->provider;
  if (wanted != nullptr && std::strcmp(wanted, "fake") != 0) return -ENODATA;
  fi::Info* first = nullptr;
  for (const char* domain : {kDomains[1], kDomains[0], kDomains[0]}) {  // a device may be listed more than once
    WholeInfo* const info = make_info();
    info->next = first;
    info->mode = fi::kContext2;
    info->fabric->provider = strdup("fake");
    info->domain->name = strdup(domain);
    info->domain->mr_mode = fi::kMrLocal;
    info->endpoint->most_message_bytes = kMostMessageBytes;
    info->transmit->iov_limit = kMostPieces;
    first = info;
  }
  *found = first;
  return 0;
}

FAKE_FABRIC_EXPORT int fi_fabric(fi::FabricAttributes* /*attributes*/, fi::Fabric** found, void* /*context*/) {
  auto* fabric = new fi::Fabric{};
  open_object(*fabric, plain_ops<fi::Fabric>);
  fabric->ops = &fabric_ops;
  *found = fabric;
  return 0;
}

void fake_fabric_set_full(bool full) { is_full = full; }
void fake_fabric_set_scarce(bool scarce) { is_scarce = scarce; }
void fake_fabric_fail(int64_t nth, int error) {
  failure = error;
  calls_to_failure = nth;
}
void fake_fabric_lose(int64_t count) { lost_count = count; }
int64_t fake_fabric_open_count() { return open_count; }
void fake_fabric_seed(uint64_t seed) { next_seed = seed; }
