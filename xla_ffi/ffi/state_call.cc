#include "xla_ffi/ffi/state_call.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/update/bucket_update.h"
#include "xla_ffi/update/tensor_sum.h"

namespace jaxhetero {

namespace ffi = xla::ffi;

namespace {

Status unlike(const char* what) { return {Code::kInternal, std::string("a call for a state with ") + what}; }

// The sums over tensors that come from the reducers, part by part.
class Totals {
 public:
  explicit Totals(const UpdateDescription& update) : parts_(update.total_count), counts_(update.total_count) {
    for (const LeafUpdate& leaf : update.leaves) {
      for (const uint32_t total : leaf.totals) {
        if (total < counts_.size()) counts_[total] = leaf.count;
      }
    }
  }

  // Any thread.
  void add(const StepTotals& totals) {
    const std::lock_guard lock(mutex_);
    for (const StepTotals::Part& part : totals.parts) {
      if (part.total >= parts_.size()) continue;  // such a part is wrong, and then something is missing elsewhere
      parts_[part.total].push_back({part.first, part.level, std::bit_cast<double>(part.sum)});
    }
  }
  // All of them; 0 for those of other buckets.
  Result<std::vector<float>> values() {
    const std::lock_guard lock(mutex_);
    std::vector<float> values(parts_.size(), 0.0F);
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (counts_[i] == 0) continue;
      Result<float> sum = sum_of_tensor(std::move(parts_[i]), counts_[i]);
      if (!sum.ok()) return sum.status();
      values[i] = *sum;
    }
    return values;
  }

 private:
  std::mutex mutex_;
  // By total.
  std::vector<std::vector<Subtree>> parts_;
  std::vector<uint64_t> counts_;  // the elements of its tensor
};

Result<DType> float_dtype(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F16:
      return DType::kF16;
    default:
      return unlike("leaves that are no floats");
  }
}

uint64_t count_of(const UpdateDescription& update) {
  uint64_t count = 0;
  for (const LeafUpdate& leaf : update.leaves) count += leaf.count;
  return count;
}

void append(const ffi::AnyBuffer& buffer, Leaves& leaves) { leaves.append(buffer.untyped_data(), buffer.size_bytes()); }

// Makes a call of its buffers. Each kind of call has its own list of them: see make_state_call().
class BufferReader {
 public:
  BufferReader(const CallSite& site, StateCall& call) : site_(site), call_(call), spec_(call.request.spec) {}

  Status read(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
    if (const Status status = collect(args); !status.ok()) return status;
    if (const Status status = collect(rets); !status.ok()) return status;
    switch (site_.kind) {
      case Kind::kStore:
        return read_store();
      case Kind::kLoad:
        return read_load();
      case Kind::kMeasure:
        return read_measure();
      default:
        return read_update();
    }
  }

  // Those of a start, whose results are none of XLA's.
  Status read_start(const ffi::RemainingArgs& args, StateStart& start) {
    if (site_.kind != Kind::kMeasure && site_.kind != Kind::kUpdate) return unlike("nothing to start");
    if (const Status status = collect(args); !status.ok()) return status;
    const Result<UpdateDescription> decoded = decode_update(*site_.update);
    if (!decoded.ok()) return decoded.status();
    const UpdateDescription& update = decoded.value();
    if (const Status status = read_gradients(update.leaves.size()); !status.ok()) return status;
    if (const Status status = set_size(count_of(update), update.leaves.size()); !status.ok()) return status;
    start.step_result_bytes = sizeof(uint32_t);
    if (site_.kind == Kind::kMeasure) {
      totals_ = std::make_shared<Totals>(update);
      start.step_result_bytes += update.total_count * sizeof(float);
    } else {
      spec_.state.weights = update.weights == OutputType::kBF16 ? DType::kBF16 : DType::kF32;
      start.output_bytes = spec_.total_count * item_bytes(spec_.state.weights);
    }
    return {};
  }

