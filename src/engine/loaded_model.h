// A target and its drafter, opened, planned and loaded on this rank.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/expert_placement.h"
#include "comm/process_group.h"
#include "model/decoder.h"
#include "speculative/drafter.h"
#include "speculative/output_ring.h"
#include "speculative/step_state.h"
#include "weights/checkpoint.h"
#include "weights/weight_store.h"

namespace kdtree {

enum class Mode : std::uint8_t {
  kPlain,  // one token a step
  kChain,  // the drafter's best token of each slot, as a chain
  kTree,   // best-first tree of at most tree_budget nodes
};

// Layers whose exchanges can be timed: as many as there are marks of the backend for, beside those
// of a step's stages.
inline constexpr std::size_t kFirstExchangeMark = 16;
inline constexpr auto kMostCountedLayers = static_cast<std::int64_t>(
    (Backend::kNumMarks - kFirstExchangeMark) / (OutputRing::kEntries * kMarksAnExchange));

struct EngineOptions {
  Mode mode = Mode::kTree;
  std::int64_t tree_budget = 16;  // nodes without the root; kTree only
  // Tokens that the drafter proposes a step, the slots of its block: 1 to its draft_horizon; 0 all.
  // Drafters are trained with whole blocks and guess worse, and sooner, in shorter ones.
  std::int64_t draft_length = 0;
  std::int64_t batch_size = 1;   // sequences a step
  std::int64_t max_context = 0;  // tokens of a sequence, prompt and output together
  std::int64_t max_prompt = 1;   // of the longest prompt: bounds the rows of a prefill call
  std::int64_t max_top_logits = 0;
  bool record_steps = false;
  bool record_experts = false;  // an observer of steps gets what the router chose
  bool score_windows = false;   // Engine::score is called
  // Steps that may run before the host has read the one before them: 0 or 1; -1 takes 1 where steps
  // are replayed on a device that works by itself. 1 costs a step whose outcome is dropped whenever
  // a sequence ends.
  std::int64_t steps_ahead = -1;
  bool fixed_counts = false;  // DecoderOptions::fixed_counts
  ExchangeKind exchange = ExchangeKind::kAllReduce;
  bool count_experts = false;  // Engine::expert_loads()
  // Engine::exchange_report(); needs record_experts and at most kMostCountedLayers with experts
  bool count_exchanges = false;
  ParallelGrid grid = {};
  // Which expert group (one a rank, unless the grid says otherwise) holds which routed expert,
  // equal on every rank; nullptr: ExpertPlacement::linear.
  std::shared_ptr<const ExpertPlacement> placement = {};
};

// What the user named, headers parsed.
struct ModelSource {
  TargetCheckpoint target;
  std::optional<DrafterCheckpoint> drafter;  // absent in plain mode
};

// Sizes that follow from options and configs; equal on every rank.
struct StepSizes {
  std::int64_t max_nodes = 1;       // of a tree, root included
  std::int64_t num_candidates = 1;  // that the tree builder gets for each slot
  std::int64_t num_ranked =
      1;  // that the drafter ranks for each slot (more where steps are recorded)
  std::int64_t num_recorded = 1;  // of these, how many a recorded step shows
  std::int64_t block_size = 0;    // rows of a draft; 0 without a drafter
  std::int64_t max_path = 1;      // accepted nodes, root included
  std::int64_t num_choices = 1;   // logits of a node that tell near-ties
  std::int64_t prefill_rows = 1;  // of one prompt piece
  std::int64_t max_rows = 1;      // of one forward call
  DecoderOptions decoder;
  DrafterOptions drafter;
  VocabularyLimits vocabulary;
  CacheSizes cache;
};
StepSizes step_sizes(const ModelSource& source, const EngineOptions& options);
// Of these, what the rank's cache has: the slots of its attention group.
CacheSizes rank_cache_sizes(const StepSizes& sizes, const LoadOptions& load);

// That of the options, on the expert groups of world_size ranks. Error if it is for other groups or
// experts.
ExpertPlacement expert_placement(const ModelConfig& config, const EngineOptions& options,
                                 int world_size);

// `load` as one rank of world_size has it for these options; and as the drafter's weights have it:
// whoever asks for quantised weights asks it of the target, a drafter without any is no error.
LoadOptions rank_load_options(const LoadOptions& load, int rank, int world_size,
                              const EngineOptions& options);
LoadOptions drafter_load_options(const LoadOptions& load);

class LoadedModel {
 public:
  // Prints the memory plan (memory_plan.h), checks it against the memory that is there and loads
  // this rank's weights; no collectives. InputError for whatever is wrong with the files or does
  // not fit. source outlives the object.
  LoadedModel(const ModelSource& source, const EngineOptions& options, const LoadOptions& load,
              const ProcessGroup& group, Backend& backend);

  const ModelSource& source() const { return source_; }
  const ExpertPlacement& placement() const { return placement_; }
  // Another placement with the same slots: see move_experts (weights/weight_store.h). Decoders that
  // were made of this model must be told (Engine::rebalance does both). No collectives.
  LoadStatistics move_experts(const ExpertPlacement& placement, Backend& backend);
  const WeightStore& target_weights() const { return target_weights_; }
  const WeightStore& drafter_weights() const { return drafter_weights_; }
  const LoadOptions& load_options() const { return load_; }
  // Of this rank: target and drafter together.
  LoadStatistics load_statistics() const;

 private:
  const ModelSource& source_;
  LoadOptions load_;
  ExpertPlacement placement_;
  WeightStore target_weights_;
  WeightStore drafter_weights_;
};

}  // namespace kdtree
