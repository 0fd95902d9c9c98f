// The target model: all layers for the rows of a step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "comm/expert_placement.h"
#include "config/model_config.h"
#include "model/expert_exchange.h"
#include "model/grouped_batch.h"
#include "model/latent_attention.h"
#include "model/latent_kv_cache.h"
#include "model/moe.h"
#include "model/vocabulary.h"
#include "weights/weight_store.h"

namespace kdtree {

struct DecoderOptions {
  std::int64_t max_rows = 0;        // rows of one forward call
  std::int64_t max_group_rows = 0;  // of them an attention group's; 0: as many
  std::int64_t max_positions = 0;   // positions that rows may have
  std::vector<std::int64_t>
      target_layer_ids;  // layers whose outputs are tapped for the drafter; may be empty
  ExchangeKind exchange = ExchangeKind::kAllReduce;
  // Keeps what the routers choose in a forward call until the next one (expert_ids).
  bool keep_expert_ids = false;
  // Message counts of the alltoall exchange that depend on the number of rows alone, whether or not
  // the communicator can be recorded (then they always do).
  bool fixed_counts = false;
  // Rows that choose each expert are counted: expert_counts().
  bool count_experts = false;
  ParallelGrid grid = {};  // the context's
  // What the target's placement will be, for workspace_bytes; nullptr: linear.
  std::shared_ptr<const ExpertPlacement> placement = {};
};

// A loaded target, as its decoder needs it.
struct TargetModel {
  const ModelConfig& config;
  const WeightStore& weights;
  const ExpertPlacement& placement;
  TargetPartition partition;  // of this rank
};

class Decoder {
 public:
  // What `target` refers to outlives the decoder. Allocates its workspaces.
  Decoder(const ModelContext& context, const TargetModel& target, const DecoderOptions& options);
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;
  ~Decoder();

  // Runs the batch through all layers, writing provisional rows of `cache`. Returns the residual
  // stream [rows, hidden] of all rows behind the last layer, before the final norm, on every rank;
  // valid until the next call. Between the embedding and that, a rank has its attention group's
  // rows alone, but for what an exchange wants.
  ConstTensorView forward(const GroupedBatch& batch, const LatentKvCache& cache,
                          const Vocabulary& vocabulary);
  // Outputs of the tapped layers of the last forward call, [rows, taps * hidden] in the order of
  // target_layer_ids.
  ConstTensorView taps() const;
  // The experts that the last forward call's rows chose, layer by layer: [MoE layers, rows,
  // num_experts_per_tok] logical experts, equal on every rank. Without keep_expert_ids an error.
  ConstTensorView expert_ids() const;
  // out [rows, hidden] = final norm of hidden [rows, hidden], for the vocabulary's head.
  void final_norm(const ConstTensorView& hidden, const TensorView& out) const;

  // The target's experts have been moved to these slots (weights/weight_store.h). Not while a step
  // is in flight; recorded steps stay valid.
  void set_placement(const ExpertPlacement& placement);

  // [layers with experts, n_routed_experts] int64: how many rows have chosen each expert in this
  // decoder's life, without rows that are padding. Empty without DecoderOptions::count_experts.
  ConstTensorView expert_counts() const { return expert_counts_.view(); }

  // From now on forward() stamps marks of the backend in the exchange of each layer with experts:
  // of the i-th of them first_mark + i * kMarksAnExchange and on; nothing: none.
  void mark_exchanges(std::optional<std::size_t> first_mark) { first_mark_ = first_mark; }

  // Whether forward() can be recorded and replayed (Backend::run_recorded).
  bool replayable() const;

  static std::int64_t workspace_bytes(const MemoryTraits& traits, const ModelConfig& config,
                                      const TargetPartition& partition,
                                      const DecoderOptions& options, int world_size);

 private:
  struct Layer;

  // Adds the choices that the router has just made for the batch's rows; moe_index is that of the
  // layer among those with experts.
  void count_experts(std::int64_t moe_index, const ConstTensorView& expert_ids,
                     const TreeBatch& batch) const;
  std::optional<std::size_t> marks_of(std::int64_t moe_index) const;
  // hidden: of the rows from first_row on.
  void copy_taps(std::int64_t layer, const TensorView& hidden, std::int64_t first_row) const;
  // From normed_ to delta_.
  void run_experts(const Layer& layer, const GroupedBatch& batch);
  // Tensor [rows, ...] of all rows, of which each group has its own, on every rank.
  void gather_groups(const TensorView& rows, const GroupedBatch& batch,
                     CollectiveLabel label) const;

  ModelContext context_;
  const ModelConfig& config_;
  DecoderOptions options_;
  MlaShape shape_;
  DeviceTensor rope_table_;
  std::vector<Layer> layers_;
  ConstTensorView norm_;
  std::unique_ptr<ExpertExchange> exchange_;
  AttentionWorkspace attention_workspace_;
  RouterWorkspace router_workspace_;
  MlpWorkspace mlp_workspace_;
  // A group's rows lie at their places among all.
  DeviceTensor hidden_;  // [max_rows, hidden] the residual stream
  DeviceTensor normed_;  // [max_rows, hidden]
  DeviceTensor delta_;   // [max_rows, hidden] what a sub-layer adds
  DeviceTensor taps_;    // [max_rows, taps * hidden]
  DeviceTensor expert_counts_;
  std::int64_t last_rows_ = 0;
  std::optional<std::size_t> first_mark_;
};

}  // namespace kdtree
