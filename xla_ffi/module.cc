// The native module jaxhetero._native: thin bindings, no logic. Nothing here holds the GIL while it waits.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/channel/transfer.h"
#include "xla_ffi/fabric/library.h"
#include "xla_ffi/ffi/call_site.h"
#include "xla_ffi/ffi/cuda_handler.h"
#include "xla_ffi/ffi/exchange_handler.h"
#include "xla_ffi/ffi/host_handler.h"
#include "xla_ffi/ffi/pending_handler.h"
#include "xla_ffi/membership/coordinator_server.h"
#include "xla_ffi/membership/visit.h"
#include "xla_ffi/reducer/server.h"
#include "xla_ffi/transport/tcp_address.h"
#include "xla_ffi/transport/trial.h"
#include "xla_ffi/update/program.h"
#include "xla_ffi/update/run.h"
#include "xla_ffi/update/tensor_sum.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/worker/communicator.h"
#include "xla_ffi/worker/shard_plan.h"

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

Bytes to_bytes(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

// Settings come as one mapping; each is taken by the name under which its config struct declares it.
class Settings {
 public:
  explicit Settings(const nb::dict& values) : values_(values) {}

  template <typename T>
  void take(const char* name, T& into) const {
    into = nb::cast<T>(values_[name]);
  }
  void take(const char* name, milliseconds& into) const { into = milliseconds(nb::cast<int64_t>(values_[name])); }
  void take(const char* name, Compress& into) const {
    const auto text = nb::cast<std::string>(values_[name]);
    into = text == "always" ? Compress::kAlways : text == "never" ? Compress::kNever : Compress::kWhereFaster;
  }
  void take(const char* name, Bytes& into) const { into = to_bytes(nb::cast<std::string>(values_[name])); }

 private:
  const nb::dict& values_;
};

// An object that native threads use. A forked child has its memory without them, and one may have held its locks: so it
// is never destroyed there.
template <typename T, typename... Arguments>
std::shared_ptr<T> make_with_threads(Arguments&&... arguments) {
  const auto drop = [maker = getpid()](T* made) {
    if (getpid() == maker) delete made;
  };
  return {new T(std::forward<Arguments>(arguments)...), drop};
}

CommunicatorConfig communicator_config(const nb::dict& values) {
  const Settings settings(values);
  CommunicatorConfig config;
  for_each_setting([&](const char* name, auto member) { settings.take(name, config.job.*member); });
  for_each_worker_setting([&](const char* name, auto member) { settings.take(name, config.*member); });
  config.host_name = host_name();
  config.version = JAXHETERO_VERSION;
  return config;
}

ReducerServerConfig reducer_config(const nb::dict& values) {
  const Settings settings(values);
  ReducerServerConfig config;
  for_each_reducer_setting([&](const char* name, auto member) { settings.take(name, config.*member); });
  config.host_name = host_name();
  config.version = JAXHETERO_VERSION;
  return config;
}

CoordinatorServerConfig coordinator_config(const nb::dict& values) {
  const Settings settings(values);
  CoordinatorServerConfig config;
  for_each_coordinator_setting([&](const char* name, auto member) { settings.take(name, config.*member); });
  config.version = JAXHETERO_VERSION;
  return config;
}

// What Python has to give, by name, for the test that holds its own declarations against these.
nb::dict declared_names() {
  nb::list worker;
  nb::list reducer;
  nb::list coordinator;
  nb::list call;
  nb::list exchange;
  nb::list start;
  nb::list done;
  nb::list metrics;
  for_each_setting([&](const char* name, auto) { worker.append(name); });
  for_each_worker_setting([&](const char* name, auto) { worker.append(name); });
  for_each_reducer_setting([&](const char* name, auto) { reducer.append(name); });
  for_each_coordinator_setting([&](const char* name, auto) { coordinator.append(name); });
  for_each_attribute([&](const char* name, auto) { call.append(name); });
  for_each_exchange_attribute([&](const char* name, auto) { exchange.append(name); });
  for_each_start_attribute([&](const char* name, auto) { start.append(name); });
  for_each_done_attribute([&](const char* name, auto) { done.append(name); });
  for_each_counter([&](const char* name, auto, auto) { metrics.append(name); });
  nb::dict names;
  names["worker settings"] = worker;
  names["reducer settings"] = reducer;
  names["coordinator settings"] = coordinator;
  names["call attributes"] = call;
  names["exchange attributes"] = exchange;
  names["start attributes"] = start;
  names["done attributes"] = done;
  names["metrics"] = metrics;
  return names;
}

nb::dict to_python(const Metrics& metrics) {
  nb::dict counts;
  for_each_counter([&](const char* name, auto, auto metric) { counts[name] = metrics.*metric; });
  return counts;
}

std::optional<std::pair<uint64_t, uint32_t>> to_python(const std::optional<Place::Known>& place) {
  if (!place.has_value()) return std::nullopt;
  return std::pair(place->job_id, place->number);
}

double to_python(RoundRecord::Time time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); }

