// The native module jaxhetero._native: thin bindings, no logic. Nothing here holds the GIL while it waits.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "xla_ffi/base/status.h"
#include "xla_ffi/ffi/cuda_handler.h"
#include "xla_ffi/ffi/host_handler.h"
#include "xla_ffi/reducer/server.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/worker/communicator.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace jaxhetero {
namespace {

using NativeStatus = std::pair<std::string, std::string>;
using NativeEvent = std::pair<int, std::string>;
using std::chrono::milliseconds;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

NativeStatus to_python(const Status& status) { return {std::string(exception_name(status.code())), status.message()}; }

std::optional<NativeStatus> to_python(const std::optional<Status>& status) {
  if (!status.has_value()) return std::nullopt;
  return to_python(*status);
}

std::optional<NativeEvent> to_python(const std::optional<Event>& event) {
  if (!event.has_value()) return std::nullopt;
  return NativeEvent{static_cast<int>(event->severity), event->text};
}

Bytes to_bytes(const nb::bytes& bytes) {
  const auto* begin = reinterpret_cast<const std::byte*>(bytes.c_str());
  return {begin, begin + bytes.size()};
}

// What jax.ffi.register_ffi_target() and register_ffi_type() take.
nb::dict to_python(const FfiTarget& target) {
  nb::dict stages;
  stages["instantiate"] = nb::capsule(target.instantiate);
  stages["execute"] = nb::capsule(target.execute);
  nb::dict type;
  type["type_id"] = nb::capsule(target.state_type_id);
  type["type_info"] = nb::capsule(target.state_type_info);
  nb::dict result;
  result["stages"] = stages;
  result["type"] = type;
  return result;
}

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "?";
  return name.data();
}

template <typename Metrics>
void add_refusals(nb::dict& result, const Metrics& metrics) {
  result["refused_count"] = metrics.refused_count;
  result["bad_frame_count"] = metrics.bad_frame_count;
  result["checksum_mismatch_count"] = metrics.checksum_mismatch_count;
}

void bind_reducer_server(nb::module_& module) {
  nb::class_<ReducerServer>(module, "ReducerServer")
      .def(
          "__init__",
          [](ReducerServer* self, std::string coordinator, const nb::bytes& token, std::string host, uint16_t port,
             int32_t colocated_rank, int64_t start_timeout_ms, int64_t timeout_ms) {
            new (self) ReducerServer({std::move(coordinator), to_bytes(token), std::move(host), port, colocated_rank,
                                      host_name(), JAXHETERO_VERSION, milliseconds(start_timeout_ms),
                                      milliseconds(timeout_ms)});
          },
          nb::kw_only(), "coordinator"_a, "token"_a, "host"_a, "port"_a, "colocated_rank"_a = -1, "start_timeout_ms"_a,
          "timeout_ms"_a)
      .def(
          "start", [](ReducerServer& self) { return to_python(self.start()); }, Unlocked())
      .def(
          "wait", [](ReducerServer& self, int64_t ms) { return self.wait(milliseconds(ms)).has_value(); },
          "timeout_ms"_a, Unlocked())
      .def(
          "result", [](ReducerServer& self) { return to_python(self.wait(milliseconds(0)).value_or(Status())); },
          Unlocked())
      .def("stop", &ReducerServer::stop, Unlocked())
      .def(
          "next_event", [](ReducerServer& self, int64_t ms) { return to_python(self.next_event(milliseconds(ms))); },
          "timeout_ms"_a, Unlocked())
      .def("metrics", [](const ReducerServer& self) {
        const ReducerMetrics metrics = self.metrics();
        nb::dict result;
        result["sent_bytes"] = metrics.sent_bytes;
        result["received_bytes"] = metrics.received_bytes;
        result["round_count"] = metrics.round_count;
        add_refusals(result, metrics);
        return result;
      });
}

