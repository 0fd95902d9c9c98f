#include "line_output.h"

#include <cerrno>
#include <cstring>

#include "core/check.h"
#include "result_output.h"

namespace kdtree {

LineOutput::LineOutput(const std::string& path) : path_(path) {
  if (!path_.empty()) {
    errno = 0;
    file_.open(path_, std::ios::trunc);
    require_writable();
  }
}

void LineOutput::write(const nlohmann::ordered_json& line) {
  // A path may hold bytes that are no UTF-8.
  const std::string text =
      line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  if (path_.empty()) {
    write_stdout(text);
    return;
  }
  errno = 0;
  file_ << text << std::flush;
  require_writable();
}

void LineOutput::require_writable() const {
  require_input(file_.good(), "--output: cannot write {}: {}", path_,
                errno == 0 ? "unknown cause" : std::strerror(errno));
}

std::optional<LineOutput> open_on_rank0(const std::string& path, ProcessGroup& group) {
  std::optional<LineOutput> output;
  run_together(group, [&] {
    if (group.rank() == 0) {
      output.emplace(path);
    }
  });
  return output;
}

}  // namespace kdtree
