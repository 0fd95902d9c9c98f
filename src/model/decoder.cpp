#include "model/decoder.h"

#include <fmt/format.h>

#include <algorithm>

#include "model/rope.h"

namespace kdtree {

struct Decoder::Layer {
  ConstTensorView input_layernorm;
  LatentAttention attention;
  ConstTensorView post_attention_layernorm;
  std::unique_ptr<Mlp> dense;  // one of the two
  std::unique_ptr<Moe> moe;
  std::int64_t moe_index = 0;  // among the layers with experts
};

namespace {

MlaShape local_shape(const ModelConfig& config, const TargetPartition& partition) {
  return {.num_heads = partition.heads.size(),
          .qk_nope_head_dim = config.qk_nope_head_dim,
          .qk_rope_head_dim = config.qk_rope_head_dim,
          .v_head_dim = config.v_head_dim,
          .kv_lora_rank = config.kv_lora_rank};
}

std::int64_t group_rows(const DecoderOptions& options) {
  return options.max_group_rows > 0 ? options.max_group_rows : options.max_rows;
}

ExchangeSizes exchange_sizes(const ModelConfig& config, const TargetPartition& partition,
                             const DecoderOptions& options) {
  return {.max_rows = options.max_rows,
          .max_group_rows = group_rows(options),
          .hidden_size = config.hidden_size,
          .num_experts_per_tok = config.num_experts_per_tok,
          .moe_intermediate_size = partition.expert_intermediate.size(),
          .shared_width = partition.shared_intermediate.size(),
          .fixed_counts = options.fixed_counts,
          .grid = options.grid};
}

// Rows of Decoder::expert_counts().
std::int64_t num_counted_layers(const ModelConfig& config, const DecoderOptions& options) {
  return options.count_experts ? config.num_moe_layers() : 0;
}

bool has_replicas(const ModelConfig& config, const ExpertPlacement& placement) {
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    if (config.is_moe_layer(layer) && placement.layer(layer).has_replicas()) {
      return true;
    }
  }
  return false;
}

RouterSizes router_sizes(const ModelConfig& config, const ExpertPlacement& placement,
                         const DecoderOptions& options) {
  return {.max_rows = options.max_rows,
          .kept_layers = options.keep_expert_ids ? config.num_moe_layers() : 1,
          .replicas = has_replicas(config, placement)};
}

DeviceTensor upload_rope_table(Backend& backend, const ModelConfig& config,
                               std::int64_t max_positions) {
  const std::vector<float> table = rope_table(config.rope, config.qk_rope_head_dim, max_positions);
  DeviceTensor tensor(backend, DType::kFloat32, Shape{max_positions, config.qk_rope_head_dim});
  tensor.upload(backend, std::span<const float>(table));
  backend.synchronize();
  return tensor;
}

}  // namespace

Decoder::Decoder(const ModelContext& context, const TargetModel& target,
                 const DecoderOptions& options)
    : context_(context),
      config_(target.config),
      options_(options),
      shape_(local_shape(config_, target.partition)),
      rope_table_(upload_rope_table(context.backend, config_, options.max_positions)),
      norm_(target.weights.vector("model.norm.weight")),
      attention_workspace_(context.backend, config_, shape_, group_rows(options)),
      router_workspace_(context.backend, config_, router_sizes(config_, target.placement, options)),
      mlp_workspace_(context.backend, target.partition.intermediate.size(), group_rows(options)) {
  check(options.grid == context.groups.grid(), "a decoder and its context with different grids");
  const ModelConfig& config = target.config;
  const WeightStore& weights = target.weights;
  Backend& backend = context.backend;
  const DType dtype = backend.activation_dtype();
  std::int64_t num_moe = 0;
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    Layer built{
        .input_layernorm = weights.vector(prefix + "input_layernorm.weight"),
        .attention = LatentAttention(config, weights, layer, shape_, rope_table_.view()),
        .post_attention_layernorm = weights.vector(prefix + "post_attention_layernorm.weight"),
        .dense = nullptr,
        .moe = nullptr,
        .moe_index = num_moe};
    if (config.is_moe_layer(layer)) {
      built.moe =
          std::make_unique<Moe>(context, config, weights, layer, target.placement.layer(layer));
      ++num_moe;
    } else {
      built.dense = std::make_unique<Mlp>(weights, prefix + "mlp.");
    }
    layers_.push_back(std::move(built));
  }
  if (num_moe > 0) {
    ExchangeSizes sizes = exchange_sizes(config, target.partition, options);
    sizes.fixed_counts = options.fixed_counts || context.communicator.capturable();
    exchange_ = make_expert_exchange(options.exchange, backend, sizes, context.groups);
  }
  hidden_ = DeviceTensor(backend, dtype, Shape{options.max_rows, config.hidden_size});
  normed_ = DeviceTensor(backend, dtype, Shape{options.max_rows, config.hidden_size});
  delta_ = DeviceTensor(backend, dtype, Shape{options.max_rows, config.hidden_size});
  const auto num_taps = static_cast<std::int64_t>(options.target_layer_ids.size());
  taps_ = DeviceTensor(backend, dtype, Shape{options.max_rows, num_taps * config.hidden_size});
  expert_counts_ = DeviceTensor(
      backend, DType::kInt64, Shape{num_counted_layers(config, options), config.n_routed_experts});
}

