#include "xla_ffi/fabric/endpoint.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

#include "xla_ffi/wire/auth.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr size_t kCompletionsAtOnce = 64;
// Beyond one for each message under way to a session: for those that only tell what was consumed. There are never more
// of these under way, as each of them stands for half of the session's messages.
constexpr size_t kMoreReceivers = kSlotsPerSession / 2;
constexpr size_t kReceiversPerSession = kSlotsPerSession + kMoreReceivers;
// How long the loop does without sleep after a completion, where no descriptor would wake it.
constexpr milliseconds kSpin{1};
constexpr milliseconds kLookInterval{1};
constexpr milliseconds kRetryInterval{1};
constexpr milliseconds kProgressInterval{20};  // the provider may have timers of its own as long as a send is under way
constexpr size_t kMaxNameBytesOfEndpoint = 256;
// Long-lived memory is registered so much at a time, with the first message from there: its pages stay in memory then.
constexpr size_t kWindowBytes = size_t{8} << 20;

// The best way to each device: the library may list others behind it. Only those whose endpoints can have the same
// peers, which the first decides.
std::vector<fi::Info*> devices_of(const FabricLibrary::Infos& infos) {
  std::vector<fi::Info*> devices;
  for (fi::Info* info = infos.get(); info != nullptr; info = info->next) {
    const auto is_same = [&](const fi::Info* other) {
      return std::string_view(other->domain->name) == info->domain->name;
    };
    if (info->address_format == infos->address_format && std::ranges::none_of(devices, is_same))
      devices.push_back(info);
  }
  return devices;
}

// The part of a home that is registered for `bytes`; none if they lie in no home, or in two such parts.
std::optional<LongLived> window_of(std::span<const std::byte> bytes, const LongLivedByStart& homes) {
  const auto next = homes.upper_bound(bytes.data());
  if (next == homes.begin()) return std::nullopt;
  const LongLived& home = std::prev(next)->second;
  const auto offset = static_cast<size_t>(bytes.data() - home.bytes.data());
  if (offset >= home.bytes.size()) return std::nullopt;
  const size_t start = offset / kWindowBytes * kWindowBytes;
  const auto window = home.bytes.subspan(start, std::min(kWindowBytes, home.bytes.size() - start));
  if (bytes.size() > window.size() - (offset - start)) return std::nullopt;
  return LongLived{window, home.keeper};
}

}  // namespace

// --- Opening and closing.

Result<std::shared_ptr<FabricEndpoint>> FabricEndpoint::open(EventLoop& loop,
                                                             std::shared_ptr<const FabricLibrary> library,
                                                             const std::string& provider, const std::string& source,
                                                             size_t strand, std::shared_ptr<Counters> counters) {
  Result<FabricLibrary::Infos> infos = library->find(provider, source);
  if (!infos.ok()) return infos.status();
  const std::shared_ptr<FabricEndpoint> self(new FabricEndpoint(loop, std::move(library), std::move(counters)));
  self->infos_ = *infos;
  self->provider_ = provider;
  const std::vector<fi::Info*> devices = devices_of(*infos);
  if (Status status = self->open_device(*devices[strand % devices.size()]); !status.ok()) return status;
  if (Status status = self->find_name(); !status.ok()) return status;
  if (Status status = self->watch(); !status.ok()) return status;
  return self;
}

Status FabricEndpoint::open_device(fi::Info& info) {
  domain_name_ = info.domain->name;
  registers_ = (info.domain->mr_mode & fi::kMrLocal) != 0;
  sends_in_place_ = info.transmit->iov_limit >= 2;
  if (info.endpoint->most_message_bytes < kSlotBytes) {
    return {Code::kInternal, "the fabric's provider " + provider_ + " carries messages of at most " +
                                 std::to_string(info.endpoint->most_message_bytes) + " bytes"};
  }
  fi::Fabric* fabric = nullptr;
  if (int result = library_->open_fabric(info.fabric, &fabric); result != 0)
    return library_->error("fi_fabric", result);
  fabric_.reset(fabric);
  fi::Domain* domain = nullptr;
  if (int result = fabric->ops->open_domain(fabric, &info, &domain, nullptr); result != 0) {
    return library_->error("fi_domain", result);
  }
  domain_.reset(domain);
  if (Status status = open_queue(); !status.ok()) return status;
  fi::AddressVectorAttributes attributes;
  fi::AddressVector* vector = nullptr;
  if (int result = domain->ops->open_address_vector(domain, &attributes, &vector, nullptr); result != 0) {
    return library_->error("fi_av_open", result);
  }
  address_vector_.reset(vector);
  fi::Endpoint* endpoint = nullptr;
  if (int result = domain->ops->open_endpoint(domain, &info, &endpoint, nullptr); result != 0) {
    return library_->error("fi_endpoint", result);
  }
  endpoint_.reset(endpoint);
  fi::Ops& ops = *endpoint->fid.ops;
  if (int result = ops.bind(&endpoint->fid, &vector->fid, 0); result != 0) return library_->error("fi_ep_bind", result);
  if (int result = ops.bind(&endpoint->fid, &queue_->fid, fi::kTransmit | fi::kReceive); result != 0) {
    return library_->error("fi_ep_bind", result);
  }
  if (int result = ops.control(&endpoint->fid, fi::kEnable, nullptr); result != 0) {
    return library_->error("fi_enable", result);
  }
  return {};
}