nb::tuple to_python(const Timeline::Entry& entry) {
  const RoundRecord& record = entry.record;
  nb::list parts;
  for (const RoundRecord::Part& part : entry.parts) {
    parts.append(nb::make_tuple(part.reducer, part.bytes, to_python(part.end)));
  }
  return nb::make_tuple(record.description, record.number, record.bytes, to_python(record.requested),
                        to_python(record.first_push), to_python(record.first_result), to_python(record.end), parts);
}

nb::tuple to_python(const ViewRecord& view) {
  return nb::make_tuple(view.number, view.why, view.workers, view.reducers, to_python(view.halted),
                        to_python(view.begun));
}

// (status, what, gate, view, ranks, joining)
using PythonTurn = std::tuple<std::pair<std::string, std::string>, std::string, uint64_t, uint32_t,
                              std::vector<uint32_t>, std::vector<uint32_t>>;

std::optional<PythonTurn> to_python(Result<std::optional<Gate::Turn>> found) {
  if (!found.ok()) return PythonTurn{to_python(found.status()), "", 0, 0, {}, {}};
  if (!found->has_value()) return std::nullopt;
  Gate::Turn& turn = **found;
  static constexpr std::array kNames{"pass", "meet", "give", "take", "leave"};
  return PythonTurn{
      to_python(Status()),    kNames.at(static_cast<size_t>(turn.what)), turn.gate, turn.view, std::move(turn.ranks),
      std::move(turn.joining)};
}

nb::list to_python(const std::vector<ProcessState::LateWorker>& workers) {
  nb::list late;
  for (const auto& worker : workers) late.append(nb::make_tuple(worker.rank, worker.waited_ms));
  return late;
}

// The memory of Python objects that have the buffer protocol. Made and destroyed with the GIL.
class Buffers {
 public:
  Buffers(const nb::list& objects, int flags) {
    views_.reserve(objects.size());  // a Py_buffer may point into itself
    for (const nb::handle object : objects) {
      views_.emplace_back();
      if (PyObject_GetBuffer(object.ptr(), &views_.back(), flags) == 0) continue;
      views_.pop_back();
      release();
      throw nb::python_error();
    }
  }
  ~Buffers() { release(); }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  [[nodiscard]] Leaves memory() const {
    Leaves leaves;
    for (const Py_buffer& view : views_) leaves.append(view.buf, static_cast<size_t>(view.len));
    return leaves;
  }

 private:
  void release() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
    views_.clear();
  }

  std::vector<Py_buffer> views_;
};

// A transfer, and the memory that it moves: given back as soon as somebody sees that it is done.
class BoundTransfer {
 public:
  BoundTransfer(std::shared_ptr<Transfer> transfer, std::unique_ptr<Buffers> buffers)
      : transfer_(std::move(transfer)), buffers_(std::move(buffers)) {}
  // Python's side holds the object until the transfer is done. If it does not, the memory stays for ever, which is
  // better than to let the network have what belongs to somebody else.
  ~BoundTransfer() {
    if (!transfer_->is_done()) [[maybe_unused]]
      const Buffers* const kept = buffers_.release();
  }
  BoundTransfer(const BoundTransfer&) = delete;
  BoundTransfer& operator=(const BoundTransfer&) = delete;

