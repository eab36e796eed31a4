// What a step of an optimizer does with a bucket: which program runs on which leaf, with which scalars. Workers make it
// from optax, and send it with the description of an op; a reducer runs it on the parts of the bucket that it has.
// Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/update/program.h"
#include "xla_ffi/update/run.h"
#include "xla_ffi/update/tensor_sum.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {

// Where a scalar of a program comes from.
enum class Origin : uint8_t {
  kConstant = 1,  // `number` is the bits of a float32
  kSent = 2,      // the number of a scalar that workers send
  kDerived = 3,   // the number of a derived scalar
};
struct ScalarSource {
  Origin origin = Origin::kConstant;
  uint32_t number = 0;
};

// A run of a program.
struct Pass {
  uint32_t program = 0;
  std::vector<ScalarSource> scalars;  // one for each scalar of the program
};

// What is done with a leaf. The program's inputs are the gradient, the weights and the states. If it has outputs, they
// are the weights, the states, and the weights that workers get where those have another type.
struct LeafUpdate {
  uint64_t count = 0;  // the number of its elements
  Pass pass;
  std::vector<uint32_t> totals;  // the number of the total that each summand of the program gives
};

struct UpdateDescription {
  uint32_t sent_count = 0;   // the number of scalars that workers send
  uint32_t state_count = 0;  // the most states that any leaf has
  uint32_t total_count = 0;  // the number of sums over tensors
  OutputType weights = OutputType::kF32;
  bool has_outputs = true;  // the update has outputs; else it only sums over tensors
  std::vector<Bytes> programs;
  // Each gives its one output from scalars alone, of which derived ones come before it.
  std::vector<Pass> derived;
  std::vector<LeafUpdate> leaves;  // the leaves in the order of the bucket
};

inline constexpr size_t kMaxStates = kMaxInputs - 2;
inline constexpr size_t kMaxUpdateLeaves = size_t{1} << 16;
inline constexpr size_t kMaxPrograms = size_t{1} << 12;

Bytes encode(const UpdateDescription& update);
// Checks what can be checked without the programs.
Result<UpdateDescription> decode_update(std::span<const std::byte> bytes);

// Runners by program: many buckets run the same few. One thread.
class Runners {
 public:
  // An error if these bytes are no program.
  Result<std::shared_ptr<Runner>> find(const Bytes& program);

 private:
  std::map<std::string, std::weak_ptr<Runner>, std::less<>> known_;
};

// A sum over a piece of a tensor.
struct PartialTotal {
  uint32_t total = 0;  // the number of the total
  uint64_t end = 0;    // the end of the piece, in the tensor
  PieceSum sum;
};

// Runs what a description says. One thread.
class BucketUpdate {
 public:
  // The memory of a part of a bucket. All spans have as many elements.
  struct Operands {
    std::span<const float> gradient;
    std::span<const std::span<float>> kept;  // the weights, then the states; changed in place
    std::span<std::byte> narrowed;           // the weights as bfloat16, where workers get those; else empty
  };

  // For a bucket of so many elements. An error if the description does not fit: a program that is none or takes other
  // inputs, a scalar that is not there, leaves that are not the bucket.
  static Result<BucketUpdate> make(const UpdateDescription& description, uint64_t count, Runners& runners);

  // The scalars of the step that is run next.
  Status start_step(std::span<const float> sent);
  // Runs it on the elements of the bucket from `first` on. Adds to `totals`, which begin empty in each step.
  Status run(uint64_t first, const Operands& operands, std::vector<PartialTotal>& totals);

  [[nodiscard]] const UpdateDescription& description() const { return description_; }

 private:
  struct Leaf {
    uint64_t first = 0;
    uint64_t count = 0;
    uint32_t program = 0;
    std::vector<float> scalars;  // the scalars of the step
  };

  BucketUpdate() = default;
  Status add_leaf(const LeafUpdate& leaf, uint64_t first);
  [[nodiscard]] Status check(const Pass& pass, size_t derived_count) const;
  [[nodiscard]] std::vector<float> scalars_of(const Pass& pass, std::span<const float> sent) const;
  Status run_leaf(size_t index, const Range& part, uint64_t first, const Operands& operands,
                  std::vector<PartialTotal>& totals);

  UpdateDescription description_;
  std::vector<std::shared_ptr<Runner>> runners_;
  std::vector<Leaf> leaves_;
  std::vector<float> derived_;
};

}  // namespace jaxhetero