// With a descriptor that wakes the event loop, if the provider has one.
Status FabricEndpoint::open_queue() {
  fi::CompletionQueue* queue = nullptr;
  fi::CompletionQueueAttributes attributes;
  attributes.size = 4096;
  attributes.wait_object = fi::kWaitDescriptor;
  int result = domain_->ops->open_completion_queue(domain_.get(), &attributes, &queue, nullptr);
  if (result == 0) {
    queue_.reset(queue);
    if (queue->fid.ops->control(&queue->fid, fi::kGetWait, &descriptor_) == 0 && descriptor_ >= 0) return {};
    queue_.reset();
  }
  descriptor_ = -1;
  attributes.wait_object = fi::kWaitNone;
  result = domain_->ops->open_completion_queue(domain_.get(), &attributes, &queue, nullptr);
  if (result != 0) return library_->error("fi_cq_open", result);
  queue_.reset(queue);
  return {};
}

Status FabricEndpoint::find_name() {
  name_.resize(kMaxNameBytesOfEndpoint);
  size_t bytes = name_.size();
  if (int result = endpoint_->connection->get_name(&endpoint_->fid, name_.data(), &bytes); result != 0) {
    return library_->error("fi_getname", result);
  }
  name_.resize(bytes);
  return {};
}

Status FabricEndpoint::watch() {
  poller_ = loop_.add_poller([weak = weak_from_this()] {
    const auto self = weak.lock();
    return self && self->poll();
  });
  // The poller does the work, in each turn of the loop.
  return has_descriptor() ? loop_.watch(descriptor_, EPOLLIN, [](uint32_t) {}) : Status();
}

FabricEndpoint::~FabricEndpoint() {
  loop_.remove_poller(poller_);
  loop_.cancel(timer_);
  if (has_descriptor()) loop_.unwatch(descriptor_);
}

// --- Slots.

Result<FabricEndpoint::Owned<fi::MemoryRegion>> FabricEndpoint::register_memory(std::span<const std::byte> memory) {
  fi::MemoryRegion* region = nullptr;
  const int result = domain_->memory->register_memory(
      &domain_->fid, memory.data(), memory.size(), fi::kTransmit | fi::kReceive, 0, next_key_++, 0, &region, nullptr);
  if (result != 0) {
    return library_->error(
        "cannot register " + std::to_string(memory.size()) + " bytes with the fabric (is `ulimit -l` unlimited?)",
        result);
  }
  return Owned<fi::MemoryRegion>(region);
}

Status FabricEndpoint::add_block() {
  Result<std::shared_ptr<SlotBlock>> block = SlotBlock::create();
  if (!block.ok()) return block.status();
  if (registers_) {
    Result<Owned<fi::MemoryRegion>> region = register_memory((*block)->bytes());
    if (!region.ok()) return region.status();
    (*block)->set_descriptor((*region)->descriptor);
    regions_.push_back(std::move(*region));
  }
  for (FabricSlot& slot : (*block)->slots()) free_slots_.push_back(&slot);
  blocks_.push_back(std::move(*block));
  return {};
}

Result<FabricSlot*> FabricEndpoint::take_slot() {
  if (free_slots_.empty()) {
    if (Status status = add_block(); !status.ok()) return status;
  }
  FabricSlot* const slot = free_slots_.back();
  free_slots_.pop_back();
  return slot;
}

void FabricEndpoint::give_back(FabricSlot& slot) {
  slot.in_place = {};
  if (slot.receives && surplus_count_ == 0) {
    idle_receivers_.push_back(&slot);
    return;
  }
  if (std::exchange(slot.receives, false)) --surplus_count_;
  free_slots_.push_back(&slot);
}

Status FabricEndpoint::keep(const FabricMessage& message) {
  if (!message.slot->receives) return {};  // it is kept already, for another frame
  Result<FabricSlot*> slot = take_slot();
  if (!slot.ok()) return slot.status();
  message.slot->receives = false;
  (*slot)->receives = true;
  idle_receivers_.push_back(*slot);
  return {};
}

