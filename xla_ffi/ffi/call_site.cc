#include "xla_ffi/ffi/call_site.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/of_process.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {

namespace ffi = xla::ffi;

namespace {

// What outlives a program and is looked up by name: see set_current_communicator().
struct Registry {
  std::mutex mutex;
  std::shared_ptr<Communicator> communicator;
  uint64_t site_count = 0;
};

Registry& registry() { return of_process<Registry>(); }

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

// The buffers one after the other; or, if each has several rows, the first row of each, the second row of each, ...
Leaves in_rows(const std::vector<iovec>& buffers, size_t row_count) {
  Leaves leaves;
  for (size_t row = 0; row < row_count; ++row) {
    for (const iovec& buffer : buffers) {
      const size_t bytes = buffer.iov_len / row_count;
      leaves.append(static_cast<std::byte*>(buffer.iov_base) + row * bytes, bytes);
    }
  }
  return leaves;
}

// Number, slots, slot, whether it resumes, whether it is backed up, and the column of the device that makes the call.
void describe_state(CallSite& site, const CallSiteAttributes& attributes) {
  const std::vector<uint64_t> state(attributes.state.begin(), attributes.state.end());
  if (state.size() != 7 && state.size() != 9) return;
  const auto update = std::as_bytes(std::span(attributes.update.begin(), attributes.update.size()));
  site.update = std::make_shared<const Bytes>(update.begin(), update.end());
  Hash hash;
  hash.add(std::string_view(reinterpret_cast<const char*>(update.data()), update.size()));
  site.state.number = state[0];
  site.state.slot_count = static_cast<uint32_t>(state[1]);
  site.state.slot = static_cast<uint32_t>(state[2]);
  site.state.resumes = state[3] != 0;
  site.state.is_backed_up = state[4] != 0;
  site.caller = attributes.state.begin()[5];
  site.state.update = hash.value();
  site.state.numbers = static_cast<Numbers>(state[6]);
  if (state.size() == 7) return;
  site.state.averages = state[7] != 0;
  site.state.is_of_all = state[8] != 0;
}

}  // namespace

uint64_t op_of_device(const CallSite& site, int32_t device) {
  const auto column = site.columns.find(device);
  if (column == site.columns.end() || column->second == 0) return site.op;
  Hash hash;
  hash.add(site.op);
  hash.add(static_cast<uint64_t>(column->second));
  return hash.value();
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

ffi::ErrorOr<CallSiteAttributes> read_attributes(const ffi::Dictionary& dictionary) {
  return read_declared<CallSiteAttributes>(dictionary, [](auto&& visit) { for_each_attribute(visit); });
}

// The number of an op must be the same on every worker, however often each of them has compiled the program. So it is
// made of what the call is: its label, its place in the program and its group; and of a call about a state, which state
// and what is done with it. JAX tells the place in the order in which the calls are written, before XLA knows the
// program's constants, by which it may order calls of one label differently on another worker. The members of a group
// may have different programs, so the place counts calls of this label and group alone. Shapes and dtypes do not count:
// reducers compare them round by round, and refuse workers that differ at once.
void describe_call_site(CallSite& site, const CallSiteAttributes& attributes) {
  site.label = attributes.label;
  site.kind = static_cast<Kind>(attributes.kind);
  site.root = static_cast<uint32_t>(attributes.root);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    if (dtype_name(dtype) == attributes.wire_dtype) site.wire_dtype = dtype;
  }
  site.call_bytes = static_cast<uint64_t>(attributes.call_bytes);
  site.worker_count = attributes.worker_count;
  site.group.assign(attributes.group.begin(), attributes.group.end());
  describe_state(site, attributes);
  int64_t last_column = 0;
  for (size_t i = 0; i < std::min(attributes.device_ids.size(), attributes.device_columns.size()); ++i) {
    site.columns.emplace(attributes.device_ids.begin()[i], attributes.device_columns.begin()[i]);
    last_column = std::max(last_column, attributes.device_columns.begin()[i]);
  }
  if (uses_state(site.kind) && last_column > 0) site.outcomes = std::make_unique<SharedOutcomes>(last_column);
  Hash hash;
  hash.add(site.label);
  hash.add(static_cast<uint64_t>(attributes.place));
  if (!site.group.empty()) site.site = hash.value();
  for (const uint32_t rank : site.group) hash.add(uint64_t{rank});
  // XLA does not run programs of one device and of several in the order in which they are launched.
  if (last_column > 0) hash.add(static_cast<uint64_t>(last_column));
  if (uses_state(site.kind)) {
    for (const uint64_t part : {uint64_t(site.kind), site.state.number, uint64_t{site.state.slot}}) hash.add(part);
  }
  site.op = hash.value();
  if (attributes.place > 1) site.label += " call " + std::to_string(attributes.place);
  const std::lock_guard lock(registry().mutex);
  // Compiled in the same order as elsewhere, most often; nothing but speed hangs on that.
  site.sequence = registry().site_count++;
}

bool is_made_elsewhere(const CallSite& site, int32_t device) {
  if (site.outcomes == nullptr) return false;
  const auto column = site.columns.find(device);
  return column != site.columns.end() && column->second != site.caller;
}

