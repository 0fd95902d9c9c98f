#include "speculative/drafter.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "model/rope.h"

namespace kdtree {

struct Drafter::Layer {
  ConstTensorView input_layernorm;
  WeightView q_proj;
  WeightView k_proj;
  WeightView v_proj;
  WeightView o_proj;
  ConstTensorView q_norm;
  ConstTensorView k_norm;
  ConstTensorView post_attention_layernorm;
  Mlp mlp;
};

namespace {

DeviceTensor upload_rope_table(Backend& backend, const DrafterConfig& config,
                               std::int64_t num_positions) {
  const std::vector<float> table = rope_table(config.rope, config.head_dim, num_positions);
  DeviceTensor tensor(backend, DType::kFloat32, Shape{num_positions, config.head_dim});
  tensor.upload(backend, std::span<const float>(table));
  backend.synchronize();
  return tensor;
}

// Local key/value head that each local query head reads.
std::vector<std::int32_t> local_kv_heads(const DrafterConfig& config,
                                         const DrafterPartition& partition) {
  const std::int64_t group = config.num_attention_heads / config.num_key_value_heads;
  std::vector<std::int32_t> heads;
  for (std::int64_t head = partition.heads.begin; head < partition.heads.end; ++head) {
    heads.push_back(static_cast<std::int32_t>(head / group - partition.key_value_heads.begin));
  }
  return heads;
}

// Rows of the blocks whose slots predict, from slot 1 of each on.
std::vector<std::int32_t> prediction_rows(const DrafterOptions& options) {
  std::vector<std::int32_t> rows;
  for (std::int64_t sequence = 0; sequence < options.num_slots; ++sequence) {
    for (std::int64_t slot = 1; slot <= options.num_predicted; ++slot) {
      rows.push_back(static_cast<std::int32_t>(sequence * options.block_size + slot));
    }
  }
  return rows;
}

// Per-head norm over head_dim: heads become rows.
void norm_heads(Backend& backend, const TensorView& x, const ConstTensorView& weight, float eps,
                std::int64_t head_dim) {
  const TensorView heads = x.reshape(Shape{x.num_elements() / head_dim, head_dim});
  backend.rms_norm(heads, weight, eps, heads);
}

}  // namespace

CacheSizes Drafter::cache_sizes(const DrafterConfig& config, const DrafterPartition& partition,
                                const DrafterOptions& options) {
  return {.num_layers = config.num_hidden_layers,
          .num_slots = options.num_slots,
          .capacity = options.capacity,
          .width = partition.key_value_heads.size() * config.head_dim};
}

std::int64_t Drafter::max_rows() const {
  return std::max(options_.max_context_rows, options_.num_slots * options_.block_size);
}

Drafter::Drafter(const ModelContext& context, const DrafterModel& model, Vocabulary& vocabulary,
                 const DrafterOptions& options)
    : context_(context),
      config_(model.config),
      vocabulary_(vocabulary),
      options_(options),
      num_heads_(model.partition.heads.size()),
      num_key_value_heads_(model.partition.key_value_heads.size()),
      fc_rows_(model.partition.context),
      fc_(model.weights.matrix("fc.weight")),
      hidden_norm_(model.weights.vector("hidden_norm.weight")),
      norm_(model.weights.vector("norm.weight")),
      rope_table_(upload_rope_table(context.backend, config_, options.capacity)),
      kv_head_of_(context.backend,
                  std::span<const std::int32_t>(local_kv_heads(config_, model.partition))) {
  const DrafterConfig& config = model.config;
  const WeightStore& weights = model.weights;
  const DrafterPartition& partition = model.partition;
  Backend& backend = context.backend;
  const DType dtype = backend.activation_dtype();
  const CacheSizes cache = cache_sizes(config, partition, options);
  const Shape cache_shape{cache.num_slots, cache.capacity, cache.width};
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    keys_.emplace_back(backend, dtype, cache_shape);
    values_.emplace_back(backend, dtype, cache_shape);
    const std::string prefix = fmt::format("layers.{}.", layer);
    const std::string attention = prefix + "self_attn.";
    layers_.push_back(
        {.input_layernorm = weights.vector(prefix + "input_layernorm.weight"),
         .q_proj = weights.matrix(attention + "q_proj.weight"),
         .k_proj = weights.matrix(attention + "k_proj.weight"),
         .v_proj = weights.matrix(attention + "v_proj.weight"),
         .o_proj = weights.matrix(attention + "o_proj.weight"),
         .q_norm = weights.vector(attention + "q_norm.weight"),
         .k_norm = weights.vector(attention + "k_norm.weight"),
         .post_attention_layernorm = weights.vector(prefix + "post_attention_layernorm.weight"),
         .mlp = Mlp(weights, prefix + "mlp.")});
  }
  check(options.num_predicted >= 1 && options.num_predicted < options.block_size &&
            options.block_size <= config.block_size,
        "{} of {} slots predict, of a drafter with blocks of {}", options.num_predicted,
        options.block_size, config.block_size);
  const std::int64_t block_rows = options.num_slots * options.block_size;
  const std::int64_t predictions = options.num_slots * options.num_predicted;
  const std::int64_t query_width = num_heads_ * config.head_dim;
  const std::int64_t kv_width = num_key_value_heads_ * config.head_dim;
  mlp_workspace_ = MlpWorkspace(backend, partition.intermediate.size(), block_rows);
  context_hidden_ =
      DeviceTensor(backend, dtype, Shape{options.max_context_rows, config.hidden_size});
  hidden_ = DeviceTensor(backend, dtype, Shape{block_rows, config.hidden_size});
  normed_ = DeviceTensor(backend, dtype, Shape{block_rows, config.hidden_size});
  delta_ = DeviceTensor(backend, dtype, Shape{block_rows, config.hidden_size});
  predicted_ = DeviceTensor(backend, dtype, Shape{predictions, config.hidden_size});
  predicted_rows_ = DeviceTensor(backend, std::span<const std::int32_t>(prediction_rows(options)));
  predicted_o_ = DeviceTensor(backend, dtype, Shape{predictions, query_width});
  q_ = DeviceTensor(backend, dtype, Shape{block_rows, query_width});
  o_ = DeviceTensor(backend, dtype, Shape{block_rows, query_width});
  k_ = DeviceTensor(backend, dtype, Shape{max_rows(), kv_width});
  v_ = DeviceTensor(backend, dtype, Shape{max_rows(), kv_width});
}