void bind_communicator(nb::module_& module) {
  nb::class_<Communicator>(module, "Communicator")
      .def(nb::new_([](uint32_t rank, uint32_t worker_count, uint32_t reducer_count, uint32_t colocated_count,
                       std::string coordinator, std::string source, const nb::bytes& token, int64_t start_timeout_ms,
                       int64_t timeout_ms, uint32_t chunk_bytes, uint32_t window_chunks, bool checksum, bool failover,
                       bool measure_rates, bool shared_memory) {
             CommunicatorConfig config;
             config.rank = rank;
             config.job = {worker_count,  reducer_count, colocated_count, chunk_bytes,
                           window_chunks, checksum,      failover,        measure_rates};
             config.coordinator = std::move(coordinator);
             config.source = std::move(source);
             config.token = to_bytes(token);
             config.host_name = host_name();
             config.version = JAXHETERO_VERSION;
             config.start_timeout = milliseconds(start_timeout_ms);
             config.timeout = milliseconds(timeout_ms);
             config.shared_memory = shared_memory;
             return std::make_shared<Communicator>(std::move(config));
           }),
           nb::kw_only(), "rank"_a, "worker_count"_a, "reducer_count"_a, "colocated_count"_a, "coordinator"_a,
           "source"_a = "", "token"_a, "start_timeout_ms"_a, "timeout_ms"_a, "chunk_bytes"_a, "window_chunks"_a,
           "checksum"_a, "failover"_a, "measure_rates"_a, "shared_memory"_a)
      .def(
          "start", [](Communicator& self) { return to_python(self.start()); }, Unlocked())
      .def(
          "wait_ready", [](Communicator& self, int64_t ms) { return to_python(self.wait_ready(milliseconds(ms))); },
          "timeout_ms"_a, Unlocked())
      .def(
          "shutdown", [](Communicator& self, int64_t ms) { return to_python(self.shutdown(milliseconds(ms))); },
          "timeout_ms"_a, Unlocked())
      .def(
          "next_event", [](Communicator& self, int64_t ms) { return to_python(self.next_event(milliseconds(ms))); },
          "timeout_ms"_a, Unlocked())
      .def("failure", [](const Communicator& self) { return to_python(self.failure()); })
      .def("metrics",
           [](const Communicator& self) {
             const CommunicatorMetrics metrics = self.metrics();
             nb::dict result;
             result["sent_bytes"] = metrics.sent_bytes;
             result["received_bytes"] = metrics.received_bytes;
             result["round_count"] = metrics.round_count;
             result["busy_us"] = metrics.busy_us;
             result["view_count"] = metrics.view_count;
             result["kept_bytes"] = metrics.kept_bytes;
             result["shared_connection_count"] = metrics.shared_connection_count;
             result["lent_bytes"] = metrics.lent_bytes;
             add_refusals(result, metrics);
             return result;
           })
      .def("timeline",
           [](const Communicator& self) {
             const auto seconds = [](RoundRecord::Time time) {
               return std::chrono::duration<double>(time.time_since_epoch()).count();
             };
             nb::list result;
             for (const RoundRecord& record : self.timeline()) {
               result.append(nb::make_tuple(record.description, record.number, record.bytes, seconds(record.requested),
                                            seconds(record.first_push), seconds(record.first_result),
                                            seconds(record.end)));
             }
             return result;
           })
      .def("make_current", [](const std::shared_ptr<Communicator>& self) { set_current_communicator(self); });
}

}  // namespace
}  // namespace jaxhetero

NB_MODULE(_native, module) {
  using namespace jaxhetero;
  module.attr("version") = JAXHETERO_VERSION;
  bind_reducer_server(module);
  bind_communicator(module);
  module.def(
      "clear_current",
      [] {
        set_current_communicator(nullptr);
        clear_cuda_lanes();
      },
      Unlocked());
  module.def(
      "set_cuda_options",
      [](std::string driver_path, std::vector<int32_t> devices, uint32_t rank, size_t pinned_bytes,
         int64_t timeout_ms) {
        set_cuda_options({std::move(driver_path), std::move(devices), rank, pinned_bytes, milliseconds(timeout_ms)});
      },
      nb::kw_only(), "driver_path"_a, "devices"_a, "rank"_a, "pinned_bytes"_a, "timeout_ms"_a);
  module.def("cuda_failure", [] { return to_python(cuda_failure()); });
  module.def(
      "drain_cuda_lanes", [](int64_t ms) { return drain_cuda_lanes(milliseconds(ms)); }, "timeout_ms"_a, Unlocked());
  module.def("host_target", [] { return to_python(all_reduce_target()); });
  module.def("cuda_target", [] { return to_python(cuda_all_reduce_target()); });
  module.def("stand_in_target", [] { return to_python(stand_in_all_reduce_target()); });
}
