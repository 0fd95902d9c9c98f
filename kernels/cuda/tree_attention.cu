#include <algorithm>
#include <limits>

#include "kernels/cuda/attention_split.cuh"
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/tree_attention.cuh"

namespace kdtree {
namespace {

// Any head sizes. Block (x, y): x = token and eight of its heads, y = partial.
template <class T>
__global__ void __launch_bounds__(kSplitThreads, kSplitBlocksPerSm)
    tree_attention_kernel(TreeAttentionArguments<T> p) {
  extern __shared__ __align__(16) float shared[];
  const int head_tiles = (p.num_heads + kSplitQueries - 1) / kSplitQueries;
  const int pass_token = blockIdx.x / head_tiles;
  const int head = blockIdx.x % head_tiles * kSplitQueries;
  const int token = p.batch.first_row + pass_token;
  const int sequence = p.batch.sequence(token);
  const int prefix = p.batch.prefix(sequence);
  const int node = token - p.batch.row_offsets[sequence];
  const bool is_tree = blockIdx.y == 0;
  const int begin = is_tree ? prefix : (static_cast<int>(blockIdx.y) - 1) * p.split_length;
  const int count =
      is_tree ? min(node + 1, p.batch.capacity - prefix) : min(prefix - begin, p.split_length);
  if (!is_tree && count <= 0) {
    return;  // behind the prefix; the merge knows
  }

  const T* const rows = p.cache + p.batch.slot(sequence) * p.slot_stride +
                        static_cast<std::int64_t>(begin) * p.latent_dim;
  const SplitQueries<T> queries = {
      .first = p.query + token * p.query_stride + static_cast<std::int64_t>(head) * p.latent_dim,
      .stride = p.latent_dim,
      .count = min(kSplitQueries, p.num_heads - head),
      .scale = p.softmax_scale};
  const SplitKeys<T> keys = {.keys = rows,
                             .values = rows,
                             .stride = p.latent_dim,
                             .key_dim = p.latent_dim,
                             .value_dim = p.kv_lora_rank,
                             .count = count};
  const SplitTarget target = {
      .partials = p.partials,
      .partial = blockIdx.y,
      .first_row = static_cast<std::int64_t>(pass_token) * p.num_heads + head,
      .row_step = 1};
  attend_split(
      queries, keys, target,
      [&](int word) { return is_tree ? p.visible_nodes(token, node, word) : ~std::uint64_t{0}; },
      shared);
}

template <class T>
void launch_generic(const TreeAttentionArguments<T>& arguments, cudaStream_t stream) {
  const std::int64_t shared_bytes =
      split_shared_bytes(arguments.latent_dim, arguments.kv_lora_rank);
  check(shared_bytes <= kMaxSplitSharedBytes,
        "tree_attention: latent rows of {} + {} values need {} bytes of shared memory, at most {}",
        arguments.kv_lora_rank, arguments.latent_dim - arguments.kv_lora_rank, shared_bytes,
        kMaxSplitSharedBytes);
  const int head_tiles = (arguments.num_heads + kSplitQueries - 1) / kSplitQueries;
  const dim3 grid(static_cast<unsigned>(arguments.batch.num_rows) * head_tiles,
                  static_cast<unsigned>(arguments.num_partials));
  tree_attention_kernel<T>
      <<<grid, kSplitThreads, static_cast<std::size_t>(shared_bytes), stream>>>(arguments);
  check_launch("tree_attention");
}

enum class TreeKernel : std::uint8_t { kGeneric, kMma, kWgmma };

TreeKernel choose_kernel(const TreeAttentionArguments<float>& /*arguments*/,
                         const cudaDeviceProp& /*device*/) {
  return TreeKernel::kGeneric;
}
TreeKernel choose_kernel(const TreeAttentionArguments<__nv_bfloat16>& arguments,
                         const cudaDeviceProp& device) {
  if (fits_tree_attention_wgmma(arguments, device)) return TreeKernel::kWgmma;
  return fits_tree_attention_mma(arguments) ? TreeKernel::kMma : TreeKernel::kGeneric;
}

void launch(TreeKernel /*kernel*/, const TreeAttentionArguments<float>& arguments,
            cudaStream_t stream) {
  launch_generic(arguments, stream);
}
void launch(TreeKernel kernel, const TreeAttentionArguments<__nv_bfloat16>& arguments,
            cudaStream_t stream) {
  switch (kernel) {
    case TreeKernel::kGeneric:
      launch_generic(arguments, stream);
      break;
    case TreeKernel::kMma:
      tree_attention_mma(arguments, stream);
      break;
    case TreeKernel::kWgmma:
      tree_attention_wgmma(arguments, stream);
      break;
  }
}

// Pass after pass, as many tokens as the partials' memory holds.
template <class T>
void run_passes(TreeAttentionArguments<T> arguments, const AttentionPlan& plan, void* scratch,
                const TensorView& output, CudaBackend& backend) {
  const TreeKernel kernel = choose_kernel(arguments, backend.properties());
  const cudaStream_t stream = backend.cuda_stream();
  const int num_rows = arguments.batch.num_rows;
  for (int first = 0; first < num_rows; first += static_cast<int>(plan.pass_tokens)) {
    arguments.batch.first_row = first;
    arguments.batch.num_rows = std::min(num_rows - first, static_cast<int>(plan.pass_tokens));
    arguments.partials = plan.partials(
        scratch, static_cast<std::int64_t>(arguments.batch.num_rows) * arguments.num_heads);
    launch(kernel, arguments, stream);
    merge_attention({.batch = arguments.batch,
                     .partials = arguments.partials,
                     .split_length = plan.split_length,
                     .tree_split = true,
                     .num_heads = arguments.num_heads,
                     .value_dim = arguments.kv_lora_rank,
                     .base = kernel == TreeKernel::kGeneric ? ExpBase::kE : ExpBase::kTwo},
                    output, stream);
  }
}

template <class T>
TreeAttentionArguments<T> make_arguments(const TreeAttentionParams& params,
                                         const AttentionBatch& batch, const AttentionPlan& plan) {
  const MlaShape& shape = params.shape;
  const ConstTensorView& mask = params.batch.ancestor_mask;
  TreeAttentionArguments<T> arguments;
  arguments.batch = batch;
  arguments.query = static_cast<const T*>(params.query.raw());
  arguments.query_stride = params.query.row_stride();
  arguments.cache = static_cast<const T*>(params.cache.raw());
  arguments.slot_stride = params.cache.row_stride();
  if (!mask.empty()) {
    arguments.mask = mask.data<std::int64_t>();
    arguments.mask_stride = mask.row_stride();
    arguments.mask_words = static_cast<int>(mask.size(1));
  }
  arguments.num_heads = static_cast<int>(shape.num_heads);
  arguments.kv_lora_rank = static_cast<int>(shape.kv_lora_rank);
  arguments.latent_dim = static_cast<int>(shape.latent_dim());
  arguments.softmax_scale = params.softmax_scale;
  arguments.split_length = plan.split_length;
  arguments.num_partials = plan.num_partials;
  return arguments;
}

}  // namespace

void CudaBackend::tree_attention(const TreeAttentionParams& params) {
  const MlaShape& shape = params.shape;
  const TreeBatch& batch = params.batch;
  check(params.cache.shape().rank() == 3, "the latent cache has {} dimensions, expected 3",
        params.cache.shape().rank());
  const std::int64_t num_slots = params.cache.size(0);
  const std::int64_t capacity = params.cache.size(1);
  expect_tensor("latent cache", params.cache, activation_dtype(),
                Shape{num_slots, capacity, shape.latent_dim()});
  expect_tensor("tree_attention's query", params.query, activation_dtype(),
                Shape{batch.num_rows, shape.num_heads * shape.latent_dim()});
  expect_tensor("tree_attention's output", params.output, activation_dtype(),
                Shape{batch.num_rows, shape.num_heads * shape.kv_lora_rank});
  const AttentionBatch index = attention_batch(batch, num_slots, capacity);
  if (!batch.ancestor_mask.empty()) {
    check(batch.ancestor_mask.shape().rank() == 2, "ancestor_mask has {} dimensions, expected 2",
          batch.ancestor_mask.shape().rank());
    expect_tensor("ancestor_mask", batch.ancestor_mask, DType::kInt64,
                  Shape{batch.num_rows, batch.ancestor_mask.size(1)});
  }
  check(batch.num_rows * shape.num_heads <= std::numeric_limits<int>::max() / 2,
        "tree_attention of {} rows with {} heads is too large for the kernels", batch.num_rows,
        shape.num_heads);
  if (batch.num_rows == 0 || shape.num_heads == 0 || shape.kv_lora_rank == 0) {
    return;
  }

  const AttentionPlan plan =
      plan_attention(capacity, shape.num_heads, shape.kv_lora_rank, batch.num_rows, true);
  void* const partials = scratch(plan.scratch_bytes);
  if (is_float32()) {
    run_passes(make_arguments<float>(params, index, plan), plan, partials, params.output, *this);
  } else {
    run_passes(make_arguments<__nv_bfloat16>(params, index, plan), plan, partials, params.output,
               *this);
  }
}

}  // namespace kdtree