Decoder::~Decoder() = default;

std::int64_t Decoder::workspace_bytes(const MemoryTraits& traits, const ModelConfig& config,
                                      const TargetPartition& partition,
                                      const DecoderOptions& options, int world_size) {
  const DType dtype = traits.activation_dtype();
  const auto num_taps = static_cast<std::int64_t>(options.target_layer_ids.size());
  const ExpertPlacement placement =
      options.placement
          ? *options.placement
          : ExpertPlacement::linear(config.n_routed_experts, options.grid.moe_ep(world_size));
  std::int64_t sum =
      AttentionWorkspace::bytes(config, local_shape(config, partition), group_rows(options),
                                dtype) +
      RouterWorkspace::bytes(config, router_sizes(config, placement, options)) +
      MlpWorkspace::bytes(partition.intermediate.size(), group_rows(options), dtype) +
      options.max_rows * (3 + num_taps) * config.hidden_size * dtype_bytes(dtype) +
      options.max_positions * config.qk_rope_head_dim * dtype_bytes(DType::kFloat32) +
      num_counted_layers(config, options) * config.n_routed_experts * dtype_bytes(DType::kInt64);
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    if (config.is_moe_layer(layer)) {
      sum += PlacementTables::bytes(placement.layer(layer));
    }
  }
  if (config.num_moe_layers() > 0) {
    sum += exchange_bytes(options.exchange, traits, exchange_sizes(config, partition, options),
                          world_size);
  }
  return sum;
}

ConstTensorView Decoder::forward(const GroupedBatch& batch, const LatentKvCache& cache,
                                 const Vocabulary& vocabulary) {
  Backend& backend = context_.backend;
  const std::int64_t rows = batch.all.num_rows;
  const std::int64_t own_rows = batch.own.num_rows;
  check(rows <= options_.max_rows && own_rows <= group_rows(options_),
        "a forward call of {} rows, {} of this rank's group, room for {} and {}", rows, own_rows,
        options_.max_rows, group_rows(options_));
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  const TensorView hidden = hidden_.view().rows(batch.first_row, own_rows);
  const TensorView normed = normed_.view().rows(batch.first_row, own_rows);
  const TensorView delta = delta_.view().rows(batch.first_row, own_rows);
  last_rows_ = rows;
  vocabulary.embed(batch.all.token_ids, hidden_.rows(rows));
  backend.rms_norm(hidden, layers_.front().input_layernorm, eps, normed);
  for (std::size_t index = 0; index < layers_.size(); ++index) {
    const Layer& layer = layers_[index];
    const auto layer_index = static_cast<std::int64_t>(index);
    if (own_rows > 0) {
      layer.attention.forward(context_,
                              {.x = normed, .batch = batch.own, .cache = cache, .partial = delta},
                              attention_workspace_);
    }
    context_.groups.attention().all_reduce_sum(delta, backend.stream(),
                                               {.what = "attention", .layer = layer_index});
    backend.add_rms_norm(hidden, delta, layer.post_attention_layernorm, eps, normed);
    if (layer.moe) {
      run_experts(layer, batch);
    } else {
      layer.dense->forward(backend, normed, mlp_workspace_, delta);
      context_.groups.attention().all_reduce_sum(
          delta, backend.stream(), {.what = "dense feed-forward", .layer = layer_index});
    }
    if (index + 1 < layers_.size()) {
      backend.add_rms_norm(hidden, delta, layers_[index + 1].input_layernorm, eps, normed);
    } else {
      backend.add(hidden, delta);
    }
    copy_taps(layer_index, hidden, batch.first_row);
  }
  gather_groups(hidden_.rows(rows), batch, {.what = "rows of all groups"});
  gather_groups(taps_.rows(rows), batch, {.what = "taps of all groups"});
  return hidden_.rows(rows);
}

