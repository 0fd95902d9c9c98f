// What goes into the engine and what comes out, a prompt each.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kdtree {

struct Request {
  std::vector<std::int32_t> prompt_ids;
  std::int64_t max_new_tokens = 0;
  bool ignore_eos = false;
};

enum class StopReason : std::uint8_t {
  kEos,      // an end token was produced; it is the last of output_ids
  kLength,   // max_new_tokens reached
  kContext,  // max_context reached (prompt and output together)
};
std::string stop_reason_name(StopReason reason);  // "eos", "length", "context"

// Parts of a step, in order.
enum class Stage : std::uint8_t { kDraft, kTreeBuild, kVerify, kAccept, kCommit };
inline constexpr std::size_t kNumStages = 5;
std::string stage_name(Stage stage);                // "draft", "tree_build", ...
using StageTimes = std::array<double, kNumStages>;  // milliseconds by stage

using TokenLogit = std::pair<std::int32_t, float>;

// One step of one sequence, for --dump-steps.
struct StepRecord {
  std::int32_t root = 0;
  std::vector<std::vector<TokenLogit>>
      draft_top_log_probs;                   // best 8 of each slot, log-probabilities
  std::vector<std::int32_t> token_ids;       // nodes without the root
  std::vector<std::int32_t> depths;          // nodes without the root
  std::vector<std::int32_t> parents;         // the root first, its parent is -1
  std::vector<std::int32_t> accepted_nodes;  // indices into parents, without the root
  std::int32_t bonus_token = 0;
};

// What one step (or the prompt) added to a sequence.
struct TokenUpdate {
  std::int64_t index = 0;                // of its request
  std::span<const std::int32_t> tokens;  // behind those told before; valid during the call
  bool finished = false;                 // nothing follows
};

// A piece of text whose tokens are to be scored.
struct ScoreWindow {
  std::vector<std::int32_t> token_ids;
  // Index of the first token whose probability is asked for; those before it are context only.
  std::int64_t first_scored = 1;
};

struct SequenceMetrics {
  double time_to_first_token_ms = 0;  // from admission: the prompt's forward passes
  double total_ms = 0;                // from admission to the last token
  double prefill_ms = 0;
  std::vector<StageTimes> steps;  // that the sequence took part in
};

struct Result {
  std::int64_t index = 0;  // of its request
  std::vector<std::int32_t> prompt_ids;
  std::vector<std::int32_t> output_ids;  // cut at the limit or behind the end token
  // One a step, bonus token included, not cut: 1 + their sum is the number of tokens that were
  // known when it stopped.
  std::vector<std::int32_t> acceptance_lengths;
  // Indices into output_ids whose choice was a near-tie (src/engine/near_tie.h): another order of
  // the same sums may choose another token there.
  std::vector<std::int64_t> near_ties;
  // One for each of near_ties: how far apart the logits were, 1 being the bound.
  std::vector<double> near_tie_margins;
  StopReason stop_reason = StopReason::kLength;
  std::vector<TokenLogit> top_logits;  // after the prompt, descending
  std::vector<StepRecord> steps;
  SequenceMetrics metrics;
};

}  // namespace kdtree
