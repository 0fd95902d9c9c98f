#include "study/text_windows.h"

#include <algorithm>

#include "core/check.h"

namespace kdtree {

std::vector<ScoreWindow> cut_windows(std::span<const std::int32_t> ids, const WindowCut& cut) {
  check(cut.window >= 2 && cut.stride >= 1 && cut.stride <= cut.window,
        "windows of {} tokens every {}", cut.window, cut.stride);
  std::vector<ScoreWindow> windows;
  const std::int64_t num_tokens = std::ssize(ids);
  std::int64_t scored_end = 0;  // tokens below have had their turn
  for (std::int64_t begin = 0; scored_end < num_tokens; begin += cut.stride) {
    const std::int64_t end = std::min(num_tokens, begin + cut.window);
    const std::int64_t first_scored = std::max<std::int64_t>(1, scored_end - begin);
    scored_end = end;
    if (first_scored >= end - begin) {
      continue;
    }
    if (cut.max_windows > 0 && std::ssize(windows) == cut.max_windows) {
      break;
    }
    const auto part =
        ids.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
    windows.push_back({.token_ids = {part.begin(), part.end()}, .first_scored = first_scored});
  }
  return windows;
}

}  // namespace kdtree
