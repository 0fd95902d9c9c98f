// Where the JSON lines of a measurement go.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "comm/process_group.h"

namespace kdtree {

// A file (--output) or, for an empty path, stdout.
class LineOutput {
 public:
  // InputError if the file cannot be written.
  explicit LineOutput(const std::string& path);

  // Writes one line and flushes. InputError if file or stdout does not take it.
  void write(const nlohmann::ordered_json& line);

 private:
  void require_writable() const;

  std::string path_;
  std::ofstream file_;
};

// On rank 0, for all: none on the others. Collective. AgreedError if the file cannot be written.
std::optional<LineOutput> open_on_rank0(const std::string& path, ProcessGroup& group);

}  // namespace kdtree
