#include "xla_ffi/update/bucket_update.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <utility>

namespace jaxhetero {
// Not in an unnamed namespace: Writer and Reader have to find them.
template <typename Codec, IsA<ScalarSource> Message>
void fields(Codec& codec, Message& source) {
  codec(source.origin, source.number);
}

template <typename Codec, IsA<Pass> Message>
void fields(Codec& codec, Message& pass) {
  codec(pass.program);
  codec.list(pass.scalars, kMaxScalars);
}

template <typename Codec, IsA<LeafUpdate> Message>
void fields(Codec& codec, Message& leaf) {
  codec(leaf.count);
  fields(codec, leaf.pass);
  codec.list(leaf.totals, kMaxSummands);
}

template <typename Codec, IsA<Bytes> Message>
void fields(Codec& codec, Message& program) {
  codec.list(program, kMaxProgramBytes);
}

template <typename Codec, IsA<UpdateDescription> Message>
void fields(Codec& codec, Message& update) {
  codec(update.sent_count, update.state_count, update.total_count, update.weights, update.has_outputs);
  codec.list(update.programs, kMaxPrograms);
  codec.list(update.derived, kMaxScalars);
  codec.list(update.leaves, kMaxUpdateLeaves);
}

Bytes encode(const UpdateDescription& update) {
  Writer writer;
  fields(writer, update);
  return writer.take();
}

Result<UpdateDescription> decode_update(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  UpdateDescription update;
  fields(reader, update);
  const bool is_sane = reader.finished() && update.sent_count <= kMaxScalars && update.state_count <= kMaxStates &&
                       (update.weights == OutputType::kF32 || update.weights == OutputType::kBF16);
  if (!is_sane) return malformed("update");
  return update;
}

Result<std::shared_ptr<Runner>> Runners::find(const Bytes& program) {
  const std::string key(reinterpret_cast<const char*>(program.data()), program.size());
  const auto known = known_.find(key);
  if (known != known_.end() && !known->second.expired()) return known->second.lock();
  Result<Program> decoded = decode_program(program);
  if (!decoded.ok()) return decoded.status();
  auto runner = std::make_shared<Runner>(std::move(*decoded));
  known_.insert_or_assign(key, runner);
  return runner;
}

Result<BucketUpdate> BucketUpdate::make(const UpdateDescription& description, uint64_t count, Runners& runners) {
  BucketUpdate update;
  update.description_ = description;
  for (const Bytes& program : description.programs) {
    Result<std::shared_ptr<Runner>> runner = runners.find(program);
    if (!runner.ok()) return runner.status();
    update.runners_.push_back(std::move(*runner));
  }
  for (size_t i = 0; i < description.derived.size(); ++i) {
    const Pass& pass = description.derived[i];
    if (Status status = update.check(pass, i); !status.ok()) return status;
    const Program& program = update.runners_[pass.program]->program();
    const bool is_number = program.input_count == 0 && program.summands.empty() && program.outputs.size() == 1 &&
                           program.outputs[0].type == OutputType::kF32;
    if (!is_number) return malformed("update: derived scalar " + std::to_string(i));
  }
  uint64_t first = 0;
  for (const LeafUpdate& leaf : description.leaves) {
    if (leaf.count > count - first) return malformed("update: leaves that are more than the bucket");
    if (Status status = update.add_leaf(leaf, first); !status.ok()) return status;
    first += leaf.count;
  }
  if (first != count) return malformed("update: leaves that are less than the bucket");
  return update;
}

// Whether everything is there that the pass refers to.
Status BucketUpdate::check(const Pass& pass, size_t derived_count) const {
  if (pass.program >= runners_.size()) return malformed("update: a program that is not there");
  if (pass.scalars.size() != runners_[pass.program]->program().scalar_count) {
    return malformed("update: another number of scalars than the program has");
  }
  for (const ScalarSource& source : pass.scalars) {
    const bool is_there = source.origin == Origin::kConstant ||
                          (source.origin == Origin::kSent && source.number < description_.sent_count) ||
                          (source.origin == Origin::kDerived && source.number < derived_count);
    if (!is_there) return malformed("update: a scalar that is not there");
  }
  return {};
}

Status BucketUpdate::add_leaf(const LeafUpdate& leaf, uint64_t first) {
  if (Status status = check(leaf.pass, description_.derived.size()); !status.ok()) return status;
  const Program& program = runners_[leaf.pass.program]->program();
  const size_t kept_count = program.input_count == 0 ? 0 : program.input_count - size_t{1};
  if (kept_count < 1 || kept_count > description_.state_count + size_t{1}) return malformed("update: states");
  const bool narrows = description_.weights == OutputType::kBF16;
  bool fits = leaf.totals.size() == program.summands.size();
  if (description_.has_outputs) {
    fits = fits && program.outputs.size() == kept_count + (narrows ? 1 : 0);
    for (size_t i = 0; fits && i < program.outputs.size(); ++i) {
      fits = program.outputs[i].type == (i < kept_count ? OutputType::kF32 : OutputType::kBF16);
    }
  } else {
    fits = fits && program.outputs.empty();
  }
  fits = fits && std::ranges::all_of(leaf.totals, [&](uint32_t total) { return total < description_.total_count; });
  if (!fits) return malformed("update: a program that is not for its leaf");
  leaves_.push_back({first, leaf.count, leaf.pass.program, {}});
  return {};
}

std::vector<float> BucketUpdate::scalars_of(const Pass& pass, std::span<const float> sent) const {
  std::vector<float> scalars;
  for (const ScalarSource& source : pass.scalars) {
    scalars.push_back(source.origin == Origin::kConstant ? std::bit_cast<float>(source.number)
                      : source.origin == Origin::kSent   ? sent[source.number]
                                                         : derived_[source.number]);
  }
  return scalars;
}

Status BucketUpdate::start_step(std::span<const float> sent) {
  if (sent.size() != description_.sent_count) return malformed("update: another number of scalars");
  derived_.clear();
  for (const Pass& pass : description_.derived) {
    float value = 0;
    const std::array outputs = {std::as_writable_bytes(std::span(&value, 1))};
    const std::vector<float> scalars = scalars_of(pass, sent);
    if (Status status = runners_[pass.program]->run({{}, scalars, outputs, 1, 0}, {}); !status.ok()) return status;
    derived_.push_back(value);
  }
  for (size_t i = 0; i < leaves_.size(); ++i) leaves_[i].scalars = scalars_of(description_.leaves[i].pass, sent);
  return {};
}

Status BucketUpdate::run(uint64_t first, const Operands& operands, std::vector<PartialTotal>& totals) {
  const Range range{first, operands.gradient.size()};
  // The last leaf that begins at `first` or before it.
  const auto next = std::ranges::upper_bound(leaves_, first, {}, &Leaf::first);
  for (auto index = static_cast<size_t>(next - leaves_.begin()) - 1; index < leaves_.size(); ++index) {
    if (leaves_[index].first >= first + range.count) break;
    const Range part = overlap(range, {leaves_[index].first, leaves_[index].count});
    if (part.count == 0) continue;
    if (Status status = run_leaf(index, part, first, operands, totals); !status.ok()) return status;
  }
  return {};
}

// On a part of a leaf, counted in the bucket like `first`, where the operands begin.
Status BucketUpdate::run_leaf(size_t index, const Range& part, uint64_t first, const Operands& operands,
                              std::vector<PartialTotal>& totals) {
  const Leaf& leaf = leaves_[index];
  Runner& runner = *runners_[leaf.program];
  const uint64_t at = part.offset - first;
  std::vector<std::span<const float>> inputs = {operands.gradient.subspan(at, part.count)};
  std::vector<std::span<std::byte>> outputs;
  for (size_t i = 0; i + 1 < runner.program().input_count; ++i) {
    const std::span<float> kept = operands.kept[i].subspan(at, part.count);
    inputs.emplace_back(kept);
    if (description_.has_outputs) outputs.push_back(std::as_writable_bytes(kept));
  }
  if (outputs.size() < runner.program().outputs.size()) {
    outputs.push_back(operands.narrowed.subspan(at * sizeof(uint16_t), part.count * sizeof(uint16_t)));
  }
  const uint64_t in_leaf = part.offset - leaf.first;
  const std::vector<uint32_t>& numbers = description_.leaves[index].totals;
  const bool continues = totals.size() >= numbers.size() && !numbers.empty() &&
                         totals[totals.size() - numbers.size()].total == numbers[0] &&
                         totals.back().total == numbers.back() && totals.back().end == in_leaf;
  std::vector<PieceSum> sums;
  for (size_t i = 0; i < numbers.size(); ++i) {
    sums.push_back(continues ? std::move(totals[totals.size() - numbers.size() + i].sum) : PieceSum(in_leaf));
  }
  Status status = runner.run({inputs, leaf.scalars, outputs, part.count, in_leaf}, sums);
  if (continues) totals.resize(totals.size() - numbers.size(), {0, 0, PieceSum(0)});
  for (size_t i = 0; i < numbers.size(); ++i) {
    totals.push_back({numbers[i], in_leaf + part.count, std::move(sums[i])});
  }
  return status;
}

}  // namespace jaxhetero
