#include "xla_ffi/membership/history.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <system_error>
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

// Of a coordinator that was killed while it wrote: nobody has been told that view.
void drop_unfinished_line(const std::string& file) {
  std::ifstream earlier(file, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(earlier), {});
  const size_t end = text.rfind('\n') + 1;  // 0 where there is no line
  std::error_code ignored;                  // what cannot be mended cannot be opened either
  if (end < text.size()) std::filesystem::resize_file(file, end, ignored);
}

}  // namespace

Status History::open(const std::string& file) {
  if (file.empty()) return {};
  // To open a pipe would wait for its other end.
  std::error_code none;
  if (std::filesystem::exists(file, none) && !std::filesystem::is_regular_file(file, none)) {
    return {Code::kInvalidArgument, "history_file " + file + " is not a file"};
  }
  drop_unfinished_line(file);
  name_ = file;
  file_.open(file, std::ios::app);
  if (file_.is_open()) return {};
  return {Code::kInvalidArgument, "cannot write history_file " + file + ": " + std::strerror(errno)};
}

Status History::note(const View& view, const std::map<uint64_t, Report::Op>& complete) {
  if (!file_.is_open()) return {};
  std::string ops;
  for (const auto& [number, op] : complete) {
    ops += ops.empty() ? "" : ", ";
    ops += "{\"op\": " + json_of(op.name) + ", \"complete\": " + std::to_string(op.given_count);
    if (!op.group.empty()) ops += ", \"group\": " + json_of(op.group);
    ops += "}";
  }
  // As one piece: a coordinator may be killed at any time.
  const std::string line = "{\"view\": " + std::to_string(view.number) + ", \"members\": " + json_of(view.ranks()) +
                           ", \"joining\": " + json_of(view.joining) + ", \"gate\": " + std::to_string(view.gate) +
                           ", \"rounds\": [" + ops + "]}\n";
  errno = 0;
  file_ << line << std::flush;
  if (file_) return {};
  const std::string why = std::strerror(errno);
  file_.close();
  return {Code::kInternal, "cannot write history_file " + name_ + ": " + why + "; it ends before view " +
                               std::to_string(view.number) + ", and no replay of what comes is possible"};
}

}  // namespace jaxhetero
