#include "engine/loaded_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/log.h"

namespace kdtree {

namespace {

// Rows of a prompt that one forward call takes: bounds the workspaces, and fills the matrix
// products well.
constexpr std::int64_t kMaxPrefillRows = 512;
// Candidates of each slot that a recorded step shows.
constexpr std::int64_t kRecordedCandidates = 8;

LoadOptions for_ranks(const LoadOptions& load, const ProcessGroup& group,
                      const EngineOptions& options) {
  LoadOptions result = load;
  result.rank = group.rank();
  result.world_size = group.world_size();
  result.replicate_shared_experts = options.exchange == ExchangeKind::kAllToAll;
  return result;
}

// Whoever asks for quantised weights asks it of the target: a drafter without any is no error.
LoadOptions for_drafter(const LoadOptions& load) {
  LoadOptions result = load;
  if (result.weights == WeightsChoice::kQuantized) {
    result.weights = WeightsChoice::kAuto;
  }
  return result;
}

}  // namespace

StepSizes step_sizes(const ModelSource& source, const EngineOptions& options) {
  const ModelConfig& target = source.target.config;
  StepSizes sizes;
  std::int64_t horizon = 0;
  if (options.mode != Mode::kPlain) {
    const DrafterConfig& drafter = source.drafter->config;
    horizon = drafter.draft_horizon();
    const bool chain = options.mode == Mode::kChain;
    sizes.max_nodes = 1 + (chain ? horizon : options.tree_budget);
    sizes.num_candidates = chain ? 1 : std::min(options.tree_budget, target.vocab_size);
    sizes.num_ranked = sizes.num_candidates;
    sizes.num_recorded = std::min(kRecordedCandidates, target.vocab_size);
    sizes.block_size = drafter.block_size;
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
  // A step that runs ahead begins behind the longest path of the step that ended its sequence.
  const std::int64_t last_prefix = options.max_context + sizes.max_path;
  sizes.decoder.max_positions = last_prefix + sizes.max_path;
  sizes.decoder.exchange = options.exchange;
  sizes.decoder.fixed_counts = options.fixed_counts;
  sizes.drafter.num_slots = options.batch_size;
  sizes.drafter.capacity = last_prefix + sizes.max_path;
  sizes.drafter.max_context_rows =
      std::max(options.batch_size * sizes.max_path, sizes.prefill_rows);
  const std::int64_t drafted_rows = options.batch_size * horizon;
  sizes.vocabulary.max_rows = std::max(options.batch_size * sizes.max_nodes, drafted_rows);
  sizes.vocabulary.max_candidates =
      std::max({sizes.vocabulary.max_rows * sizes.num_choices, drafted_rows * sizes.num_ranked,
                std::max(sizes.num_choices, options.max_top_logits)});
  sizes.cache = {.num_layers = target.num_hidden_layers,
                 .num_slots = options.batch_size,
                 .capacity = last_prefix + sizes.max_nodes,
                 .width = target.kv_lora_rank + target.qk_rope_head_dim};
  return sizes;
}

std::int64_t MemoryPlan::total_bytes() const {
  return std::accumulate(entries.begin(), entries.end(), std::int64_t{0},
                         [](std::int64_t sum, const Entry& entry) { return sum + entry.bytes; });
}

MemoryPlan memory_plan(const ModelSource& source, const EngineOptions& options,
                       const LoadOptions& load, const Backend& backend) {
  const StepSizes sizes = step_sizes(source, options);
  const ModelConfig& config = source.target.config;
  const ExpertPlacement placement =
      ExpertPlacement::linear(config.n_routed_experts, load.world_size);
  const TargetPartition partition = target_partition(config, load);
  const DType dtype = backend.activation_dtype();
  MemoryPlan plan;
  plan.entries.push_back({"target weights", target_bytes(source.target, placement, load)});
  plan.entries.push_back({"latent cache", LatentKvCache::bytes(sizes.cache, dtype)});
  plan.entries.push_back(
      {"target workspace",
       Decoder::workspace_bytes(backend, config, partition, sizes.decoder, load.world_size)});
  plan.entries.push_back(
      {"vocabulary", Vocabulary::bytes(sizes.vocabulary, partition.vocabulary, load.world_size)});
  plan.entries.push_back({"step state", StepState::bytes({.max_sequences = options.batch_size,
                                                          .max_nodes = sizes.max_nodes,
                                                          .block_size = sizes.block_size,
                                                          .max_path = sizes.max_path})});
  if (source.drafter && options.mode != Mode::kPlain) {
    const DrafterConfig& drafter = source.drafter->config;
    const DrafterPartition drafter_part = drafter_partition(drafter, load);
    plan.entries.push_back({"drafter weights", drafter_bytes(*source.drafter, for_drafter(load))});
    plan.entries.push_back(
        {"drafter cache",
         2 * LatentKvCache::bytes(Drafter::cache_sizes(drafter, drafter_part, sizes.drafter),
                                  dtype)});
    plan.entries.push_back(
        {"drafter workspace",
         Drafter::workspace_bytes(backend, drafter, drafter_part, sizes.drafter)});
  }
  return plan;
}

namespace {

// Ranks of one host share its memory under the CPU backend.
std::int64_t available_bytes(const ProcessGroup& group, const Backend& backend) {
  return backend.free_bytes() / (backend.name() == "cpu" ? group.local_size() : 1);
}

void check_memory(const MemoryPlan& plan, const ProcessGroup& group, const Backend& backend) {
  std::string lines;
  for (const MemoryPlan::Entry& entry : plan.entries) {
    lines += fmt::format("{}{} {:.4f}", lines.empty() ? "" : ", ", entry.what,
                         static_cast<double>(entry.bytes) / 1e9);
  }
  const double total = static_cast<double>(plan.total_bytes()) / 1e9;
  const double available = static_cast<double>(available_bytes(group, backend)) / 1e9;
  spdlog::info("memory plan of rank {} (GB): {}; total {:.4f} of {:.2f} free", group.rank(), lines,
               total, available);
  require_input(total <= available,
                "the model does not fit: rank {} needs {:.3f} GB ({}) and has {:.3f} GB free. More "
                "ranks on more hosts, a "
                "smaller --max-context, --batch-size or --tree-budget, or --weights quantized make "
                "it smaller",
                group.rank(), total, lines, available);
}

}  // namespace

std::int64_t context_for_memory(const ModelSource& source, const EngineOptions& options,
                                const LoadOptions& load, const ContextGoal& goal,
                                ProcessGroup& group, const Backend& backend) {
  // What a rank has, what the least context needs, and each token more.
  struct Need {
    double room = 0;
    double least = 0;
    double of_token = 0;
  };
  Need own;
  const LoadOptions own_load = for_ranks(load, group, options);
  const auto plan_bytes = [&](std::int64_t context) {
    EngineOptions tried = options;
    tried.max_context = context;
    return static_cast<double>(memory_plan(source, tried, own_load, backend).total_bytes());
  };
  run_together(group, [&] {
    own.room = goal.fraction * static_cast<double>(available_bytes(group, backend));
    own.least = plan_bytes(options.max_context);
    // Caches and position tables grow with the context, a token like the other.
    own.of_token = plan_bytes(options.max_context + 1) - own.least;
  });
  std::vector<Need> all(static_cast<std::size_t>(group.world_size()));
  group.all_gather(&own, sizeof own, all.data());
  // Every rank goes by all of them: one verdict.
  auto largest = static_cast<double>(std::max(goal.limit, options.max_context));
  run_together(group, [&] {
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const Need& need = all[rank];
      require_input(need.least <= need.room,
                    "--memory-fraction {} is too little: that is {:.3f} GB on rank {}, and a "
                    "context of {} tokens needs {:.3f} GB",
                    goal.fraction, need.room / 1e9, rank, options.max_context, need.least / 1e9);
      if (need.of_token > 0) {
        const double more = std::floor((need.room - need.least) / need.of_token);
        largest = std::min(largest, static_cast<double>(options.max_context) + more);
      }
    }
  });
  return static_cast<std::int64_t>(largest);
}

LoadedModel::LoadedModel(const ModelSource& source, const EngineOptions& options,
                         const LoadOptions& load, const ProcessGroup& group, Backend& backend)
    : source_(source),
      load_(for_ranks(load, group, options)),
      placement_(
          ExpertPlacement::linear(source.target.config.n_routed_experts, group.world_size())) {
  check_memory(memory_plan(source, options, load_, backend), group, backend);
  target_weights_ = load_target(source.target, placement_, load_, backend);
  if (source.drafter && options.mode != Mode::kPlain) {
    drafter_weights_ = load_drafter(*source.drafter, for_drafter(load_), backend);
  }
}

}  // namespace kdtree
