#include "engine/memory_plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/log.h"
#include "engine/engine.h"

namespace kdtree {

namespace {

bool drafts(const ModelSource& source, const EngineOptions& options) {
  return source.drafter && options.mode != Mode::kPlain;
}

// Ranks of one host share its memory under the CPU backend.
std::int64_t available_bytes(const ProcessGroup& group, const Backend& backend) {
  return backend.free_bytes() / (backend.name() == "cpu" ? group.local_size() : 1);
}

}  // namespace

std::int64_t MemoryPlan::total_bytes() const {
  return std::accumulate(entries.begin(), entries.end(), std::int64_t{0},
                         [](std::int64_t sum, const Entry& entry) { return sum + entry.bytes; });
}

MemoryPlan weights_plan(const ModelSource& source, const EngineOptions& options,
                        const LoadOptions& load) {
  const ExpertPlacement placement =
      expert_placement(source.target.config, options, load.world_size);
  WeightBytes bytes = target_bytes_by_kind(source.target, placement, load);
  if (drafts(source, options)) {
    bytes[static_cast<std::size_t>(WeightKind::kDrafter)] =
        drafter_bytes(*source.drafter, drafter_load_options(load));
  }
  MemoryPlan plan;
  for (std::size_t kind = 0; kind < kNumWeightKinds; ++kind) {
    plan.entries.push_back(
        {std::string(weight_kind_name(static_cast<WeightKind>(kind))), bytes[kind]});
  }
  return plan;
}

MemoryPlan workspace_plan(const ModelSource& source, const EngineOptions& options,
                          const LoadOptions& load, const MemoryTraits& traits) {
  const StepSizes sizes = step_sizes(source, options);
  const ModelConfig& config = source.target.config;
  const TargetPartition partition = target_partition(config, load);
  const DType dtype = traits.activation_dtype();
  MemoryPlan plan;
  const auto add = [&plan](const char* what, std::int64_t bytes) {
    plan.entries.push_back({what, bytes});
  };
  std::int64_t drafter_cache = 0;
  std::int64_t drafter_workspace = 0;
  if (drafts(source, options)) {
    const DrafterConfig& drafter = source.drafter->config;
    const DrafterPartition drafter_part = drafter_partition(drafter, load);
    drafter_cache =
        2 * LatentKvCache::bytes(Drafter::cache_sizes(drafter, drafter_part, sizes.drafter), dtype);
    drafter_workspace = Drafter::workspace_bytes(traits, drafter, drafter_part, sizes.drafter);
  }
  add("latent cache", LatentKvCache::bytes(rank_cache_sizes(sizes, load), dtype));
  add("drafter cache", drafter_cache);
  add("target workspace",
      Decoder::workspace_bytes(traits, config, partition, sizes.decoder, load.world_size));
  add("drafter workspace", drafter_workspace);
  add("vocabulary workspace",
      Vocabulary::bytes(sizes.vocabulary, partition.vocabulary, load.world_size));
  add("step state", StepState::bytes({.max_sequences = options.batch_size,
                                      .max_nodes = sizes.max_nodes,
                                      .block_size = sizes.block_size,
                                      .max_path = sizes.max_path}));
  add("engine", Engine::own_bytes(source, options, dtype));
  add("device reserve", traits.asynchronous() ? kDeviceReserveBytes : 0);
  return plan;
}

MemoryPlan memory_plan(const ModelSource& source, const EngineOptions& options,
                       const LoadOptions& load, const MemoryTraits& traits) {
  MemoryPlan plan = weights_plan(source, options, load);
  const MemoryPlan rest = workspace_plan(source, options, load, traits);
  plan.entries.insert(plan.entries.end(), rest.entries.begin(), rest.entries.end());
  return plan;
}

ContextNeed context_need(const ModelSource& source, const EngineOptions& options,
                         const LoadOptions& load, std::int64_t weight_bytes,
                         const MemoryTraits& traits) {
  const auto bytes_of = [&](std::int64_t context) {
    EngineOptions tried = options;
    tried.max_context = context;
    return static_cast<double>(weight_bytes +
                               workspace_plan(source, tried, load, traits).total_bytes());
  };
  ContextNeed need;
  need.least = bytes_of(options.max_context);
  // Caches and position tables grow with the context, a token like the other.
  need.of_token = bytes_of(options.max_context + 1) - need.least;
  return need;
}

std::int64_t largest_context(const std::vector<ContextNeed>& needs, std::int64_t least,
                             const ContextGoal& goal) {
  auto largest = static_cast<double>(std::max(goal.limit, least));
  for (std::size_t rank = 0; rank < needs.size(); ++rank) {
    const ContextNeed& need = needs[rank];
    require_input(need.least <= need.room,
                  "--memory-fraction {} is too little: that is {:.3f} GB on rank {}, and a "
                  "context of {} tokens needs {:.3f} GB",
                  goal.fraction, need.room / 1e9, rank, least, need.least / 1e9);
    if (need.of_token > 0) {
      const double more = std::floor((need.room - need.least) / need.of_token);
      largest = std::min(largest, static_cast<double>(least) + more);
    }
  }
  return static_cast<std::int64_t>(largest);
}

std::int64_t context_for_memory(const PlannedRun& run, const ContextGoal& goal, ProcessGroup& group,
                                const Backend& backend) {
  ContextNeed own;
  run_together(group, [&] {
    const LoadOptions load =
        rank_load_options(run.load, group.rank(), group.world_size(), run.options);
    own = context_need(run.source, run.options, load,
                       weights_plan(run.source, run.options, load).total_bytes(), backend);
    own.room = goal.fraction * static_cast<double>(available_bytes(group, backend));
  });
  std::vector<ContextNeed> all(static_cast<std::size_t>(group.world_size()));
  group.all_gather(&own, sizeof own, all.data());
  // Every rank goes by all of them: one verdict.
  std::int64_t largest = 0;
  run_together(group, [&] { largest = largest_context(all, run.options.max_context, goal); });
  return largest;
}

void check_memory(const MemoryPlan& plan, const ProcessGroup& group, const Backend& backend) {
  std::string lines;
  for (const MemoryPlan::Entry& entry : plan.entries) {
    if (entry.bytes > 0) {
      lines += fmt::format("{}{} {:.4f}", lines.empty() ? "" : ", ", entry.what,
                           static_cast<double>(entry.bytes) / 1e9);
    }
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

}  // namespace kdtree
