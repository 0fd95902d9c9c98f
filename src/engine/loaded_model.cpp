#include "engine/loaded_model.h"

#include <algorithm>

#include "engine/group_slots.h"
#include "engine/memory_plan.h"

namespace kdtree {

namespace {

// Rows of a prompt that one forward call takes: bounds the workspaces, and fills the matrix
// products well.
constexpr std::int64_t kMaxPrefillRows = 512;
// Rows of a prompt piece whose logits are there at a time: bounds the logits of a large vocabulary.
constexpr std::int64_t kMaxScoredRows = 128;
// Candidates of each slot that a recorded step shows.
constexpr std::int64_t kRecordedCandidates = 8;

// Tokens that the drafter proposes a step.
std::int64_t draft_length(const DrafterConfig& drafter, const EngineOptions& options) {
  check(options.draft_length >= 0 && options.draft_length <= drafter.draft_horizon(),
        "a draft of {} tokens by a drafter of {}", options.draft_length, drafter.draft_horizon());
  return options.draft_length == 0 ? drafter.draft_horizon() : options.draft_length;
}

}  // namespace

StepSizes step_sizes(const ModelSource& source, const EngineOptions& options) {
  const ModelConfig& target = source.target.config;
  StepSizes sizes;
  std::int64_t horizon = 0;
  if (options.mode != Mode::kPlain) {
    const DrafterConfig& drafter = source.drafter->config;
    const bool chain = options.mode == Mode::kChain;
    const std::int64_t drafted = draft_length(drafter, options);
    // Deeper slots than a tree can reach need not predict, unless they are to be shown.
    horizon = chain || options.record_steps ? drafted : std::min(drafted, options.tree_budget);
    sizes.max_nodes = 1 + (chain ? horizon : options.tree_budget);
    sizes.num_candidates = chain ? 1 : std::min(options.tree_budget, target.vocab_size);
    sizes.num_ranked = sizes.num_candidates;
    sizes.num_recorded = std::min(kRecordedCandidates, target.vocab_size);
    sizes.block_size = 1 + drafted;
    if (options.record_steps) {
      sizes.num_ranked = std::max(sizes.num_ranked, sizes.num_recorded);
    }
    sizes.decoder.target_layer_ids = drafter.target_layer_ids;
  }
  sizes.max_path = 1 + horizon;
  sizes.num_choices = std::min<std::int64_t>(2, target.vocab_size);
  sizes.prefill_rows = std::min(options.max_prompt, kMaxPrefillRows);
  sizes.max_rows = std::max(options.batch_size * sizes.max_nodes, sizes.prefill_rows);
  sizes.decoder.max_rows = sizes.max_rows;
  // A prompt is one group's.
  sizes.decoder.max_group_rows =
      std::max(group_slots(options.grid, options.batch_size, 0).size() * sizes.max_nodes,
               sizes.prefill_rows);
  // A step that runs ahead begins behind the longest path of the step that ended its sequence.
  const std::int64_t last_prefix = options.max_context + sizes.max_path;
  sizes.decoder.max_positions = last_prefix + sizes.max_path;
  sizes.decoder.exchange = options.exchange;
  sizes.decoder.keep_expert_ids = options.record_experts;
  sizes.decoder.fixed_counts = options.fixed_counts;
  sizes.decoder.count_experts = options.count_experts;
  sizes.decoder.placement = options.placement;
  sizes.decoder.grid = options.grid;
  sizes.drafter.num_slots = options.batch_size;
  sizes.drafter.capacity = last_prefix + std::max(sizes.max_path, sizes.block_size);
  sizes.drafter.max_context_rows =
      std::max(options.batch_size * sizes.max_path, sizes.prefill_rows);
  sizes.drafter.block_size = sizes.block_size;
  sizes.drafter.num_predicted = horizon;
  const std::int64_t drafted_rows = options.batch_size * horizon;
  sizes.vocabulary.max_rows = std::max(options.batch_size * sizes.max_nodes, drafted_rows);
  if (options.score_windows) {
    sizes.vocabulary.max_scored_rows = std::min(sizes.prefill_rows, kMaxScoredRows);
    sizes.vocabulary.max_rows =
        std::max(sizes.vocabulary.max_rows, sizes.vocabulary.max_scored_rows);
  }
  sizes.vocabulary.max_candidates =
      std::max({sizes.vocabulary.max_rows * sizes.num_choices, drafted_rows * sizes.num_ranked,
                std::max(sizes.num_choices, options.max_top_logits)});
  sizes.cache = {.num_layers = target.num_hidden_layers,
                 .num_slots = options.batch_size,
                 .capacity = last_prefix + sizes.max_nodes,
                 .width = target.kv_lora_rank + target.qk_rope_head_dim};
  return sizes;
}

CacheSizes rank_cache_sizes(const StepSizes& sizes, const LoadOptions& load) {
  CacheSizes cache = sizes.cache;
  const int group = load.grid.attention_group(load.rank, load.world_size);
  cache.stored_slots = group_slots(load.grid, cache.num_slots, group).size();
  return cache;
}

ExpertPlacement expert_placement(const ModelConfig& config, const EngineOptions& options,
                                 int world_size) {
  const int groups = options.grid.moe_ep(world_size);
  if (!options.placement) {
    return ExpertPlacement::linear(config.n_routed_experts, groups);
  }
  const ExpertPlacement& placement = *options.placement;
  check(placement.n_routed_experts() == config.n_routed_experts && placement.world_size() == groups,
        "a placement of {} experts on {} ranks for a model of {} on {}",
        placement.n_routed_experts(), placement.world_size(), config.n_routed_experts, groups);
  return placement;
}

LoadOptions rank_load_options(const LoadOptions& load, int rank, int world_size,
                              const EngineOptions& options) {
  LoadOptions result = load;
  result.rank = rank;
  result.world_size = world_size;
  result.grid = options.grid;
  result.replicate_shared_experts = options.exchange == ExchangeKind::kAllToAll;
  return result;
}

LoadOptions drafter_load_options(const LoadOptions& load) {
  LoadOptions result = load;
  if (result.weights == WeightsChoice::kQuantized) {
    result.weights = WeightsChoice::kAuto;
  }
  return result;
}

LoadedModel::LoadedModel(const ModelSource& source, const EngineOptions& options,
                         const LoadOptions& load, const ProcessGroup& group, Backend& backend)
    : source_(source),
      load_(rank_load_options(load, group.rank(), group.world_size(), options)),
      placement_(expert_placement(source.target.config, options, group.world_size())) {
  check_memory(memory_plan(source, options, load_, backend), group, backend);
  target_weights_ = load_target(source.target, placement_, load_, backend);
  if (source.drafter && options.mode != Mode::kPlain) {
    drafter_weights_ = load_drafter(*source.drafter, drafter_load_options(load_), backend);
  }
}

LoadStatistics LoadedModel::move_experts(const ExpertPlacement& placement, Backend& backend) {
  const ExpertPlacement kept = placement.kept_in_place(placement_);
  const LoadStatistics read = kdtree::move_experts(
      source_.target, {.before = placement_, .after = kept}, load_, backend, target_weights_);
  placement_ = kept;
  return read;
}

LoadStatistics LoadedModel::load_statistics() const {
  LoadStatistics statistics = target_weights_.load_statistics();
  statistics += drafter_weights_.load_statistics();
  return statistics;
}

}  // namespace kdtree
