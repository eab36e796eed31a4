#include "handlers.h"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxhetero {
namespace {

namespace ffi = xla::ffi;

// What outlives a program and is looked up by name: see set_current_communicator().
struct Registry {
  std::mutex mutex;
  std::shared_ptr<Communicator> communicator;
  std::unordered_map<uint64_t, uint64_t> instance_counts;
  uint64_t site_count = 0;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

class Hash {  // FNV-1a, 64 bit
 public:
  void add(uint64_t value) {
    for (int i = 0; i < 8; ++i) add_byte(static_cast<uint8_t>(value >> (8 * i)));
  }
  void add(std::string_view text) {
    for (char c : text) add_byte(static_cast<uint8_t>(c));
  }
  [[nodiscard]] uint64_t value() const { return value_; }
  [[nodiscard]] uint32_t folded() const { return static_cast<uint32_t>(value_ ^ value_ >> 32); }

 private:
  void add_byte(uint8_t byte) { value_ = (value_ ^ byte) * 0x100000001b3u; }
  uint64_t value_ = 0xcbf29ce484222325u;
};

// One custom call instruction of one compiled program.
struct CallSite {
  static ffi::TypeId id;

  uint64_t op = 0;
  uint64_t sequence = 0;
  std::string label;
  Kind kind = Kind::kSum;
  uint32_t root = 0;
  int64_t worker_count = 0;                    // that the program was traced for
  std::unordered_map<int64_t, int64_t> lanes;  // by device; empty outside a mesh
  std::once_flag described;
  std::string description;
  std::mutex mutex;
  std::optional<int64_t> last_run;  // guarded by mutex
};
ffi::TypeId CallSite::id = {};

ffi::ErrorCode error_code(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
    case Code::kMismatch:
      return ffi::ErrorCode::kInvalidArgument;
    case Code::kNotInitialized:
      return ffi::ErrorCode::kFailedPrecondition;
    case Code::kRoundTimeout:
    case Code::kStartTimeout:
      return ffi::ErrorCode::kDeadlineExceeded;
    case Code::kWorkerLost:
    case Code::kReducerLost:
      return ffi::ErrorCode::kUnavailable;
    default:
      return ffi::ErrorCode::kInternal;
  }
}

ffi::Error to_error(const Status& status) {
  return {error_code(status.code()),
          "jaxhetero." + std::string(exception_name(status.code())) + ": " + status.message()};
}

ffi::Future failed(const Status& status) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(to_error(status));
  return future;
}

// A complex number is summed as its two parts, so it counts as two elements.
size_t parts_of(ffi::DataType type) { return type == ffi::DataType::C64 || type == ffi::DataType::C128 ? 2 : 1; }

std::optional<DType> dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F16:
      return DType::kF16;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F32:
    case ffi::DataType::C64:
      return DType::kF32;
    case ffi::DataType::F64:
    case ffi::DataType::C128:
      return DType::kF64;
    case ffi::DataType::S8:
      return DType::kI8;
    case ffi::DataType::S16:
      return DType::kI16;
    case ffi::DataType::S32:
      return DType::kI32;
    case ffi::DataType::S64:
      return DType::kI64;
    case ffi::DataType::U8:
      return DType::kU8;
    case ffi::DataType::U16:
      return DType::kU16;
    case ffi::DataType::U32:
      return DType::kU32;
    case ffi::DataType::U64:
      return DType::kU64;
    default:
      return std::nullopt;
  }
}

void describe_shape(std::string& text, const ffi::AnyBuffer& leaf, DType dtype) {
  constexpr size_t kMaxText = 300;
  if (text.size() > kMaxText) {
    if (!text.ends_with("...")) text += ", ...";
    return;
  }
  if (!text.empty()) text += ", ";
  text += std::string(dtype_name(dtype)) + "[";
  bool first = true;
  for (int64_t dimension : leaf.dimensions()) {
    text += (first ? "" : ",") + std::to_string(dimension);
    first = false;
  }
  text += "]";
}

// The number of an op must be the same on every worker. A program is compiled from the same text everywhere, so the
// label together with "the how-manyth instruction of this label that this process instantiates" is.
ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(std::string_view label, int64_t kind, int64_t root,
                                                    int64_t worker_count, ffi::Span<const int64_t> device_ids,
                                                    ffi::Span<const int64_t> device_lanes) {
  auto site = std::make_unique<CallSite>();
  site->label = label;
  site->kind = static_cast<Kind>(kind);
  site->root = static_cast<uint32_t>(root);
  site->worker_count = worker_count;
  for (size_t i = 0; i < std::min(device_ids.size(), device_lanes.size()); ++i) {
    site->lanes.emplace(device_ids.begin()[i], device_lanes.begin()[i]);
  }
  Hash hash;
  hash.add(label);
  const std::lock_guard lock(registry().mutex);
  hash.add(registry().instance_counts[hash.value()]++);
  site->op = hash.value();
  // Compiled in the same order as elsewhere, most often; nothing but speed hangs on it.
  site->sequence = registry().site_count++;
  return site;
}

