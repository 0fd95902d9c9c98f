#include "model/latent_attention.h"

#include <fmt/format.h>

#include "model/rope.h"

namespace kdtree {

AttentionWorkspace::AttentionWorkspace(Backend& backend, const ModelConfig& config,
                                       const MlaShape& shape, std::int64_t max_rows)
    : q_latent(backend, backend.activation_dtype(), Shape{max_rows, config.q_lora_rank}),
      q(backend, backend.activation_dtype(),
        Shape{max_rows, shape.num_heads * shape.qk_head_dim()}),
      query(backend, backend.activation_dtype(),
            Shape{max_rows, shape.num_heads * shape.latent_dim()}),
      kv(backend, backend.activation_dtype(), Shape{max_rows, shape.latent_dim()}),
      o_latent(backend, backend.activation_dtype(),
               Shape{max_rows, shape.num_heads * shape.kv_lora_rank}),
      o(backend, backend.activation_dtype(), Shape{max_rows, shape.num_heads * shape.v_head_dim}) {}

std::int64_t AttentionWorkspace::bytes(const ModelConfig& config, const MlaShape& shape,
                                       std::int64_t max_rows, DType dtype) {
  const std::int64_t width = config.q_lora_rank + shape.latent_dim() +
                             shape.num_heads * (shape.qk_head_dim() + shape.latent_dim() +
                                                shape.kv_lora_rank + shape.v_head_dim);
  return max_rows * width * dtype_bytes(dtype);
}

LatentAttention::LatentAttention(const ModelConfig& config, const WeightStore& weights,
                                 std::int64_t layer, const MlaShape& shape,
                                 const ConstTensorView& rope_table)
    : layer_(layer),
      shape_(shape),
      softmax_scale_(static_cast<float>(softmax_scale(config.rope, config.qk_head_dim()))),
      has_q_lora_(config.q_lora_rank > 0),
      rope_table_(rope_table) {
  const std::string prefix = fmt::format("model.layers.{}.self_attn.", layer);
  if (has_q_lora_) {
    q_a_proj_ = weights.matrix(prefix + "q_a_proj.weight");
    q_a_layernorm_ = weights.vector(prefix + "q_a_layernorm.weight");
    q_proj_ = weights.matrix(prefix + "q_b_proj.weight");
  } else {
    q_proj_ = weights.matrix(prefix + "q_proj.weight");
  }
  kv_a_proj_ = weights.matrix(prefix + "kv_a_proj_with_mqa.weight");
  kv_a_layernorm_ = weights.vector(prefix + "kv_a_layernorm.weight");
  kv_b_proj_ = weights.matrix(prefix + "kv_b_proj.weight");
  o_proj_ = weights.matrix(prefix + "o_proj.weight");
}

void LatentAttention::forward(const ModelContext& context, const Rows& call,
                              AttentionWorkspace& workspace) const {
  Backend& backend = context.backend;
  const TreeBatch& batch = call.batch;
  const TensorView& cache = call.cache.layer(layer_);
  const std::int64_t rows = batch.num_rows;
  constexpr auto kEps = static_cast<float>(kInnerNormEps);

  const TensorView q = workspace.q.rows(rows);
  if (has_q_lora_) {
    const TensorView q_latent = workspace.q_latent.rows(rows);
    backend.linear(q_a_proj_, call.x, q_latent);
    backend.rms_norm(q_latent, q_a_layernorm_, kEps, q_latent);
    backend.linear(q_proj_, q_latent, q);
  } else {
    backend.linear(q_proj_, call.x, q);
  }

  const TensorView kv = workspace.kv.rows(rows);
  backend.linear(kv_a_proj_, call.x, kv);
  const TensorView compressed = kv.columns(0, shape_.kv_lora_rank);
  backend.rms_norm(compressed, kv_a_layernorm_, kEps, compressed);

  RopeParams rope{.x = q,
                  .num_heads = shape_.num_heads,
                  .head_stride = shape_.qk_head_dim(),
                  .offset = shape_.qk_nope_head_dim,
                  .positions = batch.positions,
                  .cos_sin = rope_table_,
                  .layout = RopeLayout::kInterleaved};
  backend.rope(rope);
  rope.x = kv;
  rope.num_heads = 1;
  rope.head_stride = shape_.latent_dim();
  rope.offset = shape_.kv_lora_rank;
  backend.rope(rope);
  backend.cache_write({.values = kv, .cache = cache, .batch = batch});

  const TensorView query = workspace.query.rows(rows);
  const TensorView o_latent = workspace.o_latent.rows(rows);
  const TensorView o = workspace.o.rows(rows);
  backend.absorb_query(kv_b_proj_, shape_, q, query);
  backend.tree_attention({.shape = shape_,
                          .softmax_scale = softmax_scale_,
                          .query = query,
                          .cache = cache,
                          .batch = batch,
                          .output = o_latent});
  backend.expand_value(kv_b_proj_, shape_, o_latent, o);
  backend.linear(o_proj_, o, call.partial);
}

}  // namespace kdtree
