#include "xla_ffi/membership/history.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <vector>

namespace jaxhetero {
namespace {

std::string json_of(std::string_view text) {
  std::string quoted = "\"";
  for (const char each : text) {
    if (each == '"' || each == '\\') quoted += '\\';
    if (static_cast<unsigned char>(each) >= 0x20) {
      quoted += each;
      continue;
    }
    std::array<char, 7> code{};
    std::snprintf(code.data(), code.size(), "\\u%04x", static_cast<unsigned>(each));
    quoted += code.data();
  }
  return quoted + '"';
}

std::string json_of(const std::vector<uint32_t>& ranks) {
  std::string list;
  for (const uint32_t rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  return "[" + list + "]";
}

}  // namespace

Status History::open(const std::string& file) {
  if (file.empty()) return {};
  file_.open(file, std::ios::app);
  if (file_.is_open()) return {};
  return {Code::kInvalidArgument, "cannot write history_file " + file + ": " + std::strerror(errno)};
}

void History::note(const View& view, const std::map<uint64_t, Report::Op>& complete) {
  if (!file_.is_open()) return;
  std::string ops;
  for (const auto& [number, op] : complete) {
    ops += ops.empty() ? "" : ", ";
    ops += "{\"op\": " + json_of(op.name) + ", \"complete\": " + std::to_string(op.given_count);
    if (!op.group.empty()) ops += ", \"group\": " + json_of(op.group);
    ops += "}";
  }
  file_ << "{\"view\": " << view.number << ", \"members\": " << json_of(view.ranks())
        << ", \"joining\": " << json_of(view.joining) << ", \"gate\": " << view.gate << ", \"rounds\": [" << ops
        << "]}\n"
        << std::flush;
}

}  // namespace jaxhetero