// Rounds pair up by the order in which a program is launched. XLA numbers the launches; two threads that race to launch
// one program may be seen in the wrong order here, and in another one on other hosts, which must not pass silently.
Status check_launch_order(CallSite& site, int64_t run) {
  const std::lock_guard lock(site.mutex);
  const bool backwards = site.last_run.has_value() && static_cast<int32_t>(run - *site.last_run) < 0;
  site.last_run = run;
  if (!backwards) return {};
  return {Code::kInvalidArgument,
          "several threads launch the program with " + site.label +
              " at once, so its rounds have no order that all workers share; launch it from one "
              "thread"};
}

// Each device of a worker reduces with the devices of the same lane of the other workers, as an op of its own.
uint64_t op_of_device(const CallSite& site, int32_t device) {
  const auto lane = site.lanes.find(device);
  if (lane == site.lanes.end() || lane->second == 0) return site.op;
  Hash hash;
  hash.add(site.op);
  hash.add(static_cast<uint64_t>(lane->second));
  return hash.value();
}

Result<RoundRequest> make_request(CallSite& site, int32_t device, const ffi::RemainingArgs& args,
                                  const ffi::RemainingRets& rets) {
  RoundRequest request;
  request.op = op_of_device(site, device);
  request.sequence = site.sequence;
  request.spec.kind = site.kind;
  request.spec.root = site.root;
  request.spec.leaf_count = static_cast<uint32_t>(args.size());
  Hash signature;
  std::string shapes;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto input = args.get<ffi::AnyBuffer>(i);
    auto output = rets.get<ffi::AnyBuffer>(i);
    if (!input.has_value() || !output.has_value())
      return Status(Code::kInternal, "XLA passed something else than buffers");
    const std::optional<DType> dtype = dtype_of(input->element_type());
    if (!dtype.has_value() || (i > 0 && *dtype != request.spec.dtype)) {
      return Status(Code::kInternal, "a bucket of a dtype that cannot be reduced, or of several");
    }
    request.spec.dtype = *dtype;
    request.spec.total_count += input->element_count() * parts_of(input->element_type());
    signature.add(static_cast<uint64_t>(input->element_type()));
    signature.add(input->dimensions().size());
    for (int64_t dimension : input->dimensions()) signature.add(static_cast<uint64_t>(dimension));
    request.inputs.append(input->untyped_data(), input->size_bytes());
    request.outputs.append((*output)->untyped_data(), (*output)->size_bytes());
  }
  request.spec.signature = signature.folded();
  std::call_once(site.described, [&] {
    for (size_t i = 0; i < args.size(); ++i) describe_shape(shapes, *args.get<ffi::AnyBuffer>(i), request.spec.dtype);
    site.description = site.label + " (" + shapes + ")";
  });
  request.description = site.description;
  return request;
}

// Copies every pointer out of the call frame, hands the round to the communicator and returns at once.
ffi::Future execute(CallSite* site, ffi::RunId run, int32_t device, ffi::Dictionary, ffi::RemainingArgs args,
                    ffi::RemainingRets rets) {
  std::shared_ptr<Communicator> communicator;
  {
    const std::lock_guard lock(registry().mutex);
    communicator = registry().communicator;
  }
  if (communicator == nullptr) {
    return failed({Code::kNotInitialized, site->label + " was run before jaxhetero.initialize() or after shutdown()"});
  }
  if (site->worker_count != communicator->worker_count()) {
    return failed({Code::kInvalidArgument, site->label + " was traced for " + std::to_string(site->worker_count) +
                                               " workers, but there are " +
                                               std::to_string(communicator->worker_count()) + "; trace it again"});
  }
  if (Status status = check_launch_order(*site, run.run_id); !status.ok()) return failed(status);
  Result<RoundRequest> request = make_request(*site, device, args, rets);
  if (!request.ok()) return failed(request.status());

  ffi::Promise promise;
  ffi::Future future(promise);
  request->done = [promise = std::move(promise)](const Status& status) mutable {
    if (status.ok()) {
      promise.SetAvailable();
    } else {
      promise.SetError(to_error(status));
    }
  };
  communicator->start_round(std::move(*request));
  return future;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kInstantiate, instantiate,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<std::string_view>("label")
                                  .Attr<int64_t>("kind")
                                  .Attr<int64_t>("root")
                                  .Attr<int64_t>("worker_count")
                                  .Attr<ffi::Span<const int64_t>>("device_ids")
                                  .Attr<ffi::Span<const int64_t>>("device_lanes"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kExecute, execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attrs()
                                  .RemainingArgs()
                                  .RemainingRets());

}  // namespace

FfiTarget all_reduce_target() {
  static XLA_FFI_TypeInfo type_info = ffi::MakeTypeInfo<CallSite>();
  return {reinterpret_cast<void*>(&kInstantiate), reinterpret_cast<void*>(&kExecute), &CallSite::id, &type_info};
}

void set_current_communicator(std::shared_ptr<Communicator> communicator) {
  const std::lock_guard lock(registry().mutex);
  registry().communicator.swap(communicator);
}

}  // namespace jaxhetero