Result<std::shared_ptr<Communicator>> communicator_for(const CallSite& site) {
  std::shared_ptr<Communicator> communicator;
  {
    const std::lock_guard lock(registry().mutex);
    communicator = registry().communicator;
  }
  if (communicator == nullptr) {
    return Status(Code::kNotInitialized,
                  site.label +
                      " was run before jaxhetero.initialize(), after shutdown(), or in a forked child, which "
                      "takes no part in its parent's job");
  }
  if (site.worker_count != communicator->worker_count()) {
    return Status(Code::kInvalidArgument, site.label + " was traced for " + std::to_string(site.worker_count) +
                                              " workers, but there are " +
                                              std::to_string(communicator->worker_count()) + "; trace it again");
  }
  return communicator;
}

Result<RoundRequest> make_request(CallSite& site, int64_t run, int32_t device, const ffi::RemainingArgs& args) {
  RoundRequest request;
  request.op = op_of_device(site, device);
  request.sequence = site.sequence;
  request.device = device;
  request.run = run;
  request.spec.kind = site.kind;
  request.spec.root = site.root;
  request.spec.call_bytes = site.call_bytes;
  request.spec.group = site.group;
  request.spec.site = site.site;
  request.spec.leaf_count = static_cast<uint32_t>(args.size());
  const size_t row_count = request.spec.member_count(static_cast<uint32_t>(site.worker_count));
  const size_t operand_rows = site.kind == Kind::kScatter ? row_count : 1;
  const size_t result_rows = site.kind == Kind::kGather ? row_count : 1;
  std::vector<iovec> operands;
  Hash signature;
  std::string shapes;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto input = args.get<ffi::AnyBuffer>(i);
    if (!input.has_value()) return Status(Code::kInternal, "XLA passed an operand that is no buffer");
    const std::optional<DType> dtype = dtype_of(input->element_type());
    if (!dtype.has_value() || (i > 0 && *dtype != request.spec.dtype)) {
      return Status(Code::kInternal, "a bucket of a dtype that cannot be reduced, or of several");
    }
    if (input->size_bytes() % operand_rows != 0) return Status(Code::kInternal, "an operand that has no equal rows");
    request.spec.dtype = *dtype;
    request.spec.total_count += input->element_count() * parts_of(input->element_type()) * result_rows;
    signature.add(static_cast<uint64_t>(input->element_type()));
    signature.add(input->dimensions().size());
    for (int64_t dimension : input->dimensions()) signature.add(static_cast<uint64_t>(dimension));
    operands.push_back({input->untyped_data(), input->size_bytes()});
  }
  request.inputs = in_rows(operands, operand_rows);
  request.spec.signature = signature.folded();
  std::call_once(site.described, [&] {
    for (size_t i = 0; i < args.size(); ++i) describe_shape(shapes, *args.get<ffi::AnyBuffer>(i), request.spec.dtype);
    if (site.wire_dtype.has_value()) shapes += " as " + std::string(dtype_name(*site.wire_dtype));
    site.description = site.label + " (" + shapes + ")";
    if (!site.group.empty()) site.description += " of " + describe_ranks(site.group);
  });
  request.description = site.description;
  return request;
}

Result<RoundRequest> make_request(CallSite& site, int64_t run, int32_t device, const ffi::RemainingArgs& args,
                                  const ffi::RemainingRets& rets) {
  Result<RoundRequest> made = make_request(site, run, device, args);
  if (!made.ok()) return made;
  RoundRequest& request = *made;
  const size_t row_count = request.spec.member_count(static_cast<uint32_t>(site.worker_count));
  const size_t operand_rows = site.kind == Kind::kScatter ? row_count : 1;
  const size_t result_rows = site.kind == Kind::kGather ? row_count : 1;
  std::vector<size_t> result_bytes;
  for (size_t i = 0; i < args.size(); ++i) {
    result_bytes.push_back(args.get<ffi::AnyBuffer>(i)->size_bytes() / operand_rows * result_rows);
  }
  // On a GPU one array has all results.
  if (rets.size() == 1) result_bytes = {std::accumulate(result_bytes.begin(), result_bytes.end(), size_t{0})};
  if (rets.size() != result_bytes.size()) return Status(Code::kInternal, "a bucket without a result for each operand");
  std::vector<iovec> results;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto output = rets.get<ffi::AnyBuffer>(i);
    if (!output.has_value()) return Status(Code::kInternal, "XLA passed a result that is no buffer");
    if (dtype_of((*output)->element_type()) != request.spec.dtype || (*output)->size_bytes() != result_bytes[i]) {
      return Status(Code::kInternal, "a result of another dtype or size than follows from its operand");
    }
    results.push_back({(*output)->untyped_data(), (*output)->size_bytes()});
  }
  request.outputs = in_rows(results, result_rows);
  if (site.wire_dtype.has_value()) {
    if (site.kind != Kind::kSum || request.spec.dtype != DType::kF32) {
      return Status(Code::kInternal, "another dtype on the wire is for sums of float32");
    }
    request.spec.dtype = *site.wire_dtype;
    request.narrows = request.widens = true;
  }
  return made;
}

void register_communicator(std::shared_ptr<Communicator> communicator) {
  const std::lock_guard lock(registry().mutex);
  registry().communicator.swap(communicator);
}

}  // namespace jaxhetero
