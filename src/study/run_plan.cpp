#include "study/run_plan.h"

#include <algorithm>
#include <array>
#include <map>

#include "core/check.h"
#include "weights/tensor_spec.h"

namespace kdtree {

namespace {

constexpr std::int64_t kMebibyte = std::int64_t{1} << 20;
constexpr std::array<GpuModel, 4> kGpuModels = {{
    {"rtx-pro-6000", 97887 * kMebibyte},
    {"h100", 81559 * kMebibyte},
    {"h200", 143771 * kMebibyte},
    {"b200", 183359 * kMebibyte},
}};

// The weights of ranks, one after another. Going through a table of tensors takes long, and there
// is little to find out: bytes of a kind depend on the rank's share of one dimension alone, and the
// first and the last rank have all the shares that there usually are.
class WeightPlans {
 public:
  WeightPlans(const ModelSource& source, const RunPlanOptions& options)
      : source_(source),
        options_(options),
        placement_(expert_placement(source.target.config, options.engine, options.num_ranks)) {
    learn(load_of(0));
    learn(load_of(options.num_ranks - 1));
  }

  LoadOptions load_of(int rank) const {
    return rank_load_options(options_.load, rank, options_.num_ranks, options_.engine);
  }

  MemoryPlan of(const LoadOptions& load) {
    learn(load);
    MemoryPlan plan = names_;
    const Shares shares = shares_of(load);
    for (std::size_t kind = 0; kind < kNumWeightKinds; ++kind) {
      plan.entries[kind].bytes = bytes_[kind].at(shares[kind]);
    }
    if (source_.drafter && options_.engine.mode != Mode::kPlain) {
      plan.entries[static_cast<std::size_t>(WeightKind::kDrafter)].bytes =
          drafter_bytes(*source_.drafter, drafter_load_options(load));
    }
    return plan;
  }

 private:
  // By WeightKind; 0 where every rank holds all, and for the drafter, which is counted each time.
  using Shares = std::array<std::int64_t, kNumWeightKinds>;

  Shares shares_of(const LoadOptions& load) const {
    const ModelConfig& config = source_.target.config;
    const TargetPartition part = target_partition(config, load);
    Shares shares{};
    const auto set = [&shares](WeightKind kind, const Range& range) {
      shares[static_cast<std::size_t>(kind)] = range.size();
    };
    // Slots and the width of their slices as one number.
    set(WeightKind::kRoutedExperts,
        {0, num_slots(load.grid.expert_group(load.rank)) * (config.moe_intermediate_size + 1) +
                part.expert_intermediate.size()});
    set(WeightKind::kSharedExperts, part.shared_intermediate);
    set(WeightKind::kDenseLayers, part.intermediate);
    set(WeightKind::kAttention, part.heads);
    set(WeightKind::kVocabulary, part.vocabulary);
    return shares;
  }

  // Of the expert group, in all layers.
  std::int64_t num_slots(int group) const {
    const ModelConfig& config = source_.target.config;
    std::int64_t sum = 0;
    for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
      if (config.is_moe_layer(layer)) {
        sum += std::ssize(placement_.layer(layer).experts_of(group));
      }
    }
    return sum;
  }

  // Unless everything about this rank is known.
  void learn(const LoadOptions& load) {
    const Shares shares = shares_of(load);
    bool known = true;
    for (std::size_t kind = 0; kind < kNumWeightKinds; ++kind) {
      known = known && bytes_[kind].contains(shares[kind]);
    }
    if (known) {
      return;
    }
    names_ = weights_plan(source_, options_.engine, load);
    for (std::size_t kind = 0; kind < kNumWeightKinds; ++kind) {
      bytes_[kind].emplace(shares[kind], names_.entries[kind].bytes);
    }
  }

  const ModelSource& source_;
  const RunPlanOptions& options_;
  ExpertPlacement placement_;
  std::array<std::map<std::int64_t, std::int64_t>, kNumWeightKinds> bytes_;  // of a share
  MemoryPlan names_;  // its bytes are not looked at
};

}  // namespace

std::span<const GpuModel> gpu_models() {
  return kGpuModels;
}

std::int64_t RunPlan::peak_bytes() const {
  std::int64_t peak = 0;
  for (const MemoryPlan& plan : ranks) {
    peak = std::max(peak, plan.total_bytes());
  }
  return peak;
}

RunPlan plan_run(const ModelSource& source, const RunPlanOptions& options,
                 const MemoryTraits& traits) {
  EngineOptions engine = options.engine;
  WeightPlans weights(source, options);
  std::vector<ContextNeed> needs;
  RunPlan run;
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    const LoadOptions load = weights.load_of(rank);
    run.ranks.push_back(weights.of(load));
    if (options.room) {
      ContextNeed need = context_need(source, engine, load, run.ranks.back().total_bytes(), traits);
      need.room = options.room->goal.fraction * static_cast<double>(options.room->memory_bytes);
      needs.push_back(need);
    }
  }
  if (options.room) {
    engine.max_context = largest_context(needs, engine.max_context, options.room->goal);
  }
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    const MemoryPlan rest = workspace_plan(source, engine, weights.load_of(rank), traits);
    std::vector<MemoryPlan::Entry>& entries = run.ranks[static_cast<std::size_t>(rank)].entries;
    entries.insert(entries.end(), rest.entries.begin(), rest.entries.end());
  }
  run.max_context = engine.max_context;
  run.num_parameters = count_parameters(source.target.config);
  return run;
}

std::int64_t count_parameters(const ModelConfig& config) {
  std::int64_t sum = 0;
  for (const TensorSpec& spec : target_tensor_specs(config)) {
    sum += spec.tied ? 0 : spec.shape.num_elements();
  }
  return sum;
}

}  // namespace kdtree