  bool is_done() {
    const bool done = transfer_->is_done();
    if (done) buffers_.reset();
    return done;
  }
  std::optional<Status> wait(milliseconds patience) {
    std::optional<Status> result;
    {
      const nb::gil_scoped_release unlocked;
      result = transfer_->wait(patience);
    }
    if (result.has_value()) buffers_.reset();
    return result;
  }

 private:
  const std::shared_ptr<Transfer> transfer_;
  std::unique_ptr<Buffers> buffers_;  // used with the GIL
};

std::shared_ptr<BoundTransfer> post(Communicator& communicator, Transfer::Direction direction, uint32_t peer,
                                    uint32_t channel, const nb::list& objects, uint64_t tag, std::string text) {
  const bool sends = direction == Transfer::Direction::kSend;
  auto buffers = std::make_unique<Buffers>(objects, sends ? PyBUF_SIMPLE : PyBUF_WRITABLE);
  Transfer::Message message{peer, channel, tag, std::move(text), buffers->memory()};
  return make_with_threads<BoundTransfer>(communicator.post(direction, std::move(message)), std::move(buffers));
}

void bind_transfer(nb::module_& module) {
  nb::class_<BoundTransfer>(module, "Transfer")
      .def("done", &BoundTransfer::is_done)
      .def(
          "wait", [](BoundTransfer& self, int64_t ms) { return to_python(self.wait(milliseconds(ms))); },
          "timeout_ms"_a);
}

void bind_coordinator_server(nb::module_& module) {
  nb::class_<CoordinatorServer>(module, "CoordinatorServer")
      .def(nb::new_([](const nb::dict& settings) {
             return make_with_threads<CoordinatorServer>(coordinator_config(settings));
           }),
           "settings"_a)
      .def(
          "start", [](CoordinatorServer& self) { return to_python(self.start()); }, Unlocked())
      .def(
          "wait", [](CoordinatorServer& self, int64_t ms) { return self.wait(milliseconds(ms)).has_value(); },
          "timeout_ms"_a, Unlocked())
      .def(
          "result", [](CoordinatorServer& self) { return to_python(self.wait(milliseconds(0)).value_or(Status())); },
          Unlocked())
      .def("stop", &CoordinatorServer::stop, Unlocked())
      .def(
          "next_event",
          [](CoordinatorServer& self, int64_t ms) { return to_python(self.next_event(milliseconds(ms))); },
          "timeout_ms"_a, Unlocked());
}

void bind_reducer_server(nb::module_& module) {
  nb::class_<ReducerServer>(module, "ReducerServer")
      .def(
          nb::new_([](const nb::dict& settings) { return make_with_threads<ReducerServer>(reducer_config(settings)); }),
          "settings"_a)
      .def(
          "start", [](ReducerServer& self) { return to_python(self.start()); }, Unlocked())
      .def(
          "wait", [](ReducerServer& self, int64_t ms) { return self.wait(milliseconds(ms)).has_value(); },
          "timeout_ms"_a, Unlocked())
      .def(
          "result", [](ReducerServer& self) { return to_python(self.wait(milliseconds(0)).value_or(Status())); },
          Unlocked())
      .def("lost_number", &ReducerServer::lost_number, Unlocked())
      .def("stop", &ReducerServer::stop, Unlocked())
      .def(
          "next_event", [](ReducerServer& self, int64_t ms) { return to_python(self.next_event(milliseconds(ms))); },
          "timeout_ms"_a, Unlocked())
      .def("place", [](const ReducerServer& self) { return to_python(self.place()); })
      .def("late_workers", [](ReducerServer& self) { return to_python(self.late_workers()); })
      .def("metrics", [](const ReducerServer& self) { return to_python(self.metrics()); });
}

nb::dict to_python(const ProcessState& state) {
  nb::dict found;
  found["view"] = state.view;
  found["round_count"] = state.round_count;
  found["sent_bytes"] = state.sent_bytes;
  found["received_bytes"] = state.received_bytes;
  found["round"] = state.round;
  found["waited_ms"] = state.waited_ms;
  found["late_workers"] = to_python(state.late_workers);
  return found;
}