Drafter::~Drafter() = default;

std::int64_t Drafter::workspace_bytes(const MemoryTraits& traits, const DrafterConfig& config,
                                      const DrafterPartition& partition,
                                      const DrafterOptions& options) {
  const std::int64_t block_rows = options.num_slots * options.block_size;
  const std::int64_t rows = std::max(options.max_context_rows, block_rows);
  const std::int64_t predictions = options.num_slots * options.num_predicted;
  const std::int64_t query_heads = partition.heads.size();
  const std::int64_t values =
      (options.max_context_rows + 3 * block_rows + predictions) * config.hidden_size +
      (block_rows * 2 + predictions) * query_heads * config.head_dim +
      rows * 2 * partition.key_value_heads.size() * config.head_dim;
  const DType dtype = traits.activation_dtype();
  return values * dtype_bytes(dtype) + (query_heads + predictions) * dtype_bytes(DType::kInt32) +
         options.capacity * config.head_dim * dtype_bytes(DType::kFloat32) +
         MlpWorkspace::bytes(partition.intermediate.size(), block_rows, dtype);
}

void Drafter::write_keys_values(std::size_t layer, const ConstTensorView& x,
                                const TreeBatch& batch) {
  Backend& backend = context_.backend;
  const Layer& weights = layers_[layer];
  const TensorView k = k_.rows(batch.num_rows);
  const TensorView v = v_.rows(batch.num_rows);
  backend.linear(weights.k_proj, x, k);
  backend.linear(weights.v_proj, x, v);
  norm_heads(backend, k, weights.k_norm, static_cast<float>(config_.rms_norm_eps),
             config_.head_dim);
  backend.rope({.x = k,
                .num_heads = num_key_value_heads_,
                .head_stride = config_.head_dim,
                .offset = 0,
                .positions = batch.positions,
                .cos_sin = rope_table_.view(),
                .layout = RopeLayout::kHalfSplit});
  backend.cache_write({.values = k, .cache = keys_[layer].view(), .batch = batch});
  backend.cache_write({.values = v, .cache = values_[layer].view(), .batch = batch});
}