  // Of a measure; else null.
  [[nodiscard]] const std::shared_ptr<Totals>& totals() const { return totals_; }

 private:
  Status collect(const ffi::RemainingArgs& args) {
    for (size_t i = 0; i < args.size(); ++i) {
      const auto operand = args.get<ffi::AnyBuffer>(i);
      if (!operand.has_value()) return unlike("something else than buffers");
      operands_.push_back(*operand);
    }
    const bool has_version = !operands_.empty() && has_words(operands_.back());
    return has_version ? Status() : unlike("no version");
  }

  Status collect(const ffi::RemainingRets& rets) {
    for (size_t i = 0; i < rets.size(); ++i) {
      auto result = rets.get<ffi::AnyBuffer>(i);
      if (!result.has_value()) return unlike("something else than buffers");
      results_.push_back(**result);
    }
    const bool has_version = !results_.empty() && (is_packed() || has_words(results_.back(), 1));
    return has_version ? Status() : unlike("no version");
  }

  Status read_store() {
    if (const Status status = read_operands(operands_.size() - 1); !status.ok()) return status;
    append(results_.back(), call_.step_results);
    return {};
  }

  Status read_load() {
    if (const Status status = read_operands(0); !status.ok()) return status;
    if (const Status status = read_weights(spec_.dtype); !status.ok()) return status;
    append(results_.back(), call_.step_results);
    return {};
  }

  Status read_measure() {
    const Result<UpdateDescription> decoded = decode_update(*site_.update);
    if (!decoded.ok()) return decoded.status();
    const UpdateDescription& update = decoded.value();
    totals_ = std::make_shared<Totals>(update);
    if (const Status status = read_gradients(update.leaves.size()); !status.ok()) return status;
    if (const Status status = set_size(count_of(update), update.leaves.size()); !status.ok()) return status;
    const size_t total_count = update.total_count;
    if (!is_packed()) {
      const ffi::AnyBuffer& totals = results_[results_.size() - 2];
      const bool has_totals = totals.element_type() == ffi::DataType::F32 && totals.element_count() == total_count;
      if (!has_totals) return unlike("another number of totals");
      append(totals, call_.step_results);
    } else if (!has_words(results_.back(), total_count + 1)) {
      return unlike("another number of totals");
    }
    append(results_.back(), call_.step_results);
    return {};
  }

  Status read_update() {
    if (is_packed()) return read_packed_update();
    if (const Status status = read_gradients(results_.size() - 1); !status.ok()) return status;
    if (const Status status = read_weights(spec_.state.weights); !status.ok()) return status;
    append(results_.back(), call_.step_results);
    return {};
  }

  Status read_packed_update() {
    const Result<UpdateDescription> update = decode_update(*site_.update);
    if (!update.ok()) return update.status();
    const size_t leaf_count = update.value().leaves.size();
    if (const Status status = read_gradients(leaf_count); !status.ok()) return status;
    if (const Status status = set_size(count_of(update.value()), leaf_count); !status.ok()) return status;
    const ffi::AnyBuffer& all = results_.back();
    const Result<DType> dtype = float_dtype(all.element_type());
    if (!dtype.ok()) return dtype.status();
    const size_t leaf_bytes = spec_.total_count * item_bytes(dtype.value());
    if (all.size_bytes() != leaf_bytes + sizeof(uint32_t)) return unlike("another number of weights");
    auto* const data = static_cast<std::byte*>(all.untyped_data());
    call_.request.outputs.append(data, leaf_bytes);
    call_.step_results.append(data + leaf_bytes, sizeof(uint32_t));
    spec_.state.weights = dtype.value();
    return {};
  }

