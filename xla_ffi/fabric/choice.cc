#include "xla_ffi/fabric/choice.h"

#include <utility>

namespace jaxhetero {

Result<std::shared_ptr<const FabricLibrary>> FabricChoice::library() {
  const std::lock_guard lock(mutex_);
  if (!library_.has_value()) library_ = FabricLibrary::open();
  return *library_;
}

void FabricChoice::tell(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(has_told_, true)) return;
  log_.add(Severity::kWarning, "bytes go over sockets, not over a fabric: " + why);
}

}  // namespace jaxhetero
