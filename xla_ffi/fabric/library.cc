#include "xla_ffi/fabric/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

namespace jaxhetero {
namespace {

// Where Amazon's installer puts the library, and does not tell the linker.
constexpr std::array<const char*, 3> kPaths = {"libfabric.so.1", "/opt/amazon/efa/lib/libfabric.so.1",
                                               "/opt/amazon/efa/lib64/libfabric.so.1"};

// Some providers install handlers as they are loaded: after that, Ctrl-C would kill Python without KeyboardInterrupt.
class SignalKeeper {
 public:
  SignalKeeper() {
    for (int number = 1; number < NSIG; ++number)
      is_known_[number] = sigaction(number, nullptr, &actions_[number]) == 0;
  }
  ~SignalKeeper() {
    for (int number = 1; number < NSIG; ++number) {
      if (is_known_[number] && number != SIGKILL && number != SIGSTOP) sigaction(number, &actions_[number], nullptr);
    }
  }
  SignalKeeper(const SignalKeeper&) = delete;
  SignalKeeper& operator=(const SignalKeeper&) = delete;

 private:
  std::array<struct sigaction, NSIG> actions_{};
  std::array<bool, NSIG> is_known_{};
};

// What providers would do to this process. They read this when they start; a user's own setting stays.
void restrain_providers() {
  // Some watch what a process maps, for their caches of registered memory, which we do not need. To do that they write
  // over functions of libc while other threads run them, which may then crash.
  setenv("FI_MR_CACHE_MONITOR", "disabled", 0);
  // ofi_rxm cuts messages of a middle size into segments. As of 2.6 it crashes, or loops for ever, where a connection
  // ends that has received some segments of a message and not all. Below its least value this means: into none.
  setenv("FI_OFI_RXM_SAR_LIMIT", "1", 0);
}

// Looks up the functions that the library exports, each in the version that abi.h declares.
class Symbols {
 public:
  explicit Symbols(void* library) : library_(library) {}

  template <typename Function>
  void find(const char* name, const char* version, Function& function) {
    function = reinterpret_cast<Function>(dlvsym(library_, name, version));
    if (function == nullptr && missing_.empty()) missing_ = std::string(name) + " of version " + version;
  }
  [[nodiscard]] const std::string& missing() const { return missing_; }

 private:
  void* library_;
  std::string missing_;
};

Result<void*> load() {
  std::string reasons;
  for (const char* path : kPaths) {
    if (void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE); library != nullptr) return library;
    const char* reason = dlerror();
    if (reasons.empty() && reason != nullptr) reasons = reason;
  }
  return Status(Code::kInvalidArgument, "cannot open libfabric: " + reasons);
}

// Where every RDMA device has an entry, Amazon's included.
bool has_device() {
  std::error_code error;
  return !std::filesystem::is_empty("/sys/class/infiniband", error) && !error;
}

}  // namespace

Result<std::shared_ptr<const FabricLibrary>> FabricLibrary::open() {
  const SignalKeeper keeper;
  restrain_providers();
  Result<void*> loaded = load();
  if (!loaded.ok()) return loaded.status();
  const std::shared_ptr<FabricLibrary> library(new FabricLibrary());
  Symbols symbols(*loaded);
  symbols.find("fi_getinfo", "FABRIC_1.3", library->get_info_);
  symbols.find("fi_freeinfo", "FABRIC_1.3", library->free_info_);
  symbols.find("fi_dupinfo", "FABRIC_1.3", library->copy_info_);
  symbols.find("fi_fabric", "FABRIC_1.1", library->open_fabric_);
  symbols.find("fi_version", "FABRIC_1.0", library->version_);
  symbols.find("fi_strerror", "FABRIC_1.0", library->error_text_);
  if (!symbols.missing().empty()) return Status(Code::kInvalidArgument, "libfabric has no " + symbols.missing());
  if (library->version_() < fi::kApiVersion) {
    return Status(Code::kInvalidArgument, "libfabric is of version " + library->version() + "; 1.17 is the oldest");
  }
  int result = 0;
  [[maybe_unused]] const Infos infos = library->get_infos("tcp", nullptr, result);  // loads the providers
  return std::shared_ptr<const FabricLibrary>(library);
}

FabricLibrary::Infos FabricLibrary::get_infos(const char* provider, const char* source, int& result) const {
  const Infos hints(copy_info_(nullptr), free_info_);
  if (!hints) {
    result = -ENOMEM;
    return nullptr;
  }
  hints->caps = fi::kMsg;
  hints->mode = fi::kContext | fi::kContext2;
  hints->endpoint->type = fi::kReliableDatagrams;
  hints->domain->mr_mode = fi::kMrLocal | fi::kMrVirtualAddress | fi::kMrAllocated | fi::kMrProviderKey;
  hints->domain->threading = fi::kThreadDomain;
  // No thread of the provider's: the event loop makes all progress.
  hints->domain->control_progress = fi::kManualProgress;
  hints->domain->data_progress = fi::kManualProgress;
  if (provider != nullptr) hints->fabric->provider = strdup(provider);  // freed with the hints
  fi::Info* found = nullptr;
  result = get_info_(fi::kApiVersion, source, nullptr, source == nullptr ? 0 : fi::kSource, hints.get(), &found);
  return result == 0 ? Infos(found, free_info_) : nullptr;
}

Result<FabricLibrary::Infos> FabricLibrary::find(const std::string& provider, const std::string& source) const {
  int result = 0;
  Infos infos;
  if (!source.empty()) infos = get_infos(provider.c_str(), source.c_str(), result);
  if (!infos) infos = get_infos(provider.c_str(), nullptr, result);
  if (!infos) return error("there is no provider " + provider + " here", result);
  return infos;
}

std::vector<FabricDevice> FabricLibrary::devices() const {
  int result = 0;
  const Infos infos = get_infos(nullptr, nullptr, result);
  std::vector<FabricDevice> devices;
  for (const fi::Info* info = infos.get(); info != nullptr; info = info->next) {
    FabricDevice device{info->fabric->provider, info->domain->name};
    const auto is_same = [&](const FabricDevice& other) {
      return other.provider == device.provider && other.domain == device.domain;
    };
    if (std::ranges::none_of(devices, is_same)) devices.push_back(std::move(device));
  }
  return devices;
}

Status FabricLibrary::error(std::string_view what, ssize_t result) const {
  return {Code::kInternal, std::string(what) + ": " + error_text_(static_cast<int>(-result))};
}

std::string FabricLibrary::version() const {
  const uint32_t version = version_();
  return std::to_string(version >> 16) + "." + std::to_string(version & 0xffff);
}

std::vector<std::string> providers_of(const std::string& wanted) {
  if (wanted.empty() || wanted == "off") return {};
  if (wanted != "auto") return {wanted};
  if (!has_device()) return {};
  return {"efa", "verbs;ofi_rxm"};
}

}  // namespace jaxhetero