nb::dict to_python(const JobState& job) {
  nb::list processes;
  for (const JobState::Process& process : job.processes) {
    nb::dict found;
    found["is_worker"] = process.role == Role::kWorker;
    found["rank"] = process.rank;
    found["number"] = process.number;
    found["host"] = process.host_name;
    found["address"] = process.address;
    found["is_member"] = process.is_member;
    found["is_candidate"] = process.is_candidate;
    found["silent_ms"] = process.silent_ms;
    found["rate_percent"] = process.rate_percent;
    found["state"] = process.has_answered ? nb::object(to_python(process.state)) : nb::none();
    processes.append(found);
  }
  nb::dict found;
  found["job_id"] = job.job_id;
  found["view"] = job.view;
  found["has_started"] = job.has_started;
  found["worker_count"] = job.worker_count;
  found["most_workers"] = job.most_workers;
  found["reducer_count"] = job.reducer_count;
  found["missing"] = job.missing;
  found["processes"] = processes;
  return found;
}

// The state of the job at a coordinator, or why there is none.
std::pair<NativeStatus, nb::object> visit_job(const std::string& coordinator, const std::string& token, bool encrypt,
                                              int64_t ms) {
  Result<JobState> job = [&]() -> Result<JobState> {
    const nb::gil_scoped_release unlocked;
    Result<std::vector<TcpAddress>> addresses = resolve_all(coordinator);
    if (!addresses.ok()) return addresses.status();
    return visit(*addresses, to_bytes(token), encrypt, milliseconds(ms));
  }();
  if (!job.ok()) return {to_python(job.status()), nb::none()};
  return {to_python(Status()), to_python(*job)};
}

void bind_trial(nb::module_& module) {
  nb::class_<TrialServer>(module, "TrialServer").def("port", &TrialServer::port);
  module.def(
      "serve_trial",
      [](const std::string& host, const std::string& token) -> std::pair<NativeStatus, std::shared_ptr<TrialServer>> {
        Result<TcpAddress> address = resolve(host, 0);
        if (!address.ok()) return {to_python(address.status()), nullptr};
        Result<std::unique_ptr<TrialServer>> server = TrialServer::start(*address, to_bytes(token));
        if (!server.ok()) return {to_python(server.status()), nullptr};
        return {to_python(Status()), std::shared_ptr<TrialServer>(std::move(*server))};
      },
      "host"_a, "token"_a, Unlocked());
  module.def(
      "run_trial",
      [](const std::string& source, const std::string& host, uint16_t port, const std::string& token,
         const std::string& fabric, int64_t duration_ms,
         int64_t patience_ms) -> std::tuple<NativeStatus, std::string, double> {
        Result<TcpAddress> own = resolve(source, 0);
        Result<TcpAddress> server = resolve(host, port);
        for (const Status& status : {own.status(), server.status()}) {
          if (!status.ok()) return {to_python(status), "", 0};
        }
        Result<TrialResult> result =
            run_trial(*server, {*own, to_bytes(token), fabric, milliseconds(duration_ms), milliseconds(patience_ms)});
        if (!result.ok()) return {to_python(result.status()), "", 0};
        return {to_python(Status()), result->provider, result->bytes_per_s};
      },
      "source"_a, "host"_a, "port"_a, "token"_a, "fabric"_a, "duration_ms"_a, "patience_ms"_a, Unlocked());
}

