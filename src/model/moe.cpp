#include "model/moe.h"

#include <fmt/format.h>

#include <vector>

namespace kdtree {

namespace {

// Parsing admits only these names.
RouterMethod router_method(const std::string& topk_method) {
  if (topk_method == "noaux_tc") {
    return RouterMethod::kNoAuxTc;
  }
  return topk_method == "greedy" ? RouterMethod::kGreedy : RouterMethod::kGroupLimitedGreedy;
}

}  // namespace

RouterWorkspace::RouterWorkspace(Backend& backend, const ModelConfig& config,
                                 const RouterSizes& sizes)
    : sizes_(sizes),
      num_experts_per_tok_(config.num_experts_per_tok),
      logits_(backend, DType::kFloat32, Shape{sizes.max_rows, config.n_routed_experts}),
      expert_ids_(backend, DType::kInt32,
                  Shape{sizes.kept_layers * sizes.max_rows, num_experts_per_tok_}),
      expert_weights_(backend, DType::kFloat32, Shape{sizes.max_rows, num_experts_per_tok_}),
      targets_(backend, DType::kInt32,
               Shape{sizes.replicas ? sizes.max_rows : 0, num_experts_per_tok_}) {}

RouterRows RouterWorkspace::of_layer(std::int64_t index, std::int64_t rows) const {
  check(index < sizes_.kept_layers && rows <= sizes_.max_rows,
        "layer {} of a router call of {} rows, room for {} of {}", index, rows, sizes_.kept_layers,
        sizes_.max_rows);
  return {.logits = logits_.rows(rows),
          .expert_ids = expert_ids_.view().rows(index * rows, rows),
          .expert_weights = expert_weights_.rows(rows),
          .targets = targets_.rows(sizes_.replicas ? rows : 0)};
}

ConstTensorView RouterWorkspace::kept_ids(std::int64_t rows) const {
  return expert_ids_.rows(sizes_.kept_layers * rows)
      .reshape(Shape{sizes_.kept_layers, rows, num_experts_per_tok_});
}

std::int64_t RouterWorkspace::bytes(const ModelConfig& config, const RouterSizes& sizes) {
  const std::int64_t choices = sizes.kept_layers + (sizes.replicas ? 2 : 1);
  return sizes.max_rows * 4 * (config.n_routed_experts + choices * config.num_experts_per_tok);
}

Moe::Moe(const ModelContext& context, const ModelConfig& config, const WeightStore& weights,
         std::int64_t layer, const LayerPlacement& placement)
    : layer_(layer), placement_(context.backend, placement, context.groups.expert_group()) {
  const std::string prefix = fmt::format("model.layers.{}.mlp.", layer);
  gate_ = weights.matrix(prefix + "gate.weight");
  router_.scoring =
      config.scoring_func == "softmax" ? RouterScoring::kSoftmax : RouterScoring::kSigmoid;
  router_.method = router_method(config.topk_method);
  router_.n_group = config.n_group;
  router_.topk_group = config.topk_group;
  router_.norm_topk_prob = config.norm_topk_prob;
  router_.scale_always = config.routed_scaling_always;
  router_.routed_scaling_factor = static_cast<float>(config.routed_scaling_factor);
  const std::string bias = prefix + "gate.e_score_correction_bias";
  if (weights.contains(bias)) {
    router_.correction_bias = weights.vector(bias);
  }
  std::vector<WeightView> gate;
  std::vector<WeightView> up;
  std::vector<WeightView> down;
  for (const std::int64_t expert : placement.experts_of(context.groups.expert_group())) {
    const std::string expert_prefix = fmt::format("{}experts.{}.", prefix, expert);
    gate.push_back(weights.matrix(expert_prefix + "gate_proj.weight"));
    up.push_back(weights.matrix(expert_prefix + "up_proj.weight"));
    down.push_back(weights.matrix(expert_prefix + "down_proj.weight"));
  }
  experts_ = context.backend.make_expert_set({.gate = gate, .up = up, .down = down});
  if (config.n_shared_experts > 0) {
    shared_ = std::make_unique<Mlp>(weights, prefix + "shared_experts.");
  }
}

void Moe::forward(const ModelContext& context, const Rows& rows, const RouterRows& routed,
                  ExpertExchange& exchange) const {
  context.backend.linear(gate_, rows.x, routed.logits);
  RouterParams router = router_;
  router.logits = routed.logits;
  router.expert_ids = routed.expert_ids;
  router.expert_weights = routed.expert_weights;
  context.backend.router(router);
  TensorView targets = router.expert_ids;
  if (placement_.has_replicas()) {
    targets = routed.targets;
    context.backend.choose_replicas({.expert_ids = router.expert_ids,
                                     .replica_offsets = placement_.replica_offsets(),
                                     .physical_slots = placement_.physical_slots(),
                                     .targets = targets});
  }
  exchange.forward(context,
                   {.x = rows.x,
                    .targets = targets,
                    .expert_weights = router.expert_weights,
                    .rows_of_groups = rows.rows_of_groups},
                   {.layer = layer_,
                    .experts = experts_.get(),
                    .shared = shared_.get(),
                    .placement = &placement_},
                   rows.y);
}

void Moe::set_placement(const ModelContext& context, const LayerPlacement& placement) {
  placement_.update(context.backend, placement, context.groups.expert_group());
}

}  // namespace kdtree
