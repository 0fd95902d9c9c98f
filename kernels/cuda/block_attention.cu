#include <algorithm>
#include <limits>

#include "kernels/cuda/attention_split.cuh"
#include "kernels/cuda/cuda_backend_impl.h"

namespace kdtree {
namespace {

template <class T>
struct BlockAttentionArguments {
  AttentionBatch batch;
  const T* query = nullptr;  // [batch rows, heads * head_dim]
  std::int64_t query_stride = 0;
  const T* key_cache = nullptr;  // [slots, capacity, key/value heads * head_dim]
  const T* value_cache = nullptr;
  std::int64_t key_slot_stride = 0;
  std::int64_t value_slot_stride = 0;
  std::int64_t row_stride = 0;  // of a slot
  const std::int32_t* kv_head_of = nullptr;
  int num_heads = 0;
  int num_key_value_heads = 0;
  int head_dim = 0;
  float softmax_scale = 1;
  int split_length = 0;
  int num_partials = 0;
  AttentionPartials partials;
};

// Block (x, y): x = eight rows of a sequence and one head, y = split of the sequence's keys.
template <class T>
__global__ void __launch_bounds__(kSplitThreads, kSplitBlocksPerSm)
    block_attention_kernel(BlockAttentionArguments<T> p) {
  extern __shared__ __align__(16) float shared[];
  SequenceTile tile;
  const int head = blockIdx.x % p.num_heads;
  if (!find_tile(p.batch, 1, kSplitQueries, blockIdx.x / p.num_heads, tile)) {
    return;
  }
  // A row sees the prefix and all rows of its sequence, also those of other passes.
  const int sequence = tile.sequence;
  const int visible = min(
      p.batch.prefix(sequence) + p.batch.row_offsets[sequence + 1] - p.batch.row_offsets[sequence],
      p.batch.capacity);
  const int begin = static_cast<int>(blockIdx.y) * p.split_length;
  const int count = min(visible - begin, p.split_length);
  if (count <= 0) {
    return;  // behind the last key; the merge knows
  }

  const int token = tile.first_token + tile.first_row;
  const std::int64_t column = static_cast<std::int64_t>(p.kv_head_of[head]) * p.head_dim;
  const std::int64_t offset = begin * p.row_stride + column;
  const std::int64_t slot = p.batch.slot(sequence);
  const SplitQueries<T> queries = {
      .first = p.query + token * p.query_stride + static_cast<std::int64_t>(head) * p.head_dim,
      .stride = p.query_stride,
      .count = min(kSplitQueries, tile.num_rows - tile.first_row),
      .scale = p.softmax_scale};
  const SplitKeys<T> keys = {.keys = p.key_cache + slot * p.key_slot_stride + offset,
                             .values = p.value_cache + slot * p.value_slot_stride + offset,
                             .stride = p.row_stride,
                             .key_dim = p.head_dim,
                             .value_dim = p.head_dim,
                             .count = count};
  const SplitTarget target = {
      .partials = p.partials,
      .partial = blockIdx.y,
      .first_row = static_cast<std::int64_t>(token - p.batch.first_row) * p.num_heads + head,
      .row_step = p.num_heads};
  attend_split(
      queries, keys, target, [](int) { return ~std::uint64_t{0}; }, shared);
}

template <class T>
void run_passes(const BlockAttentionParams& params, const AttentionBatch& batch,
                const AttentionPlan& plan, void* scratch, cudaStream_t stream) {
  BlockAttentionArguments<T> arguments;
  arguments.batch = batch;
  arguments.query = static_cast<const T*>(params.query.raw());
  arguments.query_stride = params.query.row_stride();
  arguments.key_cache = static_cast<const T*>(params.key_cache.raw());
  arguments.value_cache = static_cast<const T*>(params.value_cache.raw());
  arguments.key_slot_stride = params.key_cache.row_stride();
  arguments.value_slot_stride = params.value_cache.row_stride();
  arguments.row_stride = params.key_cache.size(2);
  arguments.kv_head_of = params.kv_head_of.data<std::int32_t>();
  arguments.num_heads = static_cast<int>(params.num_heads);
  arguments.num_key_value_heads = static_cast<int>(params.num_key_value_heads);
  arguments.head_dim = static_cast<int>(params.head_dim);
  arguments.softmax_scale = params.softmax_scale;
  arguments.split_length = plan.split_length;
  arguments.num_partials = plan.num_partials;

  const std::int64_t shared_bytes = split_shared_bytes(params.head_dim, params.head_dim);
  check(shared_bytes <= kMaxSplitSharedBytes,
        "block_attention: heads of {} values need {} bytes of shared memory, at most {}",
        params.head_dim, shared_bytes, kMaxSplitSharedBytes);
  for (int first = 0; first < batch.num_rows; first += static_cast<int>(plan.pass_tokens)) {
    arguments.batch.first_row = first;
    arguments.batch.num_rows = std::min(batch.num_rows - first, static_cast<int>(plan.pass_tokens));
    arguments.partials = plan.partials(
        scratch, static_cast<std::int64_t>(arguments.batch.num_rows) * arguments.num_heads);
    const std::int64_t tiles =
        max_tiles(arguments.batch.num_rows, batch.num_sequences, kSplitQueries);
    const dim3 grid(static_cast<unsigned>(tiles * arguments.num_heads),
                    static_cast<unsigned>(plan.num_partials));
    block_attention_kernel<T>
        <<<grid, kSplitThreads, static_cast<std::size_t>(shared_bytes), stream>>>(arguments);
    check_launch("block_attention");
    merge_attention({.batch = arguments.batch,
                     .partials = arguments.partials,
                     .split_length = plan.split_length,
                     .tree_split = false,
                     .num_heads = arguments.num_heads,
                     .value_dim = arguments.head_dim,
                     .base = ExpBase::kE},
                    params.output, stream);
  }
}

}  // namespace

void CudaBackend::block_attention(const BlockAttentionParams& params) {
  const std::int64_t rows = params.batch.num_rows;
  check(params.key_cache.shape().rank() == 3, "the key cache has {} dimensions, expected 3",
        params.key_cache.shape().rank());
  const std::int64_t num_slots = params.key_cache.size(0);
  const std::int64_t capacity = params.key_cache.size(1);
  const Shape cache{num_slots, capacity, params.num_key_value_heads * params.head_dim};
  expect_tensor("key cache", params.key_cache, activation_dtype(), cache);
  expect_tensor("value cache", params.value_cache, activation_dtype(), cache);
  const Shape row_shape{rows, params.num_heads * params.head_dim};
  expect_tensor("block_attention's query", params.query, activation_dtype(), row_shape);
  expect_tensor("block_attention's output", params.output, activation_dtype(), row_shape);
  expect_tensor("kv_head_of", params.kv_head_of, DType::kInt32, Shape{params.num_heads});
  const AttentionBatch batch = attention_batch(params.batch, num_slots, capacity);
  check((rows + kSplitQueries * params.batch.num_sequences) * params.num_heads <=
            std::numeric_limits<int>::max() / 2,
        "block_attention of {} rows with {} heads is too large for the kernels", rows,
        params.num_heads);
  if (rows == 0 || params.num_heads == 0 || params.head_dim == 0) {
    return;
  }

  const AttentionPlan plan =
      plan_attention(capacity, params.num_heads, params.head_dim, rows, false);
  void* const partials = scratch(plan.scratch_bytes);
  if (is_float32()) {
    run_passes<float>(params, batch, plan, partials, cuda_stream());
  } else {
    run_passes<__nv_bfloat16>(params, batch, plan, partials, cuda_stream());
  }
}

}  // namespace kdtree
