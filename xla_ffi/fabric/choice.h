// Which fabric a process uses, if any.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "xla_ffi/base/log.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/fabric/library.h"

namespace jaxhetero {

// The strands of a process share it. Any thread.
class FabricChoice {
 public:
  // `wanted` is "auto", "off" or a provider. A reducer, for which it is empty, takes what workers offer. `log` outlives
  // the choice.
  FabricChoice(const std::string& wanted, EventLog& log)
      : wanted_(wanted), providers_(providers_of(wanted)), log_(log) {}

  // The providers to offer, the best first; none if nothing is to be offered.
  [[nodiscard]] const std::vector<std::string>& providers() const { return providers_; }
  // Whether what a peer offers is wanted.
  [[nodiscard]] bool accepts() const { return wanted_ != "off"; }
  // Opened by the first call, which may take some tenths of a second.
  Result<std::shared_ptr<const FabricLibrary>> library();
  // Logs why connections stay on sockets: the first reason is enough.
  void tell(const std::string& why);
  void warn(const std::string& text) { log_.add(Severity::kWarning, text); }

 private:
  const std::string wanted_;
  const std::vector<std::string> providers_;
  EventLog& log_;
  std::mutex mutex_;
  std::optional<Result<std::shared_ptr<const FabricLibrary>>> library_;  // guarded by mutex_
  bool has_told_ = false;                                                // guarded by mutex_
};

}  // namespace jaxhetero
