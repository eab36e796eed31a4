#include "xla_ffi/ffi/state_call.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
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
      if (part.total >= parts_.size()) continue;  // and then something is missing elsewhere
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
  std::vector<uint64_t> counts_;  // of the elements of its tensor
};

// The buffers of a call.
struct Buffers {
  std::vector<ffi::AnyBuffer> operands;
  std::vector<ffi::AnyBuffer> results;

  static Result<Buffers> take(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
    Buffers buffers;
    for (size_t i = 0; i < args.size(); ++i) {
      const auto operand = args.get<ffi::AnyBuffer>(i);
      if (!operand.has_value()) return unlike("something else than buffers");
      buffers.operands.push_back(*operand);
    }
    for (size_t i = 0; i < rets.size(); ++i) {
      auto result = rets.get<ffi::AnyBuffer>(i);
      if (!result.has_value()) return unlike("something else than buffers");
      buffers.results.push_back(**result);
    }
    if (buffers.operands.empty() || buffers.results.empty()) return unlike("no version");
    return buffers;
  }

  // Whether it is so many uint32.
  static bool has_words(const ffi::AnyBuffer& buffer, size_t count) {
    return buffer.element_type() == ffi::DataType::U32 && buffer.element_count() == count;
  }
};

// The leaves of a bucket, all of one dtype.
Result<Leaves> join(std::span<ffi::AnyBuffer> buffers, ffi::DataType type) {
  Leaves leaves;
  for (ffi::AnyBuffer& buffer : buffers) {
    if (buffer.element_type() != type) return unlike("leaves of several dtypes");
    leaves.append(buffer.untyped_data(), buffer.size_bytes());
  }
  return leaves;
}

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

uint64_t count_of(std::span<const ffi::AnyBuffer> leaves) {
  uint64_t count = 0;
  for (const ffi::AnyBuffer& leaf : leaves) count += leaf.element_count();
  return count;
}

uint64_t count_of(const UpdateDescription& update) {
  uint64_t count = 0;
  for (const LeafUpdate& leaf : update.leaves) count += leaf.count;
  return count;
}

// One array that has all results: of an update the leaves, of a measure the totals; and the version behind them.
Status take_packed(ffi::AnyBuffer& all, const UpdateDescription& update, StateCall& call) {
  OpSpec& spec = call.request.spec;
  auto* const data = static_cast<std::byte*>(all.untyped_data());
  if (spec.kind == Kind::kMeasure) {
    if (!Buffers::has_words(all, update.total_count + size_t{1})) return unlike("another number of totals");
    call.step_results.append(data, all.size_bytes());
    return {};
  }
  Result<DType> dtype = float_dtype(all.element_type());
  if (!dtype.ok()) return dtype.status();
  const size_t leaf_bytes = count_of(update) * item_bytes(*dtype);
  if (all.size_bytes() != leaf_bytes + sizeof(uint32_t)) return unlike("another number of weights");
  spec.state.weights = *dtype;
  spec.total_count = count_of(update);
  spec.leaf_count = static_cast<uint32_t>(update.leaves.size());
  call.request.outputs.append(data, leaf_bytes);
  call.step_results.append(data + leaf_bytes, sizeof(uint32_t));
  return {};
}

}  // namespace

