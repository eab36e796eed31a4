// The part of libfabric's binary interface that this project uses. Building needs none of libfabric's headers.
//
// The declarations follow the interface FABRIC_1.3 (github.com/ofiwg/libfabric, include/rdma), which every library
// since 1.9 offers beside its newer ones. Names are those of libfabric, without `fi_`. Later interfaces only append
// fields. So a struct that the library makes may be longer than it is here, and none that we make may be shorter:
// those end in `reserved`.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace jaxhetero::fi {

constexpr uint32_t version(uint32_t major, uint32_t minor) { return major << 16 | minor; }
// The version of the interface that is asked for.
inline constexpr uint32_t kApiVersion = version(1, 17);

// Errors are returned as negative numbers; those below 256 are errno's.
inline constexpr int kErrorAvailable = 259;  // FI_EAVAIL

// Capabilities, and flags of operations.
inline constexpr uint64_t kMsg = uint64_t{1} << 1;
inline constexpr uint64_t kReceive = uint64_t{1} << 10;
inline constexpr uint64_t kTransmit = uint64_t{1} << 11;
inline constexpr uint64_t kSource = uint64_t{1} << 57;  // of getinfo: the node is our own

// What the program does for the provider: it gives each operation memory for the provider's use.
inline constexpr uint64_t kContext = uint64_t{1} << 59;
inline constexpr uint64_t kContext2 = uint64_t{1} << 52;

// Which memory is registered: that of operations; the others say that registering means just that.
inline constexpr int kMrLocal = 1 << 2;
inline constexpr int kMrVirtualAddress = 1 << 4;
inline constexpr int kMrAllocated = 1 << 5;
inline constexpr int kMrProviderKey = 1 << 6;

enum EndpointType : int { kReliableDatagrams = 3 };
enum Progress : int { kManualProgress = 2 };
enum Threading : int { kThreadDomain = 3 };
enum AddressVectorType : int { kTable = 2 };
enum CompletionFormat : int { kFormatMessage = 2 };
enum WaitObject : int { kWaitNone = 0, kWaitDescriptor = 3 };
enum Control : int { kGetWait = 5, kEnable = 6 };

using Address = uint64_t;
inline constexpr Address kAnyAddress = ~Address{0};

struct Ops;
struct Fid {
  size_t kind;
  void* context;
  Ops* ops;
};
struct Ops {
  size_t size;
  int (*close)(Fid* fid);
  int (*bind)(Fid* fid, Fid* to, uint64_t flags);
  int (*control)(Fid* fid, int command, void* argument);
};

// --- What there is: the result of getinfo, and its hints.

struct TransmitAttributes {
  uint64_t caps;
  uint64_t mode;
  uint64_t op_flags;
  uint64_t msg_order;
  uint64_t comp_order;
  size_t inject_size;
  size_t size;
  size_t iov_limit;
};
struct ReceiveAttributes {
  uint64_t caps;
  uint64_t mode;
  uint64_t op_flags;
  uint64_t msg_order;
  uint64_t comp_order;
  size_t total_buffered;
  size_t size;
  size_t iov_limit;
};
struct EndpointAttributes {
  int type;
  uint32_t protocol;
  uint32_t protocol_version;
  size_t most_message_bytes;
  size_t prefix_bytes;
};
struct DomainAttributes {
  void* domain;
  char* name;
  int threading;
  int control_progress;
  int data_progress;
  int resource_mgmt;
  int av_type;
  int mr_mode;
};
struct FabricAttributes {
  void* fabric;
  char* name;
  char* provider;
  uint32_t provider_version;
  uint32_t api_version;
};
struct Info {
  Info* next;
  uint64_t caps;
  uint64_t mode;
  uint32_t address_format;
  size_t source_bytes;
  size_t target_bytes;
  void* source;
  void* target;
  Fid* handle;
  TransmitAttributes* transmit;
  ReceiveAttributes* receive;
  EndpointAttributes* endpoint;
  DomainAttributes* domain;
  FabricAttributes* fabric;
};

// --- Objects, and the functions that they bring.

