// Scoring given tokens: Engine::score.
#include <algorithm>

#include "engine/engine.h"

namespace kdtree {

void Engine::score(const std::vector<ScoreWindow>& windows, const OnScores& on_scores) {
  check(options_.score_windows, "an engine that was not made to score windows");
  const std::vector<ScoreWindow> shared = share_windows(windows);
  run_together(group_, [&] { check_windows(shared, config_, options_); });
  for (std::size_t i = 0; i < shared.size(); ++i) {
    const std::vector<double> log_probs = score_window(shared[i]);
    if (group_.rank() == 0) {
      on_scores(i, log_probs);
    }
  }
}

std::vector<double> Engine::score_window(const ScoreWindow& window) {
  constexpr std::int32_t kSlot = 0;
  cache_.clear(kSlot);
  const std::span<const std::int32_t> tokens = window.token_ids;
  const std::span<const std::int32_t> context = tokens.first(tokens.size() - 1);
  const auto piece_rows = static_cast<std::size_t>(sizes_.prefill_rows);
  const auto scored_rows = static_cast<std::size_t>(sizes_.vocabulary.max_scored_rows);
  // The row of token i predicts token i + 1.
  auto next = static_cast<std::size_t>(window.first_scored) - 1;
  std::vector<double> log_probs;
  for (std::size_t first = 0; first < context.size(); first += piece_rows) {
    const auto piece = context.subspan(first, std::min(piece_rows, context.size() - first));
    const ConstTensorView hidden = append_piece(kSlot, piece);
    const std::size_t end = first + piece.size();
    while (next < end) {
      const std::size_t count = std::min(scored_rows, end - next);
      const auto rows = static_cast<std::int64_t>(count);
      const TensorView normed = normed_.rows(rows);
      decoder_.final_norm(hidden.rows(static_cast<std::int64_t>(next - first), rows), normed);
      const std::vector<double> part =
          vocabulary_.log_probs_of(normed, tokens.subspan(next + 1, count));
      log_probs.insert(log_probs.end(), part.begin(), part.end());
      next += count;
    }
    context_.backend.synchronize();  // the next piece is uploaded into the same memory
  }
  return log_probs;
}

}  // namespace kdtree
