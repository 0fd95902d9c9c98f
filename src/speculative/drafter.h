// The DFlash block-diffusion drafter: one pass proposes candidates for all slots of a block.
//
// The drafter attends bidirectionally over the keys and values of the committed context, which it
// makes from the target's tapped hidden states, and over its own block [root, MASK, ...]. Slot i of
// the block predicts the token at its own position; slot 0's prediction is dropped. Embedding and
// head are the target's. Source: Chen et al. 2026 (DFlash) and its published program.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "config/model_config.h"
#include "model/latent_kv_cache.h"
#include "model/mlp.h"
#include "model/model_context.h"
#include "model/vocabulary.h"
#include "weights/weight_store.h"

namespace kdtree {

struct DrafterOptions {
  std::int64_t num_slots = 0;         // sequences at a time
  std::int64_t capacity = 0;          // context rows a slot, with room for a block behind the last
  std::int64_t max_context_rows = 0;  // rows of one append_context call
  std::int64_t block_size = 0;  // rows of a block, at most the config's: fewer draft fewer tokens
  std::int64_t num_predicted = 0;  // slots 1 to this one of a block predict, below block_size
};

// A loaded drafter.
struct DrafterModel {
  const DrafterConfig& config;
  const WeightStore& weights;
  DrafterPartition partition;  // of this rank
};

// Tensor parallel: query heads, feed-forward and fc are split over the ranks; a rank may have no
// head.
class Drafter {
 public:
  // What `model` refers to and vocabulary (the target's) outlive the drafter.
  Drafter(const ModelContext& context, const DrafterModel& model, Vocabulary& vocabulary,
          const DrafterOptions& options);
  Drafter(const Drafter&) = delete;
  Drafter& operator=(const Drafter&) = delete;
  ~Drafter();

  const DrafterConfig& config() const { return config_; }

  // Tapped states of tokens that follow a context: `batch` says slots, prefix lengths and
  // positions, row by row as for the target; its token ids are not read. taps [rows, taps *
  // hidden]. Writes their keys and values at the prefix of every layer's cache; whoever keeps the
  // lengths decides how many of them count.
  void append_context(const ConstTensorView& taps, const TreeBatch& batch);

  // Log-probabilities of the `num_candidates` best tokens of each slot 1..num_predicted of each
  // sequence, [sequences * num_predicted, num_candidates]; equal on every rank, valid until the
  // vocabulary's next call. `batch` holds a block [root, mask token, ...] a sequence, as chains
  // behind the prefixes. How many slots predict changes nothing about what each of them does.
  Vocabulary::TopK draft(const TreeBatch& batch, std::int64_t num_candidates);

  static std::int64_t workspace_bytes(const MemoryTraits& traits, const DrafterConfig& config,
                                      const DrafterPartition& partition,
                                      const DrafterOptions& options);
  static CacheSizes cache_sizes(const DrafterConfig& config, const DrafterPartition& partition,
                                const DrafterOptions& options);

 private:
  struct Layer;

  // Keys of `x` [rows, hidden] normed and rotated, values; both into the layer's caches at the
  // batch's rows.
  void write_keys_values(std::size_t layer, const ConstTensorView& x, const TreeBatch& batch);
  // Attention of the block's rows before o_proj, into o_.
  void attend(std::size_t layer, const TensorView& hidden, const TreeBatch& batch);
  // What follows the attention is a row's own business: o and hidden may be some rows of a block.
  void finish_layer(std::size_t layer, const ConstTensorView& o, const TensorView& hidden);
  std::int64_t max_rows() const;

  ModelContext context_;
  const DrafterConfig& config_;
  Vocabulary& vocabulary_;
  DrafterOptions options_;
  std::int64_t num_heads_;
  std::int64_t num_key_value_heads_;
  Range fc_rows_;
  std::vector<Layer> layers_;
  WeightView fc_;
  ConstTensorView hidden_norm_;
  ConstTensorView norm_;
  DeviceTensor rope_table_;
  DeviceTensor kv_head_of_;
  std::vector<DeviceTensor> keys_;    // a layer each, [slots, capacity, kv heads * head_dim]
  std::vector<DeviceTensor> values_;  // the same
  MlpWorkspace mlp_workspace_;
  DeviceTensor context_hidden_;  // [max_context_rows, hidden]
  DeviceTensor hidden_;          // [block rows, hidden]
  DeviceTensor normed_;          // [block rows, hidden]
  DeviceTensor delta_;           // [block rows, hidden]
  DeviceTensor predicted_;       // [sequences * num_predicted, hidden] rows of slots 1 and on
  DeviceTensor predicted_rows_;  // [sequences * num_predicted] which rows of the blocks these are
  DeviceTensor predicted_o_;     // [sequences * num_predicted, heads * head_dim] of o_
  DeviceTensor q_;               // [block rows, heads * head_dim]
  DeviceTensor o_;               // [block rows, heads * head_dim]
  DeviceTensor k_;               // [max_rows, kv heads * head_dim]
  DeviceTensor v_;               // [max_rows, kv heads * head_dim]
};

}  // namespace kdtree