Result<StateCall> make_state_call(CallSite& site, int64_t run, int32_t device, const ffi::RemainingArgs& args,
                                  const ffi::RemainingRets& rets, StateModels& models) {
  Result<Buffers> taken = Buffers::take(args, rets);
  if (!taken.ok()) return taken.status();
  std::vector<ffi::AnyBuffer>& operands = taken->operands;
  std::vector<ffi::AnyBuffer>& results = taken->results;
  const bool computes = site.kind == Kind::kMeasure || site.kind == Kind::kUpdate;
  const bool is_packed = computes && results.size() == 1;
  const bool has_version =
      is_packed ? operands.back().element_type() == ffi::DataType::U32 && operands.back().element_count() > 0
                : Buffers::has_words(operands.back(), 1) && Buffers::has_words(results.back(), 1);
  if (!has_version) return unlike("no version");
  const size_t beside_results = site.kind == Kind::kMeasure ? 2 : 1;
  if (!is_packed && results.size() < beside_results) return unlike("no totals");
  std::optional<UpdateDescription> update;
  if (is_packed || site.kind == Kind::kMeasure) {
    Result<UpdateDescription> decoded = decode_update(*site.update);
    if (!decoded.ok()) return decoded.status();
    update = std::move(*decoded);
  }
  // The gradients of a bucket are as many as its weights.
  const size_t leaf_count = is_packed  ? update->leaves.size()
                            : computes ? results.size() - beside_results
                                       : operands.size() - 1;
  if (operands.size() < leaf_count + (computes && !is_packed ? 2 : 1)) return unlike("no scalars");

  StateCall call;
  RoundRequest& request = call.request;
  OpSpec& spec = request.spec;
  spec.kind = site.kind;
  spec.root = site.root;
  spec.call_bytes = site.call_bytes;
  spec.state = site.state;
  request.op = site.op;
  request.sequence = site.sequence;
  request.device = device;
  request.run = run;

  // What resumes does not read the leaves: they only bring the memory for new weights.
  const auto given = std::span(operands).first(site.state.resumes ? 0 : leaf_count);
  const auto wanted = std::span(results).first(is_packed ? 0 : results.size() - 1);
  const bool returns_leaves = site.kind == Kind::kLoad || site.kind == Kind::kUpdate;
  const auto step = std::make_shared<StepRequest>();
  if (!given.empty()) {
    Result<DType> dtype = float_dtype(given[0].element_type());
    if (!dtype.ok()) return dtype.status();
    Result<Leaves> leaves = join(given, given[0].element_type());
    if (!leaves.ok()) return leaves.status();
    spec.dtype = *dtype;
    spec.total_count = count_of(given);
    spec.leaf_count = static_cast<uint32_t>(given.size());
    request.inputs = *leaves;
  }
  if (returns_leaves && !wanted.empty()) {
    Result<DType> dtype = float_dtype(wanted[0].element_type());
    if (!dtype.ok()) return dtype.status();
    Result<Leaves> leaves = join(wanted, wanted[0].element_type());
    if (!leaves.ok()) return leaves.status();
    if (!given.empty() && count_of(wanted) != spec.total_count) return unlike("another number of weights");
    spec.total_count = count_of(wanted);
    spec.leaf_count = static_cast<uint32_t>(wanted.size());
    if (site.kind == Kind::kUpdate) spec.state.weights = *dtype;
    request.outputs = *leaves;
  }
  if (is_packed) {
    const Status status = take_packed(results[0], *update, call);
    if (!status.ok()) return status;
    if (!given.empty() && count_of(given) != spec.total_count) return unlike("another number of weights");
  }
  if (computes) {
    for (const ffi::AnyBuffer& some : std::span(operands).subspan(leaf_count, operands.size() - leaf_count - 1)) {
      if (some.element_type() != ffi::DataType::F32) return unlike("scalars that are not float32");
      call.step_operands.append(some.untyped_data(), some.size_bytes());
    }
    step->update = site.update;
  }
  call.step_operands.append(operands.back().untyped_data(), operands.back().size_bytes());

  std::shared_ptr<Totals> totals;
  if (site.kind == Kind::kMeasure) {
    if (!is_packed) {
      if (wanted.empty() || wanted.back().element_type() != ffi::DataType::F32 ||
          wanted.back().element_count() != update->total_count) {
        return unlike("another number of totals");
      }
      call.step_results.append(wanted.back().untyped_data(), wanted.back().size_bytes());
    }
    if (given.empty()) {
      spec.total_count = count_of(*update);
      spec.leaf_count = static_cast<uint32_t>(update->leaves.size());
    }
    totals = std::make_shared<Totals>(*update);
    step->totals = [totals](const StepTotals& part) { totals->add(part); };
  }
  if (!is_packed) call.step_results.append(results.back().untyped_data(), results.back().size_bytes());

  std::call_once(site.described, [&] {
    site.description = site.label + " (" + std::to_string(spec.total_count) + " weights in " +
                       std::to_string(spec.leaf_count) + " leaves)";
  });
  request.description = site.description;
  if (site.wire_dtype.has_value()) {
    if (!given.empty() && spec.dtype != *site.wire_dtype) {  // else they were converted on a GPU
      if (spec.dtype != DType::kF32) return unlike("gradients that are not float32");
      request.narrows = true;
    }
    spec.dtype = *site.wire_dtype;
  }
  const bool stores_weights = site.kind == Kind::kStore && site.state.slot == 0;
  call.begin = [step, stores_weights, &models](std::span<const std::byte> from, RoundRequest& request) {
    StepInputs& inputs = step->inputs;
    inputs.scalars.resize(from.size() / sizeof(uint32_t) - 1);
    const std::span<const std::byte> scalars = from.first(inputs.scalars.size() * sizeof(uint32_t));
    if (!scalars.empty()) std::memcpy(inputs.scalars.data(), scalars.data(), scalars.size());
    uint32_t version = 0;
    std::memcpy(&version, from.last(sizeof version).data(), sizeof version);
    StateUse& state = request.spec.state;
    if (stores_weights) version = models.start(state.number, version);
    state.number = StateModels::number_for(state.number, version);
    request.op = StateModels::number_for(request.op, version);
    if (const uint32_t model = StateModels::model_of(version); model > 0) {
      request.description += " of model " + std::to_string(model);
    }
    inputs.version = version;
    request.step = step;
  };
  call.finish = [step, totals, updates = site.kind == Kind::kUpdate](std::span<std::byte> to) -> Status {
    const auto version = static_cast<uint32_t>(step->inputs.version + (updates ? 1 : 0));
    std::memcpy(to.last(sizeof version).data(), &version, sizeof version);
    if (totals == nullptr) return {};
    Result<std::vector<float>> values = totals->values();
    if (!values.ok()) return values.status();
    const auto bytes = std::as_bytes(std::span(*values));
    if (!bytes.empty()) std::memcpy(to.data(), bytes.data(), bytes.size());
    return {};
  };
  return call;
}

}  // namespace jaxhetero
