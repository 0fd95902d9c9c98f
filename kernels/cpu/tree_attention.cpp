#include <algorithm>
#include <bit>
#include <vector>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/shapes.h"

namespace kdtree {
namespace {

constexpr std::int64_t kWordBits = 64;

// Cache rows that the node in batch row `row` sees, in order of position.
class Visibility {
 public:
  Visibility(const BatchIndex& index, const ConstTensorView& mask) : index_(index), mask_(mask) {}

  void list(std::int64_t row, std::vector<std::int32_t>& visible) const {
    const std::int64_t sequence = index_.sequence(row);
    const std::int64_t node = row - index_.first_row(sequence);
    const auto prefix = static_cast<std::int32_t>(index_.prefix(sequence));
    visible.clear();
    for (std::int32_t k = 0; k < prefix; ++k) {
      visible.push_back(k);
    }
    for (std::int64_t word = 0; word <= node / kWordBits; ++word) {
      for (std::uint64_t bits = word_of(row, node, word); bits != 0; bits &= bits - 1) {
        visible.push_back(prefix +
                          static_cast<std::int32_t>(word * kWordBits + std::countr_zero(bits)));
      }
    }
  }

 private:
  // Bits above the node itself are cut off: those rows may not have been written.
  std::uint64_t word_of(std::int64_t row, std::int64_t node, std::int64_t word) const {
    const std::uint64_t bits = mask_.empty()
                                   ? ~std::uint64_t{0}
                                   : static_cast<std::uint64_t>(mask_.row<std::int64_t>(row)[word]);
    const std::int64_t above = (word + 1) * kWordBits - (node + 1);
    return above > 0 ? bits & (~std::uint64_t{0} >> above) : bits;
  }

  const BatchIndex& index_;
  const ConstTensorView& mask_;
};

void check_mask(const TreeBatch& batch, const BatchIndex& index) {
  if (batch.ancestor_mask.empty()) {
    return;
  }
  expect_matrix("ancestor_mask", batch.ancestor_mask, DType::kInt64);
  const std::int64_t words = batch.ancestor_mask.size(1);
  expect_tensor("ancestor_mask", batch.ancestor_mask, DType::kInt64, Shape{batch.num_rows, words});
  for (std::int64_t s = 0; s < batch.num_sequences; ++s) {
    check(index.num_rows(s) <= words * kWordBits,
          "a tree of {} nodes does not fit ancestor masks of {} words", index.num_rows(s), words);
  }
}

}  // namespace

void CpuBackend::tree_attention(const TreeAttentionParams& params) {
  const MlaShape& shape = params.shape;
  const TreeBatch& batch = params.batch;
  check(params.cache.shape().rank() == 3, "the latent cache has {} dimensions, expected 3",
        params.cache.shape().rank());
  const std::int64_t num_slots = params.cache.size(0);
  const std::int64_t capacity = params.cache.size(1);
  expect_tensor("latent cache", params.cache, DType::kFloat32,
                Shape{num_slots, capacity, shape.latent_dim()});
  expect_tensor("tree_attention's query", params.query, DType::kFloat32,
                Shape{batch.num_rows, shape.num_heads * shape.latent_dim()});
  expect_tensor("tree_attention's output", params.output, DType::kFloat32,
                Shape{batch.num_rows, shape.num_heads * shape.kv_lora_rank});
  const BatchIndex index = read_batch(batch, num_slots, capacity);
  check_mask(batch, index);

  std::int64_t num_keys = 0;  // of one head, all rows together; an upper bound
  for (std::int64_t s = 0; s < batch.num_sequences; ++s) {
    num_keys += index.num_rows(s) * (index.prefix(s) + index.num_rows(s));
  }
  const LoopWork work = {batch.num_rows * shape.num_heads,
                         num_keys * shape.num_heads * (shape.latent_dim() + shape.kv_lora_rank)};
  const Visibility visibility(index, batch.ancestor_mask);
  parallel_for(num_threads_, work, [&](std::int64_t begin, std::int64_t end) {
    thread_local std::vector<std::int32_t> visible;
    thread_local std::vector<float> scores;
    visible.reserve(static_cast<std::size_t>(capacity));
    scores.resize(std::max(scores.size(), static_cast<std::size_t>(capacity)));
    std::int64_t listed_row = -1;
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t row = item / shape.num_heads;
      const std::int64_t head = item % shape.num_heads;
      if (row != listed_row) {
        visibility.list(row, visible);
        listed_row = row;
      }
      const float* slot = params.cache.row<float>(index.slot(index.sequence(row)));
      const HeadCache cache = {.keys = slot,
                               .values = slot,
                               .stride = shape.latent_dim(),
                               .key_dim = shape.latent_dim(),
                               .value_dim = shape.kv_lora_rank};
      const HeadQuery query = {.query = params.query.row<float>(row) + head * shape.latent_dim(),
                               .scale = params.softmax_scale,
                               .visible = visible};
      attend(cache, query, scores.data(),
             params.output.row<float>(row) + head * shape.kv_lora_rank);
    }
  });
}

}  // namespace kdtree