void Decoder::run_experts(const Layer& layer, const GroupedBatch& batch) {
  const std::int64_t rows = batch.all.num_rows;
  const CollectiveLabel label{.what = "rows of all groups", .layer = layer.attention.layer()};
  const RouterRows routed =
      router_workspace_.of_layer(options_.keep_expert_ids ? layer.moe_index : 0, rows);
  exchange_->set_marks(marks_of(layer.moe_index));
  if (exchange_->by_group()) {
    const std::int64_t own_rows = batch.own.num_rows;
    layer.moe->forward(context_,
                       {.x = normed_.view().rows(batch.first_row, own_rows),
                        .y = delta_.view().rows(batch.first_row, own_rows),
                        .rows_of_groups = batch.rows_of_groups},
                       routed.part(batch.first_row, own_rows), *exchange_);
    if (options_.keep_expert_ids || options_.count_experts) {
      gather_groups(routed.expert_ids, batch, label);
    }
  } else {
    gather_groups(normed_.rows(rows), batch, label);
    layer.moe->forward(context_, {.x = normed_.rows(rows), .y = delta_.rows(rows)}, routed,
                       *exchange_);
  }
  count_experts(layer.moe_index, routed.expert_ids, batch.all);
}

void Decoder::gather_groups(const TensorView& rows, const GroupedBatch& batch,
                            CollectiveLabel label) const {
  if (!batch.rows_of_groups.empty() && rows.num_elements() > 0) {
    context_.groups.across().all_gather_rows(rows.rows(batch.first_row, batch.own.num_rows), rows,
                                             batch.rows_of_groups, context_.backend.stream(),
                                             label);
  }
}

std::optional<std::size_t> Decoder::marks_of(std::int64_t moe_index) const {
  if (!first_mark_) {
    return std::nullopt;
  }
  return *first_mark_ + static_cast<std::size_t>(moe_index) * kMarksAnExchange;
}

void Decoder::count_experts(std::int64_t moe_index, const ConstTensorView& expert_ids,
                            const TreeBatch& batch) const {
  if (options_.count_experts) {
    const std::int64_t experts = config_.n_routed_experts;
    context_.backend.count_experts(
        {.expert_ids = expert_ids,
         .batch = batch,
         .counts = expert_counts_.view().rows(moe_index, 1).reshape(Shape{experts})});
  }
}

void Decoder::copy_taps(std::int64_t layer, const TensorView& hidden,
                        std::int64_t first_row) const {
  for (std::size_t tap = 0; tap < options_.target_layer_ids.size(); ++tap) {
    if (options_.target_layer_ids[tap] == layer) {
      const auto first = static_cast<std::int64_t>(tap) * config_.hidden_size;
      context_.backend.copy(
          hidden, taps_.view().rows(first_row, hidden.size(0)).columns(first, config_.hidden_size));
    }
  }
}

void Decoder::set_placement(const ExpertPlacement& placement) {
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (layers_[layer].moe) {
      layers_[layer].moe->set_placement(context_,
                                        placement.layer(static_cast<std::int64_t>(layer)));
    }
  }
}

bool Decoder::replayable() const {
  return exchange_ == nullptr || exchange_->replayable();
}

ConstTensorView Decoder::taps() const {
  return taps_.rows(last_rows_);
}

ConstTensorView Decoder::expert_ids() const {
  check(options_.keep_expert_ids, "expert ids of a decoder that does not keep them");
  return router_workspace_.kept_ids(last_rows_);
}

void Decoder::final_norm(const ConstTensorView& hidden, const TensorView& out) const {
  context_.backend.rms_norm(hidden, norm_, static_cast<float>(config_.rms_norm_eps), out);
}

}  // namespace kdtree