  // Operands that are gradients, as the wire has them; and what is behind them.
  Status read_gradients(size_t leaf_count) {
    if (const Status status = read_operands(leaf_count); !status.ok()) return status;
    if (!site_.wire_dtype.has_value()) return {};
    const bool is_given = call_.request.inputs.leaf_count() > 0;
    // A GPU has converted those that have the dtype of the wire.
    call_.request.narrows = is_given && spec_.dtype != *site_.wire_dtype;
    if (call_.request.narrows && spec_.dtype != DType::kF32) return unlike("gradients that are not float32");
    spec_.dtype = *site_.wire_dtype;
    return {};
  }

  // The leaves, then scalars, then the version. A call that resumes does not read its leaves.
  Status read_operands(size_t leaf_count) {
    if (operands_.size() <= leaf_count) return unlike("too few operands");
    const std::span leaves = std::span(operands_).first(site_.state.resumes ? 0 : leaf_count);
    if (const Status status = read_leaves(leaves, spec_.dtype, call_.request.inputs); !status.ok()) return status;
    for (size_t i = leaf_count; i + 1 < operands_.size(); ++i) {
      if (operands_[i].element_type() != ffi::DataType::F32) return unlike("scalars that are not float32");
      append(operands_[i], call_.step_operands);
    }
    append(operands_.back(), call_.step_operands);
    return {};
  }

  // Results that are leaves, but for the version behind them.
  Status read_weights(DType& dtype) {
    return read_leaves(std::span(results_).first(results_.size() - 1), dtype, call_.request.outputs);
  }

  // The leaves of a bucket, all of one dtype.
  Status read_leaves(std::span<const ffi::AnyBuffer> buffers, DType& dtype, Leaves& leaves) {
    if (buffers.empty()) return {};
    const Result<DType> of_all = float_dtype(buffers[0].element_type());
    if (!of_all.ok()) return of_all.status();
    uint64_t count = 0;
    for (const ffi::AnyBuffer& buffer : buffers) {
      if (buffer.element_type() != buffers[0].element_type()) return unlike("leaves of several dtypes");
      append(buffer, leaves);
      count += buffer.element_count();
    }
    dtype = of_all.value();
    return set_size(count, buffers.size());
  }

  // The gradients of a bucket are as many as its weights.
  Status set_size(uint64_t count, size_t leaf_count) {
    if (spec_.leaf_count > 0 && spec_.total_count != count) return unlike("another number of weights");
    spec_.total_count = count;
    spec_.leaf_count = static_cast<uint32_t>(leaf_count);
    return {};
  }

  // One result has all: see make_state_call().
  [[nodiscard]] bool is_packed() const {
    return (site_.kind == Kind::kMeasure || site_.kind == Kind::kUpdate) && results_.size() == 1;
  }
  // Whether it is uint32[], or uint32[n].
  static bool has_words(const ffi::AnyBuffer& buffer) {
    return buffer.element_type() == ffi::DataType::U32 && buffer.element_count() > 0;
  }
  static bool has_words(const ffi::AnyBuffer& buffer, size_t count) {
    return has_words(buffer) && buffer.element_count() == count;
  }

  const CallSite& site_;
  StateCall& call_;
  OpSpec& spec_;
  std::vector<ffi::AnyBuffer> operands_;
  std::vector<ffi::AnyBuffer> results_;
  std::shared_ptr<Totals> totals_;
};

// From what the program knows when the call runs: the scalars of the step, and the version of the state.
void begin_step(std::span<const std::byte> from, bool stores_weights, StateModels& models, StepInputs& inputs,
                RoundRequest& request) {
  inputs.scalars.resize(from.size() / sizeof(uint32_t) - 1);
  const std::span<const std::byte> scalars = from.first(inputs.scalars.size() * sizeof(uint32_t));
  if (!scalars.empty()) std::memcpy(inputs.scalars.data(), scalars.data(), scalars.size());
  uint32_t version = 0;
  std::memcpy(&version, from.last(sizeof version).data(), sizeof version);
  StateUse& state = request.spec.state;
  if (stores_weights) {
    version = models.start(state.number, version);
  } else {
    models.note(state.number, version);
  }
  state.number = StateModels::number_for(state.number, version);
  request.op = StateModels::number_for(request.op, version);
  if (const uint32_t model = StateModels::model_of(version); model > 0) {
    request.description += " of model " + std::to_string(model);
  }
  inputs.version = version;
}

