// Multi-head latent attention of one layer, in the absorbed form, for the heads of this rank.
#pragma once

#include <string>

#include "config/model_config.h"
#include "kernels/device_tensor.h"
#include "model/latent_kv_cache.h"
#include "model/model_context.h"
#include "weights/weight_store.h"

namespace kdtree {

// Scratch that all layers share.
struct AttentionWorkspace {
  AttentionWorkspace(Backend& backend, const ModelConfig& config, const MlaShape& shape,
                     std::int64_t max_rows);
  DeviceTensor q_latent;  // [rows, q_lora_rank]; unused without q_lora
  DeviceTensor q;         // [rows, heads * qk_head_dim]
  DeviceTensor query;     // [rows, heads * latent_dim]
  DeviceTensor kv;        // [rows, latent_dim]
  DeviceTensor o_latent;  // [rows, heads * kv_lora_rank]
  DeviceTensor o;         // [rows, heads * v_head_dim]

  static std::int64_t bytes(const ModelConfig& config, const MlaShape& shape, std::int64_t max_rows,
                            DType dtype);
};

class LatentAttention {
 public:
  // `rope_table` [positions, qk_rope_head_dim]; all arguments outlive the layer.
  LatentAttention(const ModelConfig& config, const WeightStore& weights, std::int64_t layer,
                  const MlaShape& shape, const ConstTensorView& rope_table);

  std::int64_t layer() const { return layer_; }

  // What forward works on. cache: the provisional rows of this layer are written. partial [rows,
  // hidden]: this rank's heads' share, to be summed over ranks.
  struct Rows {
    ConstTensorView x;  // [rows, hidden], normed
    const TreeBatch& batch;
    const LatentKvCache& cache;
    TensorView partial;
  };
  void forward(const ModelContext& context, const Rows& call, AttentionWorkspace& workspace) const;

 private:
  std::int64_t layer_;
  MlaShape shape_;
  float softmax_scale_;
  bool has_q_lora_;
  ConstTensorView rope_table_;
  WeightView q_a_proj_;
  ConstTensorView q_a_layernorm_;
  WeightView q_proj_;  // q_b_proj, or q_proj without q_lora
  WeightView kv_a_proj_;
  ConstTensorView kv_a_layernorm_;
  WeightView kv_b_proj_;
  WeightView o_proj_;
};

}  // namespace kdtree