void bind_communicator(nb::module_& module) {
  nb::class_<Communicator>(module, "Communicator")
      .def(nb::new_(
               [](const nb::dict& settings) { return make_with_threads<Communicator>(communicator_config(settings)); }),
           "settings"_a)
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
      .def(
          "post_send",
          [](Communicator& self, uint32_t peer, uint32_t channel, const nb::list& buffers, uint64_t tag,
             std::string text) {
            return post(self, Transfer::Direction::kSend, peer, channel, buffers, tag, std::move(text));
          },
          "peer"_a, "channel"_a, "buffers"_a, "tag"_a, "text"_a)
      .def(
          "post_receive",
          [](Communicator& self, uint32_t peer, uint32_t channel, const nb::list& buffers, uint64_t tag,
             std::string text) {
            return post(self, Transfer::Direction::kReceive, peer, channel, buffers, tag, std::move(text));
          },
          "peer"_a, "channel"_a, "buffers"_a, "tag"_a, "text"_a)
      .def("failure", [](const Communicator& self) { return to_python(self.failure()); })
      .def("metrics", [](const Communicator& self) { return to_python(self.metrics()); })
      .def("place", [](const Communicator& self) { return to_python(self.place()); })
      .def("slow_rank", &Communicator::slow_rank)
      .def("slow_reducers",
           [](const Communicator& self) {
             nb::list slow;
             for (const auto& [number, percent] : self.slow_reducers()) slow.append(nb::make_tuple(number, percent));
             return slow;
           })
      .def("members", &Communicator::members)
      .def(
          "wait_at_gate", [](Communicator& self, int64_t ms) { return to_python(self.wait_at_gate(milliseconds(ms))); },
          "timeout_ms"_a, Unlocked())
      .def("say_given", &Communicator::say_given, "view"_a)
      .def("say_met", &Communicator::say_met)
      .def("is_candidate", &Communicator::is_candidate)
      .def("say_present", &Communicator::say_present, "view"_a)
      .def("ask_to_leave", &Communicator::ask_to_leave)
      .def(
          "timeline",
          [](Communicator& self, uint64_t since) {
            const Timeline::Entries found = self.timeline().since(since);
            nb::list rounds;
            for (const Timeline::Entry& entry : found.rounds) rounds.append(to_python(entry));
            return nb::make_tuple(found.first, rounds);
          },
          "since"_a = 0)
      .def(
          "views",
          [](Communicator& self, uint32_t number) {
            nb::list views;
            for (const ViewRecord& view : self.timeline().views_from(number)) views.append(to_python(view));
            return views;
          },
          "number"_a = 0)
      .def(
          "keep_timeline", [](Communicator& self, size_t most_records) { self.timeline().keep(most_records); },
          "most_records"_a)
      .def("round_times",
           [](Communicator& self) {
             const RoundTimes times = self.timeline().times();
             return nb::make_tuple(std::vector<double>(RoundTimes::kEdgesS.begin(), RoundTimes::kEdgesS.end()),
                                   std::vector<uint64_t>(times.counts.begin(), times.counts.end()), times.sum_s);
           })
      .def("make_current", [](const std::shared_ptr<Communicator>& self) { set_current_communicator(self); });
}

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Memory = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SubtreeTuple = std::tuple<uint64_t, uint32_t, double>;

// For tests and benchmarks: reducers load and run programs themselves.
std::pair<NativeStatus, std::unique_ptr<Runner>> load_program(const nb::bytes& encoded) {
  const auto bytes = std::as_bytes(std::span(encoded.c_str(), encoded.size()));
  Result<Program> program = decode_program(bytes);
  if (!program.ok()) return {to_python(program.status()), nullptr};
  return {to_python(Status()), std::make_unique<Runner>(std::move(*program))};
}

std::pair<NativeStatus, std::vector<std::vector<SubtreeTuple>>> run_program(Runner& runner,
                                                                            const std::vector<Floats>& inputs,
                                                                            const Floats& scalars,
                                                                            const std::vector<Memory>& outputs,
                                                                            uint64_t first) {
  std::vector<std::span<const float>> from;
  std::vector<std::span<std::byte>> to;
  for (const Floats& input : inputs) from.emplace_back(input.data(), input.size());
  for (const Memory& output : outputs) to.emplace_back(static_cast<std::byte*>(output.data()), output.nbytes());
  std::vector<PieceSum> totals(runner.program().summands.size(), PieceSum(first));
  const size_t count = from.empty() ? 1 : from[0].size();
  const Status status = [&] {
    const nb::gil_scoped_release unlocked;
    return runner.run({from, {scalars.data(), scalars.size()}, to, count, first}, totals);
  }();
  std::vector<std::vector<SubtreeTuple>> found(totals.size());
  for (size_t i = 0; i < totals.size(); ++i) {
    for (const Subtree& subtree : totals[i].subtrees())
      found[i].emplace_back(subtree.first, subtree.level, subtree.sum);
  }
  return {to_python(status), std::move(found)};
}

