// The native module jaxhetero._simulator: thin bindings, no logic. jaxhetero/simulator checks what it is given.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/simulator/job.h"
#include "xla_ffi/simulator/plan.h"
#include "xla_ffi/simulator/transfers.h"
#include "xla_ffi/simulator/two_hop.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace jaxhetero::simulator {
namespace {

constexpr uint64_t kEventsBetweenSignals = 1'000'000;

// To the end, without the GIL; but Ctrl-C is heard.
template <typename Simulation>
void run(Simulation& simulation) {
  while (true) {
    Result<bool> is_over = [&] {
      const nb::gil_scoped_release unlocked;
      return simulation.run(kEventsBetweenSignals);
    }();
    if (!is_over.ok()) throw std::runtime_error(is_over.status().message());
    if (is_over.value()) return;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

void bind_cluster(nb::module_& module) {
  nb::class_<NetworkConfig>(module, "Network")
      .def(nb::init<>())
      .def_rw("latency_s", &NetworkConfig::latency_s)
      .def_rw("own_host_latency_s", &NetworkConfig::own_host_latency_s)
      .def_rw("packet_bytes", &NetworkConfig::packet_bytes)
      .def_rw("packet_overhead_bytes", &NetworkConfig::packet_overhead_bytes)
      .def_rw("ack_bytes", &NetworkConfig::ack_bytes)
      .def_rw("bytes_per_ack", &NetworkConfig::bytes_per_ack)
      .def_rw("piece_bytes", &NetworkConfig::piece_bytes)
      .def_rw("burst_bytes", &NetworkConfig::burst_bytes)
      .def_rw("flow_bytes_per_s", &NetworkConfig::flow_bytes_per_s)
      .def_rw("queue_bytes", &NetworkConfig::queue_bytes)
      .def_rw("loss_timeout_s", &NetworkConfig::loss_timeout_s)
      .def_rw("hosts_per_leaf", &NetworkConfig::hosts_per_leaf)
      .def_rw("spine_count", &NetworkConfig::spine_count)
      .def_rw("uplink_bytes_per_s", &NetworkConfig::uplink_bytes_per_s);
  nb::class_<Cluster>(module, "Cluster")
      .def(nb::init<>())
      .def_rw("network", &Cluster::network)
      .def(
          "add_processor",
          [](Cluster& cluster, uint32_t core_count, double memory_bytes_per_s) {
            cluster.processors.push_back({core_count, memory_bytes_per_s});
          },
          "core_count"_a, "memory_bytes_per_s"_a)
      .def(
          "add_host",
          [](Cluster& cluster, std::vector<double> interfaces, uint32_t processor) {
            cluster.hosts.push_back({std::move(interfaces), processor});
          },
          "interfaces"_a, "processor"_a);
  nb::class_<Costs>(module, "Costs")
      .def(
          "__init__",
          [](Costs* costs, double s_per_call, double s_per_message, double s_per_byte, double wake_up_s) {
            new (costs) Costs{s_per_call, s_per_message, s_per_byte, wake_up_s};
          },
          nb::kw_only(), "s_per_call"_a, "s_per_message"_a, "s_per_byte"_a, "wake_up_s"_a);
}

void bind_two_hop(nb::module_& module) {
  nb::class_<JobConfig>(module, "Job")
      .def(
          "__init__",
          [](JobConfig* job, std::vector<uint32_t> worker_hosts, std::vector<uint32_t> reducer_hosts,
             uint32_t colocated_count) {
            new (job) JobConfig();
            job->shape.worker_count = static_cast<uint32_t>(worker_hosts.size());
            job->shape.reducer_count = static_cast<uint32_t>(reducer_hosts.size());
            job->shape.colocated_count = colocated_count;
            job->worker_hosts = std::move(worker_hosts);
            job->reducer_hosts = std::move(reducer_hosts);
          },
          "worker_hosts"_a, "reducer_hosts"_a, "colocated_count"_a)
      .def(
          "set_shape",
          [](JobConfig& job, uint32_t chunk_bytes, uint32_t window_chunks, bool measure_rates, uint32_t strands) {
            job.shape.chunk_bytes = chunk_bytes;
            job.shape.window_chunks = window_chunks;
            job.shape.measure_rates = measure_rates;
            job.shape.strands = strands;
          },
          nb::kw_only(), "chunk_bytes"_a, "window_chunks"_a, "measure_rates"_a, "strands"_a)
      .def(
          "add_bucket",
          [](JobConfig& job, uint64_t count, uint8_t dtype, double ready_s, int64_t priority, double needed_s) {
            job.buckets.push_back({count, static_cast<DType>(dtype), ready_s, priority, needed_s});
          },
          "count"_a, "dtype"_a, "ready_s"_a, "priority"_a, "needed_s"_a)
      .def(
          "part_counts", [](const JobConfig& job, const Cluster& cluster) { return part_counts(cluster, job); },
          "cluster"_a)
      .def_rw("strand_count", &JobConfig::strand_count)
      .def_rw("worker_costs", &JobConfig::worker_costs)
      .def_rw("reducer_costs", &JobConfig::reducer_costs)
      .def_rw("call_bytes", &JobConfig::call_bytes)
      .def_rw("step_count", &JobConfig::step_count)
      .def_rw("step_s", &JobConfig::step_s)
      .def_rw("slowdowns", &JobConfig::slowdowns)
      .def_rw("seed", &JobConfig::seed);
  nb::class_<TwoHop>(module, "TwoHop")
      .def(nb::init<const Cluster&, const JobConfig&>(), "cluster"_a, "job"_a)
      .def("run", &run<TwoHop>)
      .def_prop_ro("step_ends_s", &TwoHop::step_ends_s)
      .def_prop_ro("sent_bytes", &TwoHop::sent_bytes)
      .def_prop_ro("received_bytes", &TwoHop::received_bytes)
      .def_prop_ro("busy_s", &TwoHop::busy_s)
      .def_prop_ro("event_count", &TwoHop::event_count)
      .def_prop_ro("lost_count", &TwoHop::lost_count)
      .def_prop_ro("rates_text", &TwoHop::rates_text);
}

void bind_transfers(nb::module_& module) {
  nb::class_<Transfer>(module, "Transfer")
      .def(
          "__init__",
          [](Transfer* transfer, uint32_t from, uint32_t to, uint32_t bytes, double ready_s,
             std::vector<uint32_t> after) { new (transfer) Transfer{from, to, bytes, ready_s, std::move(after)}; },
          "sender"_a, "receiver"_a, "bytes"_a, "ready_s"_a, "after"_a);
  nb::class_<Transfers>(module, "Transfers")
      .def(nb::init<const Cluster&, const Costs&, std::vector<Transfer>>(), "cluster"_a, "costs"_a, "transfers"_a)
      .def("run", &run<Transfers>)
      .def_prop_ro("ends_s", &Transfers::ends_s)
      .def_prop_ro("sent_bytes", &Transfers::sent_bytes)
      .def_prop_ro("event_count", &Transfers::event_count);
}

}  // namespace
}  // namespace jaxhetero::simulator

NB_MODULE(_simulator, module) {
  jaxhetero::simulator::bind_cluster(module);
  jaxhetero::simulator::bind_two_hop(module);
  jaxhetero::simulator::bind_transfers(module);
}
