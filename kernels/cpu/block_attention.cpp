#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/shapes.h"

namespace kdtree {
namespace {

// Checks all tensors and returns the batch's index arrays.
BatchIndex check_block_attention(const BlockAttentionParams& params) {
  const std::int64_t rows = params.batch.num_rows;
  check(params.key_cache.shape().rank() == 3, "the key cache has {} dimensions, expected 3",
        params.key_cache.shape().rank());
  const std::int64_t num_slots = params.key_cache.size(0);
  const std::int64_t capacity = params.key_cache.size(1);
  const Shape cache{num_slots, capacity, params.num_key_value_heads * params.head_dim};
  expect_tensor("key cache", params.key_cache, DType::kFloat32, cache);
  expect_tensor("value cache", params.value_cache, DType::kFloat32, cache);
  const Shape row_shape{rows, params.num_heads * params.head_dim};
  expect_tensor("block_attention's query", params.query, DType::kFloat32, row_shape);
  expect_tensor("block_attention's output", params.output, DType::kFloat32, row_shape);
  check_indices("kv_head_of", read_indices("kv_head_of", params.kv_head_of, params.num_heads),
                params.num_key_value_heads);
  return read_batch(params.batch, num_slots, capacity);
}

}  // namespace

void CpuBackend::block_attention(const BlockAttentionParams& params) {
  const BatchIndex index = check_block_attention(params);
  const auto kv_head_of = params.kv_head_of.span<std::int32_t>();
  const std::int64_t head_dim = params.head_dim;
  const auto capacity = static_cast<std::size_t>(params.key_cache.size(1));
  std::int64_t num_keys = 0;  // of one head, all rows together
  for (std::int64_t s = 0; s < params.batch.num_sequences; ++s) {
    num_keys += index.num_rows(s) * (index.prefix(s) + index.num_rows(s));
  }
  const LoopWork work = {params.batch.num_rows * params.num_heads,
                         2 * num_keys * params.num_heads * head_dim};
  parallel_for(num_threads_, work, [&](std::int64_t begin, std::int64_t end) {
    thread_local std::vector<std::int32_t> positions;  // 0, 1, 2, ...
    thread_local std::vector<float> scores;
    if (positions.size() < capacity) {
      positions.resize(capacity);
      std::iota(positions.begin(), positions.end(), 0);
      scores.resize(capacity);
    }
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t row = item / params.num_heads;
      const std::int64_t head = item % params.num_heads;
      const std::int64_t sequence = index.sequence(row);
      const std::int64_t column = kv_head_of[static_cast<std::size_t>(head)] * head_dim;
      const HeadCache cache = {
          .keys = params.key_cache.row<float>(index.slot(sequence)) + column,
          .values = params.value_cache.row<float>(index.slot(sequence)) + column,
          .stride = params.num_key_value_heads * head_dim,
          .key_dim = head_dim,
          .value_dim = head_dim};
      const auto num_visible =
          static_cast<std::size_t>(index.prefix(sequence) + index.num_rows(sequence));
      const HeadQuery query = {
          .query = params.query.row<float>(row) + head * head_dim,
          .scale = params.softmax_scale,
          .visible = std::span<const std::int32_t>(positions).first(num_visible)};
      attend(cache, query, scores.data(), params.output.row<float>(row) + head * head_dim);
    }
  });
}

}  // namespace kdtree
