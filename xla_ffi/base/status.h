// Errors of native code. There are no exceptions: a Status is returned up to the FFI or to Python. There its code
// becomes a class of jaxhetero/errors.py, and the user reads its message unchanged.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace jaxhetero {

enum class Code : uint8_t {
  kOk = 0,
  kInvalidArgument,
  kNotInitialized,
  kAddressInUse,
  kStartTimeout,
  kUnauthenticated,
  kVersionMismatch,
  kMismatch,
  kWorkerLost,
  kReducerLost,
  kRoundTimeout,
  kProtocol,
  kInternal,
};
inline constexpr uint8_t kCodeCount = static_cast<uint8_t>(Code::kInternal) + 1;

// The name of the exception in jaxhetero/errors.py that stands for the code.
constexpr std::string_view exception_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "ConfigError";
    case Code::kNotInitialized:
      return "NotInitializedError";
    case Code::kAddressInUse:
      return "AddressInUse";
    case Code::kStartTimeout:
      return "StartTimeout";
    case Code::kUnauthenticated:
      return "AuthenticationError";
    case Code::kVersionMismatch:
      return "VersionMismatch";
    case Code::kMismatch:
      return "MismatchError";
    case Code::kWorkerLost:
      return "WorkerLost";
    case Code::kReducerLost:
      return "ReducerLost";
    case Code::kRoundTimeout:
      return "RoundTimeout";
    case Code::kProtocol:
      return "ProtocolError";
    case Code::kInternal:
      return "InternalError";
  }
  return "InternalError";
}

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  [[nodiscard]] bool ok() const { return code_ == Code::kOk; }
  [[nodiscard]] Code code() const { return code_; }
  [[nodiscard]] const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// A value, or the error that prevented it.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  [[nodiscard]] bool ok() const { return value_.has_value(); }
  [[nodiscard]] const Status& status() const { return status_; }
  [[nodiscard]] T& value() { return *value_; }
  [[nodiscard]] const T& value() const { return *value_; }
  T* operator->() { return &*value_; }
  T& operator*() { return *value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace jaxhetero
