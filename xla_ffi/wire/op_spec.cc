#include "xla_ffi/wire/op_spec.h"

#include <limits>

#include "xla_ffi/wire/job_shape.h"

namespace jaxhetero {

Status check(const OpSpec& spec) {
  if (spec.kind < Kind::kSum || spec.kind > Kind::kMin) return malformed("op: unknown kind");
  if (item_bytes(spec.dtype) == 0) return malformed("op: unknown dtype");
  if (spec.root >= kMaxWorkers) return malformed("op: impossible root");
  if (spec.total_count > std::numeric_limits<uint64_t>::max() / 16) return malformed("op: impossible total count");
  return {};
}

std::string_view kind_name(Kind kind) {
  switch (kind) {
    case Kind::kSum:
      return "sum";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kMax:
      return "maximum";
    case Kind::kMin:
      return "minimum";
  }
  return "?";
}

std::string describe(const OpSpec& spec) {
  std::string text = std::string(kind_name(spec.kind)) + " of " + std::string(dtype_name(spec.dtype)) + "[" +
                     std::to_string(spec.total_count) + "]";
  if (spec.leaf_count != 1) text += " in " + std::to_string(spec.leaf_count) + " leaves";
  if (spec.kind == Kind::kBroadcast) text += " from rank " + std::to_string(spec.root);
  if (spec.call_bytes > spec.total_count * item_bytes(spec.dtype)) {
    text += " in a call of " + std::to_string(spec.call_bytes) + " bytes";
  }
  return text;
}

}  // namespace jaxhetero
