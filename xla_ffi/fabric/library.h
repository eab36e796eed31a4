// libfabric, opened at run time, and what it finds on this host.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/fabric/abi.h"

namespace jaxhetero {

// A way to the network that the library offers: a provider with one of its devices.
struct FabricDevice {
  std::string provider;  // "efa", "verbs;ofi_rxm", "tcp"
  std::string domain;    // the device: "rdmap0s6-rdm"
};

// Any thread.
class FabricLibrary {
 public:
  // The library stays loaded for good: a provider does not survive being unloaded. Neither the library nor a provider
  // can change how this process handles signals.
  static Result<std::shared_ptr<const FabricLibrary>> open();

  // What the library reports, in its order of preference; owned by it.
  using Infos = std::shared_ptr<fi::Info>;
  // The devices of a provider that carry messages reliably: those at the address `source` of this host, or any if that
  // is empty or none is there. An error if there are none.
  [[nodiscard]] Result<Infos> find(const std::string& provider, const std::string& source) const;
  // All devices of all providers that would do.
  [[nodiscard]] std::vector<FabricDevice> devices() const;

  // Of a negative result.
  [[nodiscard]] Status error(std::string_view what, ssize_t result) const;
  [[nodiscard]] std::string version() const;

  [[nodiscard]] int open_fabric(fi::FabricAttributes* attributes, fi::Fabric** fabric) const {
    return open_fabric_(attributes, fabric, nullptr);
  }

 private:
  FabricLibrary() = default;
  [[nodiscard]] Infos get_infos(const char* provider, const char* source, int& result) const;

  int (*get_info_)(uint32_t version, const char* node, const char* service, uint64_t flags, const fi::Info* hints,
                   fi::Info** found) = nullptr;
  void (*free_info_)(fi::Info* info) = nullptr;
  fi::Info* (*copy_info_)(const fi::Info* info) = nullptr;
  int (*open_fabric_)(fi::FabricAttributes* attributes, fi::Fabric** fabric, void* context) = nullptr;
  uint32_t (*version_)() = nullptr;
  const char* (*error_text_)(int error) = nullptr;
};

// The providers that `wanted` names, the best first: "auto" is those that were made for this, where this host has a
// device for one; "off" and "" are none.
std::vector<std::string> providers_of(const std::string& wanted);

}  // namespace jaxhetero
