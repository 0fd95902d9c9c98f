// Embedding and output head, split over the ranks by rows of the vocabulary; results carry global
// token ids.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "config/model_config.h"
#include "core/partition.h"
#include "kernels/device_tensor.h"
#include "model/model_context.h"
#include "weights/weight_store.h"

namespace kdtree {

// What the head can be asked for, at most.
struct VocabularyLimits {
  std::int64_t max_rows = 0;         // rows of one call
  std::int64_t max_candidates = 0;   // rows * k of one call
  std::int64_t max_scored_rows = 0;  // rows of one log_probs_of call; 0: none
};

class Vocabulary {
 public:
  // `weights` outlives the object.
  Vocabulary(const ModelContext& context, const ModelConfig& config, const WeightStore& weights,
             const Range& part, const VocabularyLimits& limits);

  std::int64_t size() const { return vocab_size_; }

  // out [rows, hidden] = embeddings of token_ids [rows], complete on every rank.
  void embed(const ConstTensorView& token_ids, const TensorView& out) const;

  // Candidates of each row, descending by value, ties to the lower id; equal on every rank; valid
  // until the next call.
  struct TopK {
    ConstTensorView values;  // [rows, k] float32: logits or log-probabilities
    ConstTensorView ids;     // [rows, k] int32
  };
  // hidden [rows, hidden], after the final norm. rows * k <= max_candidates, k <= size().
  TopK top_logits(const ConstTensorView& hidden, std::int64_t k);
  TopK top_log_probs(const ConstTensorView& hidden, std::int64_t k);
  // Natural logarithms of the probabilities that the rows give to these tokens, one a row, in
  // double; equal on every rank. The sum over the vocabulary runs over the ranks' parts in rank
  // order. rows <= max_scored_rows. Waits for the device; no part of a step.
  std::vector<double> log_probs_of(const ConstTensorView& hidden,
                                   std::span<const std::int32_t> tokens);
  // logits [rows, part] of this rank's rows of the vocabulary; valid until the next call.
  ConstTensorView logits(const ConstTensorView& hidden);

  static std::int64_t bytes(const VocabularyLimits& limits, const Range& part, int world_size);

 private:
  TopK merged_top_k(const ConstTensorView& hidden, std::int64_t k, bool log_probs);
  // [ranks, rows, 2] log_sum_exp_partials of every rank's part of these logits.
  ConstTensorView all_partials(const ConstTensorView& own_logits);
  // [ranks, rows] the logits of these tokens where a rank holds them, anything elsewhere.
  ConstTensorView all_scores(const ConstTensorView& own_logits,
                             std::span<const std::int32_t> tokens);

  ModelContext context_;
  std::int64_t vocab_size_;
  Range part_;
  WeightView embedding_;
  WeightView head_;
  DeviceTensor logits_;         // [max_rows, part] float32
  DeviceTensor part_values_;    // [ranks * max_candidates] float32
  DeviceTensor part_ids_;       // the same, int32
  DeviceTensor part_partials_;  // [ranks * max_rows * 2] float32
  DeviceTensor values_;         // [max_candidates] float32
  DeviceTensor ids_;            // the same, int32
  DeviceTensor part_scores_;    // [ranks * max_scored_rows] float32 logits of the given tokens
  DeviceTensor score_indices_;  // [max_scored_rows]
};

}  // namespace kdtree
