// The history of an elastic job, in a file: who has taken part in which rounds. With it, a replay of the program has
// the bits of the job. Nothing reads it back.
#pragma once

#include <fstream>
#include <map>
#include <string>

#include "xla_ffi/base/status.h"
#include "xla_ffi/wire/elastic_messages.h"
#include "xla_ffi/wire/messages.h"

namespace jaxhetero {

class History {
 public:
  // Lines are appended. An empty name means no file.
  Status open(const std::string& file);

  // What is about to be told: the members take part in all rounds from these counts on, up to those of the next line.
  // Each line is complete before a round of its view is. An error, once, where it cannot be written: the file then ends
  // there, as a history that lacks a line would be another one.
  Status note(const View& view, const std::map<uint64_t, Report::Op>& complete);

 private:
  std::string name_;
  std::ofstream file_;
};

}  // namespace jaxhetero