std::pair<NativeStatus, float> sum_of_pieces(const std::vector<SubtreeTuple>& subtrees, uint64_t count) {
  std::vector<Subtree> pieces;
  for (const auto& [first, level, sum] : subtrees) pieces.push_back({first, level, sum});
  Result<float> total = sum_of_tensor(std::move(pieces), count);
  return {to_python(total.status()), total.ok() ? *total : 0.0f};
}

void bind_programs(nb::module_& module) {
  nb::class_<Runner>(module, "ProgramRunner")
      .def_prop_ro("kernel", [](const Runner& self) { return std::string(self.kernel()); })
      .def(
          "choose",
          [](Runner& self, bool interpret, bool baseline) {
            if (interpret) self.interpret();
            if (baseline) self.use_baseline();
          },
          "interpret"_a, "baseline"_a)
      .def("run", run_program, "inputs"_a, "scalars"_a, "outputs"_a, "first"_a);
  module.def("load_program", load_program, "encoded"_a);
  module.def("sum_of_tensor", sum_of_pieces, "subtrees"_a, "count"_a);
}

}  // namespace
}  // namespace jaxhetero

NB_MODULE(_native, module) {
  using namespace jaxhetero;
  module.attr("version") = JAXHETERO_VERSION;
  // Of a forked child's parent, threads that only the parent has hold some objects: no leak of ours.
  pthread_atfork(nullptr, nullptr, [] { nb::set_leak_warnings(false); });
  module.attr("declared_names") = declared_names();
  bind_coordinator_server(module);
  bind_reducer_server(module);
  bind_transfer(module);
  bind_communicator(module);
  bind_trial(module);
  bind_programs(module);
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
  module.def(
      "find_fabrics",
      [](const std::string& wanted) {
        std::vector<std::pair<std::string, std::string>> found;
        const std::vector<std::string> providers = providers_of(wanted);
        if (providers.empty()) return std::pair(to_python(Status()), found);
        auto library = FabricLibrary::open();
        if (!library.ok()) return std::pair(to_python(library.status()), found);
        for (const FabricDevice& device : (*library)->devices()) {
          if (std::ranges::find(providers, device.provider) != providers.end())
            found.emplace_back(device.provider, device.domain);
        }
        return std::pair(to_python(Status()), found);
      },
      "wanted"_a, Unlocked());
  module.def(
      "best_s_per_byte",
      [](const std::vector<double>& worker_rates, const std::vector<double>& reducer_rates, uint32_t colocated_count) {
        return best_s_per_byte(worker_rates, reducer_rates, colocated_count);
      },
      "worker_rates"_a, "reducer_rates"_a, "colocated_count"_a);
  module.def("visit", visit_job, "coordinator"_a, "token"_a, "encrypt"_a, "timeout_ms"_a);
  module.def("cuda_failure", [] { return to_python(cuda_failure()); });
  module.def(
      "drain_cuda_lanes", [](int64_t ms) { return drain_cuda_lanes(milliseconds(ms)); }, "timeout_ms"_a, Unlocked());
  module.def("host_target", [] { return to_python(all_reduce_target()); });
  module.def("exchange_target", [] { return to_python(exchange_target()); });
  module.def("start_target", [] { return to_python(start_target()); });
  module.def("done_target", [] { return to_python(done_target()); });
  module.def("cuda_target", [] { return to_python(cuda_all_reduce_target()); });
  module.def("cuda_start_target", [] { return to_python(cuda_start_target()); });
  module.def("cuda_done_target", [] { return to_python(cuda_done_target()); });
  module.def("stand_in_target", [] { return to_python(stand_in_all_reduce_target()); });
  module.def("stand_in_start_target", [] { return to_python(stand_in_start_target()); });
  module.def("stand_in_done_target", [] { return to_python(stand_in_done_target()); });
}
