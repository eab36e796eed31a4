// What the handlers of all platforms share: a call in a compiled program, and what XLA says about one run of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/ffi/shared_outcomes.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/communicator.h"

namespace jaxhetero {

// One custom call instruction of one compiled program. Each platform has a type of its own made from this, because each
// plugin of XLA numbers the types that it knows by itself.
struct CallSite {
  uint64_t op = 0;
  uint64_t sequence = 0;  // unlike that of any other call of this process
  std::string label;
  Kind kind = Kind::kSum;
  uint32_t root = 0;
  std::optional<DType> wire_dtype;  // set where the operands are float32 and the wire has another dtype
  uint64_t call_bytes = 0;          // the bytes on the wire of the collective that this is a bucket of
  int64_t worker_count = 0;         // the size of the job that the program was traced for
  std::vector<uint32_t> group;      // the group of the OpSpec, like the next two
  uint64_t site = 0;
  StateUse state;
  std::shared_ptr<const Bytes> update;                     // the encoded UpdateDescription of a measure or an update
  std::shared_ptr<const std::vector<uint64_t>> leaf_ends;  // see StepRequest
  std::unordered_map<int64_t, int64_t> columns;            // keyed by device; empty outside a mesh
  int64_t caller = 0;                                      // the column of the device that makes a call about a state
  std::unique_ptr<SharedOutcomes> outcomes;  // set where the devices of other columns share what comes of the call
  std::once_flag described;
  std::string description;
};

// The attributes of the instruction, as jaxhetero/_collectives/primitive.py writes them.
struct CallSiteAttributes {
  std::string_view label;
  int64_t place = 0;  // the call's number among those of its label and group in the program, from 1
  int64_t kind = 0;
  int64_t root = 0;
  std::string_view wire_dtype;  // "bfloat16", "float16", or "" for that of the operands
  int64_t call_bytes = 0;
  int64_t worker_count = 0;
  xla::ffi::Span<const int64_t> group;  // the ranks that take part; empty: all
  xla::ffi::Span<const int64_t> state;  // a StateUse, as describe_state() reads it; or empty
  xla::ffi::Span<const uint8_t> update;
  xla::ffi::Span<const int64_t> device_ids;
  xla::ffi::Span<const int64_t> device_columns;
};

// The declaration of the attributes by name; calls `visit(name, member)` for each.
template <typename Visit>
void for_each_attribute(Visit&& visit) {
  visit("label", &CallSiteAttributes::label);
  visit("place", &CallSiteAttributes::place);
  visit("kind", &CallSiteAttributes::kind);
  visit("root", &CallSiteAttributes::root);
  visit("wire_dtype", &CallSiteAttributes::wire_dtype);
  visit("call_bytes", &CallSiteAttributes::call_bytes);
  visit("worker_count", &CallSiteAttributes::worker_count);
  visit("group", &CallSiteAttributes::group);
  visit("state", &CallSiteAttributes::state);
  visit("update", &CallSiteAttributes::update);
  visit("device_ids", &CallSiteAttributes::device_ids);
  visit("device_columns", &CallSiteAttributes::device_columns);
}

xla::ffi::Error to_error(const Status& status);
xla::ffi::Future failed(const Status& status);

// `for_each` declares the attributes by name. An error names those that are missing, or of another type.
template <typename Attributes, typename ForEach>
xla::ffi::ErrorOr<Attributes> read_declared(const xla::ffi::Dictionary& dictionary, const ForEach& for_each) {
  Attributes attributes;
  std::string unreadable;
  for_each([&]<typename T>(const char* name, T Attributes::* member) {
    const xla::ffi::ErrorOr<T> value = dictionary.get<T>(name);
    if (value.has_value()) {
      attributes.*member = *value;
    } else {
      unreadable += (unreadable.empty() ? "" : ", ") + std::string(name);
    }
  });
  if (unreadable.empty()) return attributes;
  return xla::ffi::Unexpected(to_error({Code::kInternal, "the custom call lacks its attribute " + unreadable}));
}
xla::ffi::ErrorOr<CallSiteAttributes> read_attributes(const xla::ffi::Dictionary& dictionary);

void describe_call_site(CallSite& site, const CallSiteAttributes& attributes);

// The handler that makes call sites of a platform's type.
template <typename Site>
xla::ffi::ErrorOr<std::unique_ptr<Site>> instantiate(xla::ffi::Dictionary dictionary) {
  const xla::ffi::ErrorOr<CallSiteAttributes> attributes = read_attributes(dictionary);
  if (!attributes.has_value()) return xla::ffi::Unexpected(attributes.error());
  auto site = std::make_unique<Site>();
  describe_call_site(*site, *attributes);
  return site;
}

inline auto bind_instantiate() { return xla::ffi::Ffi::BindInstantiate().Attrs(); }

// Each device of a worker reduces with the devices of the same column of the other workers, as an op of its own.
uint64_t op_of_device(const CallSite& site, int32_t device);

// Whether another device of this worker makes the call.
bool is_made_elsewhere(const CallSite& site, int32_t device);

// The communicator, if the call may use it.
Result<std::shared_ptr<Communicator>> communicator_for(const CallSite& site);

// FNV-1a, 64 bit.
class Hash {
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

// The round that this run of the call asks for, with the memory of its operands as XLA has it.
Result<RoundRequest> make_request(CallSite& site, int64_t run, int32_t device, const xla::ffi::RemainingArgs& args);
// The same with the memory of its results as well, and with what changes on the wire.
Result<RoundRequest> make_request(CallSite& site, int64_t run, int32_t device, const xla::ffi::RemainingArgs& args,
                                  const xla::ffi::RemainingRets& rets);

// The one that communicator_for() finds; see set_current_communicator().
void register_communicator(std::shared_ptr<Communicator> communicator);

}  // namespace jaxhetero