// What the program knows afterwards: the totals of a measure, and the version.
Status finish_step(uint32_t version, Totals* totals, std::span<std::byte> to) {
  std::memcpy(to.last(sizeof version).data(), &version, sizeof version);
  if (totals == nullptr) return {};
  Result<std::vector<float>> values = totals->values();
  if (!values.ok()) return values.status();
  const auto bytes = std::as_bytes(std::span(*values));
  if (!bytes.empty()) std::memcpy(to.data(), bytes.data(), bytes.size());
  return {};
}

// What is not of its buffers.
void describe(CallSite& site, int64_t run, int32_t device, RoundRequest& request) {
  request.op = site.op;
  request.sequence = site.sequence;
  request.device = device;
  request.run = run;
  OpSpec& spec = request.spec;
  spec.kind = site.kind;
  spec.root = site.root;
  spec.call_bytes = site.call_bytes;
  spec.state = site.state;
}

std::shared_ptr<const std::vector<uint64_t>> leaf_ends_of(const Bytes& update) {
  auto ends = std::make_shared<std::vector<uint64_t>>();
  const Result<UpdateDescription> decoded = decode_update(update);
  if (!decoded.ok()) return ends;  // the reducers say so
  for (const LeafUpdate& leaf : decoded.value().leaves)
    ends->push_back((ends->empty() ? 0 : ends->back()) + leaf.count);
  return ends;
}

// Once its buffers have been read.
void complete(CallSite& site, const std::shared_ptr<Totals>& totals, StateModels& models, StateCall& call) {
  const OpSpec& spec = call.request.spec;
  std::call_once(site.described, [&] {
    site.description = site.label + " (" + std::to_string(spec.total_count) + " weights in " +
                       std::to_string(spec.leaf_count) + " leaves)";
    if (spec.state.numbers != Numbers::kNone) site.leaf_ends = leaf_ends_of(*site.update);
  });
  call.request.description = site.description;

  const auto step = std::make_shared<StepRequest>();
  step->update = site.update;
  step->leaf_ends = site.leaf_ends;
  if (totals != nullptr) step->totals = [totals](const StepTotals& part) { totals->add(part); };
  const bool stores_weights = site.kind == Kind::kStore && site.state.slot == 0;
  call.begin = [step, stores_weights, &models](std::span<const std::byte> from, RoundRequest& request) {
    begin_step(from, stores_weights, models, step->inputs, request);
    request.step = step;
  };
  call.finish = [step, totals, updates = site.kind == Kind::kUpdate](std::span<std::byte> to) {
    return finish_step(static_cast<uint32_t>(step->inputs.version + (updates ? 1 : 0)), totals.get(), to);
  };
}

}  // namespace

Result<StateCall> make_state_call(CallSite& site, int64_t run, int32_t device, const ffi::RemainingArgs& args,
                                  const ffi::RemainingRets& rets, StateModels& models) {
  StateCall call;
  describe(site, run, device, call.request);
  BufferReader reader(site, call);
  if (const Status status = reader.read(args, rets); !status.ok()) return status;
  complete(site, reader.totals(), models, call);
  return call;
}

Result<StateStart> make_state_start(CallSite& site, int64_t run, int32_t device, const ffi::RemainingArgs& args,
                                    StateModels& models) {
  StateStart start;
  describe(site, run, device, start.call.request);
  BufferReader reader(site, start.call);
  if (const Status status = reader.read_start(args, start); !status.ok()) return status;
  complete(site, reader.totals(), models, start.call);
  return start;
}

}  // namespace jaxhetero