// --- Memory of others.

Result<bool> FabricEndpoint::attach(FabricSlot& slot, std::span<const std::byte> bytes,
                                    std::shared_ptr<const void> owner, const LongLivedByStart& homes) {
  if (!sends_in_place_) return false;
  const std::optional<LongLived> window = window_of(bytes, homes);
  if (!window.has_value()) return false;
  Result<void*> descriptor = hold(*window);
  if (!descriptor.ok()) {
    sends_in_place_ = false;
    return descriptor.status();
  }
  slot.in_place = {bytes, *descriptor, std::move(owner)};
  return true;
}

Result<void*> FabricEndpoint::hold(const LongLived& window) {
  const auto known = windows_.find(window.bytes.data());
  if (known != windows_.end()) return known->second.region ? known->second.region->descriptor : nullptr;
  Owned<fi::MemoryRegion> region;
  if (registers_) {
    Result<Owned<fi::MemoryRegion>> registered = register_memory(window.bytes);
    if (!registered.ok()) return registered.status();
    region = std::move(*registered);
  }
  void* const descriptor = region ? region->descriptor : nullptr;
  windows_.emplace(window.bytes.data(), Window{window.keeper, std::move(region)});
  return descriptor;
}

// --- Sessions and peers.

Result<uint64_t> FabricEndpoint::open_session(FabricListener& listener) {
  if (!end_.ok()) return end_;
  const std::optional<Nonce> nonce = fresh_nonce();
  if (!nonce.has_value()) return Status(Code::kInternal, "the kernel gave no random numbers");
  uint64_t session = 0;
  std::memcpy(&session, nonce->data(), sizeof session);
  while (session == 0 || sessions_.contains(session)) ++session;
  // Before the peer hears of the session: what is not posted when a message comes slows the provider down.
  for (size_t i = 0; i < kReceiversPerSession; ++i) {
    if (surplus_count_ > 0) {
      --surplus_count_;
      continue;
    }
    Result<FabricSlot*> slot = take_slot();
    if (!slot.ok()) return slot.status();
    (*slot)->receives = true;
    idle_receivers_.push_back(*slot);
  }
  receive();
  sessions_.emplace(session, &listener);
  return session;
}

void FabricEndpoint::close_session(uint64_t session) {
  if (sessions_.erase(session) > 0) surplus_count_ += kReceiversPerSession;
}

Result<fi::Address> FabricEndpoint::add_peer(const Bytes& name) {
  // A provider reads as many bytes as its names have.
  if (name.size() != name_.size()) return Status(Code::kProtocol, "its endpoint has no name of this fabric");
  if (const auto known = peers_.find(name); known != peers_.end()) return known->second;
  fi::Address address = fi::kAnyAddress;
  const int count = address_vector_->ops->insert(address_vector_.get(), name.data(), 1, &address, 0, nullptr);
  if (count != 1) return library_->error("fi_av_insert", count < 0 ? count : -EINVAL);
  peers_.emplace(name, address);
  return address;
}

// --- Messages.

Result<bool> FabricEndpoint::send(FabricSlot& slot, size_t bytes, fi::Address target, uint64_t session) {
  if (!end_.ok()) return end_;
  slot.session = session;
  const InPlace& in_place = slot.in_place;
  // iovec is not const-correct; sends only read.
  const std::array<iovec, 2> pieces = {iovec{slot.bytes.data(), bytes},
                                       iovec{const_cast<std::byte*>(in_place.bytes.data()), in_place.bytes.size()}};
  std::array<void*, 2> descriptors = {slot.descriptor, in_place.descriptor};
  const size_t count = in_place.bytes.empty() ? 1 : 2;
  const ssize_t result = endpoint_->message->send_vector(endpoint_.get(), pieces.data(), descriptors.data(), count,
                                                         target, &slot.operation);
  if (result == -EAGAIN) {
    ++counters_->fabric_retry_count;
    blocked_.push_back(session);
    return false;
  }
  if (result != 0) {
    ++counters_->fabric_error_count;
    return library_->error("cannot send over the fabric", result);
  }
  ++sending_count_;
  return true;
}

// Gives the provider the slots that are to receive.
void FabricEndpoint::receive() {
  while (!idle_receivers_.empty()) {
    FabricSlot& slot = *idle_receivers_.back();
    const ssize_t result = endpoint_->message->receive(endpoint_.get(), slot.bytes.data(), slot.bytes.size(),
                                                       slot.descriptor, fi::kAnyAddress, &slot.operation);
    if (result == -EAGAIN) return;
    if (result != 0) return break_all(library_->error("cannot receive from the fabric", result));
    idle_receivers_.pop_back();
  }
}

