#include <numeric>

#include "core/check.h"
#include "weights/weight_store.h"

namespace kdtree {

namespace {

void check_rank(const LoadOptions& options) {
  check(options.world_size >= 1 && options.rank >= 0 && options.rank < options.world_size,
        "rank {} of {}", options.rank, options.world_size);
  const ParallelGrid& grid = options.grid;
  check(options.world_size % grid.moe_tp == 0 && options.world_size % grid.attention_dp == 0,
        "{} ranks in a grid of moe_tp {} and attention_dp {}", options.world_size, grid.moe_tp,
        grid.attention_dp);
}

// Packed columns are divided between groups; gate and up rows follow the same cuts.
std::int64_t mlp_unit(const std::optional<QuantizationConfig>& quantization,
                      const LoadOptions& options) {
  const bool packed =
      quantization && quantization->mlp_is_packed && options.weights != WeightsChoice::kOriginal;
  return packed ? quantization->group_size : 1;
}

// Slices of routed experts lie between groups, of those that are stored and those that loading
// makes.
std::int64_t expert_unit(const ModelConfig& config, const LoadOptions& options) {
  std::int64_t unit = 1;
  if (config.quantization && options.weights != WeightsChoice::kOriginal) {
    unit = config.quantization->group_size;
  }
  return options.weights == WeightsChoice::kInt4 ? std::lcm(unit, options.int4_group_size) : unit;
}

Range expert_slice(const ModelConfig& config, const LoadOptions& options) {
  const int slices = options.grid.moe_tp;
  const std::int64_t width = config.moe_intermediate_size;
  if (slices == 1) {
    return {0, width};
  }
  require_input(config.n_routed_experts > 0,
                "--moe-tp {}: the model has no routed experts, expected 1", slices);
  const std::int64_t unit = expert_unit(config, options);
  const std::int64_t units = (width + unit - 1) / unit;
  require_input(
      slices <= units,
      "--moe-tp {}: the model's moe_intermediate_size {} is {} group{} of {}, expected at "
      "most {}: every slice of an expert needs a group",
      slices, width, units, units == 1 ? "" : "s", unit, units);
  return partition(width, slices, options.grid.expert_slice(options.rank), unit);
}

// The ranks that share the heads.
void require_heads(const ModelConfig& config, const LoadOptions& options) {
  const int ranks = options.grid.attention_tp(options.world_size);
  require_input(ranks <= config.num_attention_heads,
                "{} ranks{}, {} attention heads: every rank needs a head of the target", ranks,
                options.grid.attention_dp > 1 ? " in an attention group" : "",
                config.num_attention_heads);
}

}  // namespace

TargetPartition target_partition(const ModelConfig& config, const LoadOptions& options) {
  check_rank(options);
  require_heads(config, options);
  const ParallelGrid& grid = options.grid;
  const std::int64_t unit = mlp_unit(config.quantization, options);
  const std::int64_t shared = config.n_shared_experts * config.moe_intermediate_size;
  // Of the ranks of an attention group.
  const auto attention_part = [&](std::int64_t total, std::int64_t whole_unit) {
    return partition(total, grid.attention_tp(options.world_size),
                     grid.attention_place(options.rank, options.world_size), whole_unit);
  };
  return {.heads = attention_part(config.num_attention_heads, 1),
          .intermediate = attention_part(config.intermediate_size, unit),
          .shared_intermediate =
              options.replicate_shared_experts
                  ? partition(shared, grid.moe_tp, grid.expert_slice(options.rank), unit)
                  : partition(shared, options.world_size, options.rank, unit),
          .expert_intermediate = expert_slice(config, options),
          .vocabulary = partition(config.vocab_size, options.world_size, options.rank)};
}

DrafterPartition drafter_partition(const DrafterConfig& config, const LoadOptions& options) {
  check_rank(options);
  const auto part = [&options](std::int64_t total, std::int64_t unit) {
    return partition(total, options.world_size, options.rank, unit);
  };
  DrafterPartition result{
      .heads = part(config.num_attention_heads, 1),
      .key_value_heads = {},
      .intermediate = part(config.intermediate_size, mlp_unit(config.quantization, options)),
      .context = part(config.hidden_size, 1)};
  if (result.heads.size() > 0) {
    const std::int64_t sharing = config.num_attention_heads / config.num_key_value_heads;
    result.key_value_heads = {result.heads.begin / sharing, (result.heads.end - 1) / sharing + 1};
  }
  return result;
}

}  // namespace kdtree