struct AddressVectorAttributes {
  int type = kTable;
  int receive_bits = 0;
  size_t count = 0;
  size_t endpoints_per_node = 0;
  const char* name = nullptr;
  void* map_address = nullptr;
  uint64_t flags = 0;
  std::array<uint64_t, 4> reserved{};
};
struct AddressVector;
struct AddressVectorOps {
  size_t size;
  int (*insert)(AddressVector* av, const void* name, size_t count, Address* address, uint64_t flags, void* context);
  void* insert_service;
  void* insert_symmetric;
  int (*remove)(AddressVector* av, Address* address, size_t count, uint64_t flags);
};
struct AddressVector {
  Fid fid;
  AddressVectorOps* ops;
};

struct Completion {
  void* context;
  uint64_t flags;
  size_t bytes;
};
struct CompletionError {
  void* context = nullptr;
  uint64_t flags = 0;
  size_t bytes = 0;
  void* buffer = nullptr;
  uint64_t data = 0;
  uint64_t tag = 0;
  size_t cut_bytes = 0;
  int error = 0;
  int provider_error = 0;
  void* provider_data = nullptr;
  size_t provider_data_bytes = 0;
  std::array<uint64_t, 8> reserved{};
};
struct CompletionQueueAttributes {
  size_t size = 0;
  uint64_t flags = 0;
  int format = kFormatMessage;
  int wait_object = kWaitNone;
  int signaling_vector = 0;
  int wait_condition = 0;
  void* wait_set = nullptr;
  std::array<uint64_t, 4> reserved{};
};
struct CompletionQueue;
struct CompletionQueueOps {
  size_t size;
  ssize_t (*read)(CompletionQueue* queue, void* entries, size_t count);
  void* read_from;
  ssize_t (*read_error)(CompletionQueue* queue, CompletionError* error, uint64_t flags);
};
struct CompletionQueue {
  Fid fid;
  CompletionQueueOps* ops;
};

struct MemoryRegion {
  Fid fid;
  void* descriptor;
  uint64_t key;
};

struct Endpoint;
struct EndpointOps {
  size_t size;
  void* cancel;
  void* get_option;
  int (*set_option)(Fid* fid, int level, int name, const void* value, size_t bytes);
};
struct ConnectionOps {
  size_t size;
  void* set_name;
  int (*get_name)(Fid* fid, void* name, size_t* bytes);
};
struct MessageOps {
  size_t size;
  ssize_t (*receive)(Endpoint* endpoint, void* buffer, size_t bytes, void* descriptor, Address source, void* context);
  void* receive_vector;
  void* receive_message;
  void* send;
  ssize_t (*send_vector)(Endpoint* endpoint, const iovec* pieces, void** descriptors, size_t count, Address target,
                         void* context);
};
struct Endpoint {
  Fid fid;
  EndpointOps* ops;
  ConnectionOps* connection;
  MessageOps* message;
};

struct Domain;
struct DomainOps {
  size_t size;
  int (*open_address_vector)(Domain* domain, AddressVectorAttributes* attributes, AddressVector** av, void* context);
  int (*open_completion_queue)(Domain* domain, CompletionQueueAttributes* attributes, CompletionQueue** queue,
                               void* context);
  int (*open_endpoint)(Domain* domain, Info* info, Endpoint** endpoint, void* context);
};
struct MemoryOps {
  size_t size;
  int (*register_memory)(Fid* domain, const void* memory, size_t bytes, uint64_t access, uint64_t offset, uint64_t key,
                         uint64_t flags, MemoryRegion** region, void* context);
};
struct Domain {
  Fid fid;
  DomainOps* ops;
  MemoryOps* memory;
};

struct Fabric;
struct FabricOps {
  size_t size;
  int (*open_domain)(Fabric* fabric, Info* info, Domain** domain, void* context);
  void* passive_endpoint;
  void* open_event_queue;
  void* open_wait_set;
  int (*try_wait)(Fabric* fabric, Fid** fids, int count);
};
struct Fabric {
  Fid fid;
  FabricOps* ops;
};

// The memory that each operation gives to the provider until it is complete: fi_context2.
struct OperationMemory {
  std::array<void*, 8> reserved{};
};

}  // namespace jaxhetero::fi
