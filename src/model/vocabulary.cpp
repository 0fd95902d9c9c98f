#include "model/vocabulary.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kdtree {

namespace {

// A row's log-sum-exp of each part of the vocabulary: the largest logit, and the sum of
// exp(logit - largest).
struct Partial {
  float highest = 0;
  float sum = 0;
};

// Of the whole vocabulary; partials[p * rows + row], added in order of the parts.
double log_sum_exp(const std::vector<Partial>& partials, std::size_t rows, std::size_t row) {
  double highest = -std::numeric_limits<double>::infinity();
  for (std::size_t at = row; at < partials.size(); at += rows) {
    highest = std::max(highest, static_cast<double>(partials[at].highest));
  }
  double sum = 0;
  for (std::size_t at = row; at < partials.size(); at += rows) {
    sum += std::exp(static_cast<double>(partials[at].highest) - highest) *
           static_cast<double>(partials[at].sum);
  }
  return highest + std::log(sum);
}

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
  part_scores_ = DeviceTensor(backend, DType::kFloat32, Shape{ranks * limits.max_scored_rows});
  score_indices_ = DeviceTensor(backend, DType::kInt32, Shape{limits.max_scored_rows});
}

std::int64_t Vocabulary::bytes(const VocabularyLimits& limits, const Range& part, int world_size) {
  const std::int64_t ranks = world_size;
  return 4 * (limits.max_rows * part.size() + (ranks + 1) * 2 * limits.max_candidates +
              ranks * limits.max_rows * 2 + (ranks + 1) * limits.max_scored_rows);
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
    partials = all_partials(own_logits);
  }
  const TensorView values = carve(values_, Shape{rows, k});
  const TensorView ids = carve(ids_, Shape{rows, k});
  backend.merge_top_k(part_values, part_ids, partials, values, ids);
  return {.values = values, .ids = ids};
}

ConstTensorView Vocabulary::all_partials(const ConstTensorView& own_logits) {
  const std::int64_t rows = own_logits.size(0);
  Communicator& communicator = context_.communicator;
  const TensorView partials = carve(part_partials_, Shape{communicator.world_size(), rows, 2});
  const TensorView own = partials.rows(communicator.rank(), 1).reshape(Shape{rows, 2});
  context_.backend.log_sum_exp_partials(own_logits, own);
  communicator.all_gather(own, partials, context_.backend.stream(), {.what = "log-sum-exp"});
  return partials;
}

ConstTensorView Vocabulary::all_scores(const ConstTensorView& own_logits,
                                       std::span<const std::int32_t> tokens) {
  Backend& backend = context_.backend;
  Communicator& communicator = context_.communicator;
  const std::int64_t rows = own_logits.size(0);
  const std::int64_t width = part_.size();
  check(rows * width <= std::numeric_limits<std::int32_t>::max(), "{} logits of one call",
        rows * width);
  const TensorView scores = carve(part_scores_, Shape{communicator.world_size(), rows});
  const TensorView own = scores.rows(communicator.rank(), 1).reshape(Shape{rows, 1});
  // Elements of all logits as one column. A token of another rank: any place, nobody reads it.
  std::vector<std::int32_t> places;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t token = tokens[static_cast<std::size_t>(row)];
    const std::int64_t column = part_.contains(token) ? token - part_.begin : 0;
    places.push_back(static_cast<std::int32_t>(row * width + column));
  }
  if (width > 0) {
    score_indices_.upload(backend, std::span<const std::int32_t>(places));
    backend.gather_rows(own_logits.reshape(Shape{rows * width, 1}), score_indices_.rows(rows), own);
  }
  communicator.all_gather(own, scores, backend.stream(), {.what = "token logits"});
  backend.synchronize();  // the upload reads `places`
  return scores;
}

std::vector<double> Vocabulary::log_probs_of(const ConstTensorView& hidden,
                                             std::span<const std::int32_t> tokens) {
  Backend& backend = context_.backend;
  const std::int64_t ranks = context_.communicator.world_size();
  const std::int64_t rows = hidden.size(0);
  check(rows == std::ssize(tokens) && rows <= score_indices_.view().num_elements(),
        "{} rows and {} tokens to score, room for {}", rows, tokens.size(),
        score_indices_.view().num_elements());
  const ConstTensorView own_logits = logits(hidden);
  const ConstTensorView device_partials = all_partials(own_logits);
  const ConstTensorView device_scores = all_scores(own_logits, tokens);
  std::vector<Partial> partials(static_cast<std::size_t>(ranks * rows));
  std::vector<float> scores(partials.size());
  backend.download(partials.data(), device_partials.raw(), device_partials.bytes());
  backend.download(scores.data(), device_scores.raw(), device_scores.bytes());
  backend.synchronize();
  std::vector<double> log_probs;
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    std::int64_t holder = 0;
    while (!partition(vocab_size_, ranks, holder).contains(tokens[row])) {
      check(++holder < ranks, "token {} of a vocabulary of {}", tokens[row], vocab_size_);
    }
    const double score = scores[static_cast<std::size_t>(holder) * tokens.size() + row];
    log_probs.push_back(score - log_sum_exp(partials, tokens.size(), row));
  }
  return log_probs;
}

Vocabulary::TopK Vocabulary::top_logits(const ConstTensorView& hidden, std::int64_t k) {
  return merged_top_k(hidden, k, false);
}

Vocabulary::TopK Vocabulary::top_log_probs(const ConstTensorView& hidden, std::int64_t k) {
  return merged_top_k(hidden, k, true);
}

}  // namespace kdtree
