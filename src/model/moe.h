// The mixture-of-experts feed-forward of one layer: router, routed experts, shared experts.
#pragma once

#include <memory>

#include "config/model_config.h"
#include "model/expert_exchange.h"
#include "weights/weight_store.h"

namespace kdtree {

struct RouterWorkspace {
  RouterWorkspace(Backend& backend, const ModelConfig& config, std::int64_t max_rows);
  DeviceTensor logits;          // [rows, n_routed_experts] float32
  DeviceTensor expert_ids;      // [rows, num_experts_per_tok]
  DeviceTensor expert_weights;  // [rows, num_experts_per_tok] float32

  static std::int64_t bytes(const ModelConfig& config, std::int64_t max_rows);
};

class Moe {
 public:
  // Takes the experts that `placement` gives to this rank. `weights` outlives the layer.
  Moe(const ModelContext& context, const ModelConfig& config, const WeightStore& weights,
      std::int64_t layer, const ExpertPlacement& placement);

  // x [rows, hidden], normed -> y [rows, hidden], complete on every rank.
  void forward(const ModelContext& context, const ConstTensorView& x, RouterWorkspace& workspace,
               ExpertExchange& exchange, const TensorView& y) const;

 private:
  std::int64_t layer_;
  RouterParams router_;  // the settings; tensors are filled in per call
  WeightView gate_;
  std::unique_ptr<ExpertSet> experts_;
  std::unique_ptr<Mlp> shared_;
};

}  // namespace kdtree