void Drafter::append_context(const ConstTensorView& taps, const TreeBatch& batch) {
  Backend& backend = context_.backend;
  check(batch.num_rows == taps.size(0), "{} tapped rows for {} context rows", taps.size(0),
        batch.num_rows);
  // fc is split by output rows: each rank fills its columns of a zeroed tensor, and the sum (of one
  // value and zeros) is exact.
  const TensorView context_hidden = context_hidden_.rows(batch.num_rows);
  backend.fill_zero(context_hidden);
  backend.linear(fc_, taps, context_hidden.columns(fc_rows_.begin, fc_rows_.size()));
  context_.all_reduce_sum(context_hidden, {.what = "drafter context"});
  backend.rms_norm(context_hidden, hidden_norm_, static_cast<float>(config_.rms_norm_eps),
                   context_hidden);
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    write_keys_values(layer, context_hidden, batch);
  }
}

void Drafter::attend(std::size_t layer, const TensorView& hidden, const TreeBatch& batch) {
  Backend& backend = context_.backend;
  const Layer& weights = layers_[layer];
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  const TensorView normed = normed_.rows(batch.num_rows);
  const TensorView q = q_.rows(batch.num_rows);
  const TensorView o = o_.rows(batch.num_rows);

  backend.rms_norm(hidden, weights.input_layernorm, eps, normed);
  backend.linear(weights.q_proj, normed, q);
  norm_heads(backend, q, weights.q_norm, eps, config_.head_dim);
  backend.rope({.x = q,
                .num_heads = num_heads_,
                .head_stride = config_.head_dim,
                .offset = 0,
                .positions = batch.positions,
                .cos_sin = rope_table_.view(),
                .layout = RopeLayout::kHalfSplit});
  write_keys_values(layer, normed, batch);
  backend.block_attention(
      {.num_heads = num_heads_,
       .num_key_value_heads = num_key_value_heads_,
       .head_dim = config_.head_dim,
       .kv_head_of = kv_head_of_.view(),
       .softmax_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(config_.head_dim))),
       .query = q,
       .key_cache = keys_[layer].view(),
       .value_cache = values_[layer].view(),
       .batch = batch,
       .output = o});
}

void Drafter::finish_layer(std::size_t layer, const ConstTensorView& o, const TensorView& hidden) {
  Backend& backend = context_.backend;
  const Layer& weights = layers_[layer];
  const auto index = static_cast<std::int64_t>(layer);
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  const TensorView normed = normed_.rows(hidden.size(0));
  const TensorView delta = delta_.rows(hidden.size(0));
  backend.linear(weights.o_proj, o, delta);
  context_.all_reduce_sum(delta, {.what = "drafter attention", .layer = index});
  backend.add(hidden, delta);
  backend.rms_norm(hidden, weights.post_attention_layernorm, eps, normed);
  weights.mlp.forward(backend, normed, mlp_workspace_, delta);
  context_.all_reduce_sum(delta, {.what = "drafter feed-forward", .layer = index});
  backend.add(hidden, delta);
}

Vocabulary::TopK Drafter::draft(const TreeBatch& batch, std::int64_t num_candidates) {
  Backend& backend = context_.backend;
  check(batch.num_rows == batch.num_sequences * options_.block_size, "{} rows for {} blocks of {}",
        batch.num_rows, batch.num_sequences, options_.block_size);
  const TensorView hidden = hidden_.rows(batch.num_rows);
  vocabulary_.embed(batch.token_ids, hidden);
  const std::size_t last = layers_.size() - 1;
  const TensorView o = o_.rows(batch.num_rows);
  for (std::size_t layer = 0; layer < last; ++layer) {
    attend(layer, hidden, batch);
    finish_layer(layer, o, hidden);
  }
  attend(last, hidden, batch);
  // Nothing attends to the last layer's outputs: rows that predict nothing end here.
  const std::int64_t num_predictions = batch.num_sequences * options_.num_predicted;
  const TensorView predicted = predicted_.rows(num_predictions);
  const TensorView predicted_o = predicted_o_.rows(num_predictions);
  backend.gather_rows(hidden, predicted_rows_.rows(num_predictions), predicted);
  backend.gather_rows(o, predicted_rows_.rows(num_predictions), predicted_o);
  finish_layer(last, predicted_o, predicted);
  backend.rms_norm(predicted, norm_, static_cast<float>(config_.rms_norm_eps), predicted);
  return vocabulary_.top_log_probs(predicted, num_candidates);
}

}  // namespace kdtree
