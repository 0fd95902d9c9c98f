#include "core/check.h"
#include "weights/weight_store.h"

namespace kdtree {

namespace {

void check_rank(const LoadOptions& options) {
  check(options.world_size >= 1 && options.rank >= 0 && options.rank < options.world_size,
        "rank {} of {}", options.rank, options.world_size);
}

// Packed columns are divided between groups; gate and up rows follow the same cuts.
std::int64_t mlp_unit(const std::optional<QuantizationConfig>& quantization,
                      const LoadOptions& options) {
  const bool packed =
      quantization && quantization->mlp_is_packed && options.weights != WeightsChoice::kOriginal;
  return packed ? quantization->group_size : 1;
}

}  // namespace

TargetPartition target_partition(const ModelConfig& config, const LoadOptions& options) {
  check_rank(options);
  require_input(options.world_size <= config.num_attention_heads,
                "{} ranks, {} attention heads: every rank needs a head of the target",
                options.world_size, config.num_attention_heads);
  const std::int64_t unit = mlp_unit(config.quantization, options);
  const std::int64_t shared = config.n_shared_experts * config.moe_intermediate_size;
  const auto part = [&options](std::int64_t total, std::int64_t whole_unit) {
    return partition(total, options.world_size, options.rank, whole_unit);
  };
  return {.heads = part(config.num_attention_heads, 1),
          .intermediate = part(config.intermediate_size, unit),
          .shared_intermediate =
              options.replicate_shared_experts ? Range{0, shared} : part(shared, unit),
          .vocabulary = part(config.vocab_size, 1)};
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
