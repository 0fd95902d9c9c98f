// How a text is cut into windows whose tokens are scored.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/request.h"

namespace kdtree {

struct WindowCut {
  std::int64_t window = 512;  // tokens; at least 2
  // From the start of a window to that of the next, 1 to `window`. Where windows overlap, a token
  // is scored once, in the first window that holds it; the first token of the text never is, nor
  // that of a window which overlaps none.
  std::int64_t stride = 512;
  std::int64_t max_windows = 0;  // 0: all
};

// Windows of `ids` in order; the last may be shorter. One without a token to score is left out.
std::vector<ScoreWindow> cut_windows(std::span<const std::int32_t> ids, const WindowCut& cut);

}  // namespace kdtree
