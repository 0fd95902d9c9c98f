// The mixture-of-experts feed-forward of one layer: router, routed experts, shared experts.
#pragma once

#include <memory>
#include <span>

#include "config/model_config.h"
#include "model/expert_exchange.h"
#include "weights/weight_store.h"

namespace kdtree {

// What the router of a layer writes in one call.
struct RouterRows {
  TensorView logits;          // [rows, n_routed_experts] float32
  TensorView expert_ids;      // [rows, num_experts_per_tok]
  TensorView expert_weights;  // [rows, num_experts_per_tok] float32
  // [rows, num_experts_per_tok] physical slots; empty unless a layer has replicas
  TensorView targets;

  // `count` of the rows, from `first` on.
  RouterRows part(std::int64_t first, std::int64_t count) const {
    const bool replicas = targets.size(0) > 0;
    return {.logits = logits.rows(first, count),
            .expert_ids = expert_ids.rows(first, count),
            .expert_weights = expert_weights.rows(first, count),
            .targets = replicas ? targets.rows(first, count) : targets};
  }
};

struct RouterSizes {
  std::int64_t max_rows = 0;
  // Layers whose choices stand side by side until the next call; 1: each overwrites the last.
  std::int64_t kept_layers = 1;
  bool replicas = false;  // of experts, in any layer
};

class RouterWorkspace {
 public:
  RouterWorkspace(Backend& backend, const ModelConfig& config, const RouterSizes& sizes);

  // Where the `index`-th of the layers writes a call of `rows` rows. index < kept_layers.
  RouterRows of_layer(std::int64_t index, std::int64_t rows) const;
  // [kept_layers, rows, num_experts_per_tok] what they wrote.
  ConstTensorView kept_ids(std::int64_t rows) const;

  static std::int64_t bytes(const ModelConfig& config, const RouterSizes& sizes);

 private:
  RouterSizes sizes_;
  std::int64_t num_experts_per_tok_;
  DeviceTensor logits_;
  DeviceTensor expert_ids_;  // [kept_layers * max_rows, num_experts_per_tok]
  DeviceTensor expert_weights_;
  DeviceTensor targets_;
};

class Moe {
 public:
  // Takes the experts that `placement`, of this layer, gives to this rank's expert group. `weights`
  // outlives the layer.
  Moe(const ModelContext& context, const ModelConfig& config, const WeightStore& weights,
      std::int64_t layer, const LayerPlacement& placement);

  // What forward works on: the rows that the exchange takes.
  struct Rows {
    ConstTensorView x;  // [rows, hidden], normed
    TensorView y;       // [rows, hidden], complete on every rank that has the rows
    std::span<const std::int64_t> rows_of_groups = {};  // as RoutedRows has it
  };
  // `routed` receives the router's decision, the same on every rank that has the rows: logical
  // experts, whatever the placement.
  void forward(const ModelContext& context, const Rows& rows, const RouterRows& routed,
               ExpertExchange& exchange) const;
  // Its experts have been moved (weights/weight_store.h): they are dispatched by `placement` from
  // now on. Not while a step is in flight.
  void set_placement(const ModelContext& context, const LayerPlacement& placement);

 private:
  std::int64_t layer_;
  RouterParams router_;  // the settings; tensors are filled in per call
  WeightView gate_;
  PlacementTables placement_;
  std::unique_ptr<ExpertSet> experts_;
  std::unique_ptr<Mlp> shared_;
};

}  // namespace kdtree
