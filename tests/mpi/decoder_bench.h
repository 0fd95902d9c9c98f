// A decoder with its cache, driven row by row, without the engine's loop.
#pragma once

#include <cstring>
#include <span>
#include <vector>

#include "model/decoder.h"
#include "model/tree_batch_storage.h"
#include "model/vocabulary.h"
#include "tests/mpi/test_model.h"
#include "tests/mpi/world.h"

namespace kdtree {

using Ids = std::vector<std::int32_t>;
// Logits of this rank's part of the vocabulary.
using Logits = std::vector<float>;

struct TestTree {
  Ids token_ids;
  Ids parents;  // the root's is -1
};

class DecoderBench {
 public:
  static constexpr std::int64_t kMaxRows = 256;
  static constexpr std::int64_t kCapacity = 192;
  static constexpr std::int64_t kMaxNodes = 128;

  DecoderBench(const TestModel& model, ExchangeKind exchange, std::int64_t num_slots)
      : context_{world().backend, world().communicator},
        partition_(target_partition(model.config(), model.loaded().load_options())),
        vocabulary_(context_, model.config(), model.loaded().target_weights(),
                    partition_.vocabulary, {.max_rows = kMaxRows, .max_candidates = kMaxRows}),
        decoder_(context_,
                 {.config = model.config(),
                  .weights = model.loaded().target_weights(),
                  .placement = model.loaded().placement(),
                  .partition = partition_},
                 {.max_rows = kMaxRows,
                  .max_positions = kCapacity,
                  .target_layer_ids = {},
                  .exchange = exchange}),
        cache_(context_.backend,
               {.num_layers = model.config().num_hidden_layers,
                .num_slots = num_slots,
                .capacity = kCapacity,
                .width = model.config().kv_lora_rank + model.config().qk_rope_head_dim}),
        storage_(context_.backend, kMaxRows, num_slots, kMaxNodes),
        normed_(context_.backend, context_.backend.activation_dtype(),
                Shape{kMaxRows, model.config().hidden_size}),
        paths_(context_.backend, DType::kInt32, Shape{1, kMaxNodes}),
        own_(context_.backend, DType::kInt32, Shape{3}) {}

  LatentKvCache& cache() { return cache_; }

  // Verifies a tree in each of these slots, all in one call; the logits of all rows.
  std::vector<Logits> verify(std::span<const std::int32_t> slots,
                             const std::vector<TestTree>& trees) {
    std::vector<SequenceRows> rows;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      rows.push_back({.slot = slots[i],
                      .prefix_length = static_cast<std::int32_t>(cache_.committed(slots[i])),
                      .token_ids = trees[i].token_ids,
                      .parents = trees[i].parents});
    }
    return forward(rows);
  }
  // Processes tokens as a chain and commits them; the logits of all.
  std::vector<Logits> append(std::int32_t slot, std::span<const std::int32_t> tokens) {
    const SequenceRows rows{.slot = slot,
                            .prefix_length = static_cast<std::int32_t>(cache_.committed(slot)),
                            .token_ids = tokens,
                            .parents = {}};
    std::vector<Logits> logits = forward({&rows, 1});
    cache_.commit_rows(slot, static_cast<std::int64_t>(tokens.size()));
    return logits;
  }
  // Keeps a path of the tree that was last verified in `slot`.
  void accept(std::int32_t slot, const Ids& path) {
    const Ids own = {slot, static_cast<std::int32_t>(cache_.committed(slot)),
                     static_cast<std::int32_t>(path.size())};
    paths_.upload(context_.backend, std::span<const std::int32_t>(path));
    own_.upload(context_.backend, std::span<const std::int32_t>(own));
    cache_.compact({.cache = {},
                    .slots = own_.view().rows(0, 1),
                    .prefix_lengths = own_.view().rows(1, 1),
                    .path_lengths = own_.view().rows(2, 1),
                    .paths = paths_.view()});
    cache_.commit_rows(slot, own[2]);
  }
  // The committed rows of a slot, all layers.
  std::vector<float> cached(std::int32_t slot) const {
    std::vector<float> values;
    for (std::int64_t layer = 0; layer < cache_.num_layers(); ++layer) {
      const TensorView& rows = cache_.layer(layer);
      const auto width = static_cast<std::size_t>(rows.size(2));
      const std::size_t count = static_cast<std::size_t>(cache_.committed(slot)) * width;
      const float* first = rows.row<float>(slot);
      values.insert(values.end(), first, first + count);
    }
    return values;
  }

 private:
  std::vector<Logits> forward(std::span<const SequenceRows> rows) {
    const TreeBatch batch = storage_.fill(rows);
    const TensorView normed = normed_.rows(batch.num_rows);
    decoder_.final_norm(decoder_.forward(batch, cache_, vocabulary_), normed);
    const ConstTensorView logits = vocabulary_.logits(normed);
    std::vector<Logits> result;
    for (std::int64_t row = 0; row < batch.num_rows; ++row) {
      const float* values = logits.row<float>(row);
      result.emplace_back(values, values + logits.size(1));
    }
    return result;
  }

  ModelContext context_;
  TargetPartition partition_;
  Vocabulary vocabulary_;
  Decoder decoder_;
  LatentKvCache cache_;
  TreeBatchStorage storage_;
  DeviceTensor normed_;
  DeviceTensor paths_;
  DeviceTensor own_;  // slot, prefix length and path length of what is accepted
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace kdtree