// Returns whether the loop may not sleep.
bool FabricEndpoint::poll() {
  const auto self = shared_from_this();  // listeners may close the last session
  const bool has_more = end_.ok() && read_completions();
  if (end_.ok()) receive();
  tell();
  return has_more || !may_sleep();
}

bool FabricEndpoint::read_completions() {
  std::array<fi::Completion, kCompletionsAtOnce> completions;
  const ssize_t count = queue_->ops->read(queue_.get(), completions.data(), completions.size());
  if (count == -EAGAIN || count == 0) return false;
  last_completion_ = EventLoop::Clock::now();
  if (count < 0) {
    const Status status = count == -fi::kErrorAvailable ? read_error() : library_->error("fi_cq_read", count);
    if (!status.ok()) break_all(status);
    return status.ok();
  }
  for (const fi::Completion& completion : std::span(completions).first(static_cast<size_t>(count))) {
    if (completion.context != nullptr) complete(*static_cast<FabricSlot*>(completion.context), completion.bytes);
  }
  return true;
}

Status FabricEndpoint::read_error() {
  fi::CompletionError error;
  const ssize_t count = queue_->ops->read_error(queue_.get(), &error, 0);
  if (count == -EAGAIN) return {};
  if (count < 0) return library_->error("fi_cq_readerr", count);
  ++counters_->fabric_error_count;
  if (error.context != nullptr) give_up(*static_cast<FabricSlot*>(error.context), error.error);
  return {};
}

void FabricEndpoint::complete(FabricSlot& slot, size_t bytes) {
  if (slot.receives) return complete_receive(slot, bytes);
  --sending_count_;
  if (const auto session = sessions_.find(slot.session); session != sessions_.end()) {
    touched_.push_back(slot.session);
    session->second->on_sent(slot.number);
  }
  give_back(slot);
}

void FabricEndpoint::complete_receive(FabricSlot& slot, size_t bytes) {
  std::array<uint64_t, 3> prefix{};
  static_assert(sizeof prefix == kPrefixBytes);
  if (bytes >= kPrefixBytes && bytes <= slot.bytes.size()) std::memcpy(prefix.data(), slot.bytes.data(), kPrefixBytes);
  const auto session = sessions_.find(prefix[0]);
  if (session == sessions_.end()) {
    ++counters_->fabric_unknown_count;
    return give_back(slot);
  }
  FabricMessage message{prefix[1], prefix[2], nullptr, bytes - kPrefixBytes, &slot};
  const auto release = [&slot, block = slot.block->shared_from_this(), weak = weak_from_this()](const std::byte*) {
    if (const auto self = weak.lock()) self->give_back(slot);
  };
  message.memory = {slot.bytes.data() + kPrefixBytes, release};
  touched_.push_back(session->first);
  session->second->on_message(std::move(message));
}

// An operation has failed. One that was to receive tries again: it was no message of ours.
void FabricEndpoint::give_up(FabricSlot& slot, int error) {
  if (!slot.receives) {
    --sending_count_;
    broken_.emplace_back(slot.session, library_->error("a message over the fabric was lost", -error));
  }
  give_back(slot);
}

void FabricEndpoint::break_all(const Status& why) {
  end_ = why;
  ++counters_->fabric_error_count;
  for (const auto& [session, listener] : sessions_) broken_.emplace_back(session, why);
}

void FabricEndpoint::tell() {
  for (const auto& [session, why] : std::exchange(broken_, {})) {
    if (const auto found = sessions_.find(session); found != sessions_.end()) found->second->on_broken(why);
  }
  std::vector<uint64_t> touched = std::exchange(touched_, {});
  for (const uint64_t session : std::exchange(blocked_, {})) touched.push_back(session);
  std::ranges::sort(touched);
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  for (const uint64_t session : touched) {
    if (const auto found = sessions_.find(session); found != sessions_.end()) found->second->on_progress();
  }
}

bool FabricEndpoint::may_sleep() {
  if (!end_.ok() || sessions_.empty()) return true;
  if (!blocked_.empty() || !idle_receivers_.empty()) wake_after(kRetryInterval);
  if (has_descriptor()) {
    if (sending_count_ > 0) wake_after(kProgressInterval);
    fi::Fid* fid = &queue_->fid;
    return fabric_->ops->try_wait(fabric_.get(), &fid, 1) == 0;
  }
  if (EventLoop::Clock::now() - last_completion_ < kSpin) return false;
  wake_after(kLookInterval);
  return true;
}

void FabricEndpoint::wake_after(milliseconds delay) {
  if (timer_ != 0) return;
  timer_ = loop_.after(delay, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->timer_ = 0;
  });
}

}  // namespace jaxhetero
