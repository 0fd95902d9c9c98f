#include "model/vocabulary.h"

namespace kdtree {

namespace {

// A contiguous tensor at the start of a flat one.
TensorView carve(const DeviceTensor& flat, Shape shape) {
  check(shape.num_elements() <= flat.view().num_elements(), "a tensor {} in room for {} elements",
        shape.to_string(), flat.view().num_elements());
  return {flat.view().raw(), flat.view().dtype(), shape};
}

}  // namespace

Vocabulary::Vocabulary(const ModelContext& context, const ModelConfig& config,
                       const WeightStore& weights, const Range& part,
                       const VocabularyLimits& limits)
    : context_(context),
      vocab_size_(config.vocab_size),
      part_(part),
      embedding_(weights.matrix("model.embed_tokens.weight")),
      head_(weights.matrix(config.tie_word_embeddings ? "model.embed_tokens.weight"
                                                      : "lm_head.weight")) {
  Backend& backend = context.backend;
  const std::int64_t candidates = limits.max_candidates;
  const std::int64_t ranks = context.communicator.world_size();
  logits_ = DeviceTensor(backend, DType::kFloat32, Shape{limits.max_rows, part.size()});
  part_values_ = DeviceTensor(backend, DType::kFloat32, Shape{ranks * candidates});
  part_ids_ = DeviceTensor(backend, DType::kInt32, Shape{ranks * candidates});
  part_partials_ = DeviceTensor(backend, DType::kFloat32, Shape{ranks * limits.max_rows * 2});
  values_ = DeviceTensor(backend, DType::kFloat32, Shape{candidates});
  ids_ = DeviceTensor(backend, DType::kInt32, Shape{candidates});
}

std::int64_t Vocabulary::bytes(const VocabularyLimits& limits, const Range& part, int world_size) {
  const std::int64_t ranks = world_size;
  return 4 * (limits.max_rows * part.size() + (ranks + 1) * 2 * limits.max_candidates +
              ranks * limits.max_rows * 2);
}

void Vocabulary::embed(const ConstTensorView& token_ids, const TensorView& out) const {
  context_.backend.embed(embedding_, part_.begin, token_ids, out);
  // One rank holds each row, the others add zeros: the sum is exact.
  context_.all_reduce_sum(out, {.what = "embedding"});
}

ConstTensorView Vocabulary::logits(const ConstTensorView& hidden) {
  const TensorView logits = logits_.rows(hidden.size(0));
  context_.backend.linear(head_, hidden, logits);
  return logits;
}

Vocabulary::TopK Vocabulary::merged_top_k(const ConstTensorView& hidden, std::int64_t k,
                                          bool log_probs) {
  check(k > 0 && k <= vocab_size_, "top {} of a vocabulary of {}", k, vocab_size_);
  Backend& backend = context_.backend;
  Communicator& communicator = context_.communicator;
  const std::int64_t rows = hidden.size(0);
  const std::int64_t ranks = communicator.world_size();
  const std::int64_t rank = communicator.rank();
  const ConstTensorView own_logits = logits(hidden);

  const TensorView part_values = carve(part_values_, Shape{ranks, rows, k});
  const TensorView part_ids = carve(part_ids_, Shape{ranks, rows, k});
  const TensorView own_values = part_values.rows(rank, 1).reshape(Shape{rows, k});
  const TensorView own_ids = part_ids.rows(rank, 1).reshape(Shape{rows, k});
  backend.top_k(own_logits, part_.begin, own_values, own_ids);
  communicator.all_gather(own_values, part_values, backend.stream(), {.what = "candidate values"});
  communicator.all_gather(own_ids, part_ids, backend.stream(), {.what = "candidate ids"});

  ConstTensorView partials;
  if (log_probs) {
    const TensorView part_partials = carve(part_partials_, Shape{ranks, rows, 2});
    const TensorView own_partials = part_partials.rows(rank, 1).reshape(Shape{rows, 2});
    backend.log_sum_exp_partials(own_logits, own_partials);
    communicator.all_gather(own_partials, part_partials, backend.stream(), {.what = "log-sum-exp"});
    partials = part_partials;
  }
  const TensorView values = carve(values_, Shape{rows, k});
  const TensorView ids = carve(ids_, Shape{rows, k});
  backend.merge_top_k(part_values, part_ids, partials, values, ids);
  return {.values = values, .ids = ids};
}

Vocabulary::TopK Vocabulary::top_logits(const ConstTensorView& hidden, std::int64_t k) {
  return merged_top_k(hidden, k, false);
}

Vocabulary::TopK Vocabulary::top_log_probs(const ConstTensorView& hidden, std::int64_t k) {
  return merged_top_k(hidden, k, true);
}

}  // namespace kdtree
