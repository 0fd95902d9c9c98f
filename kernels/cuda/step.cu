// What turns trees, blocks and accepted paths into the rows of the next pass.
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/shapes.h"

namespace kdtree {
namespace {

constexpr std::int64_t kBitsPerWord = 64;

__device__ void set_bit(std::uint64_t* mask, std::int64_t node) {
  mask[node / kBitsPerWord] |= std::uint64_t{1} << (node % kBitsPerWord);
}

// Trees [sequences, max_nodes] and the rows made of them.
struct TreeRows {
  const std::int32_t* num_nodes;
  const std::int32_t* parents;
  std::int64_t parents_stride;
  const std::int32_t* tokens;
  std::int64_t tokens_stride;
  const std::int32_t* prefix_lengths;
  std::int32_t* token_ids;
  std::int32_t* positions;
  std::uint64_t* masks;  // [rows, words]
  std::int64_t masks_stride;
  std::int64_t words;
  std::int64_t max_nodes;
};

// Steps from `node` to the root, or -1 if its ancestors do not lead there. A parent that is not
// below its child ends the walk, so that it takes at most `node` steps whatever the tree holds.
__device__ std::int32_t depth_of(const std::int32_t* parents, std::int64_t node) {
  std::int32_t depth = 0;
  while (node > 0) {
    const std::int64_t parent = parents[node];
    if (parent < 0 || parent >= node) {
      return -1;
    }
    node = parent;
    ++depth;
  }
  return depth;
}

// One block a tree, one thread a node: each walks to the root by itself. A node without a way to
// the root becomes padding.
__global__ void __launch_bounds__(kBlockThreads) expand_trees_kernel(TreeRows tree) {
  const std::int64_t s = blockIdx.x;
  const std::int32_t* parents = tree.parents + s * tree.parents_stride;
  const std::int32_t prefix = tree.prefix_lengths[s];
  const std::int64_t num_nodes = min(std::int64_t{tree.num_nodes[s]}, tree.max_nodes);
  for (std::int64_t node = threadIdx.x; node < tree.max_nodes; node += blockDim.x) {
    const std::int64_t row = s * tree.max_nodes + node;
    const std::int32_t depth = node < num_nodes ? depth_of(parents, node) : -1;
    tree.token_ids[row] = depth < 0 ? 0 : tree.tokens[s * tree.tokens_stride + node];
    tree.positions[row] = prefix + max(depth, 0);
    std::uint64_t* mask = tree.masks + row * tree.masks_stride;
    for (std::int64_t word = 0; word < tree.words; ++word) {
      mask[word] = 0;
    }
    set_bit(mask, node);
    std::int64_t ancestor = node;
    for (std::int32_t step = 0; step < depth; ++step) {
      ancestor = parents[ancestor];
      set_bit(mask, ancestor);
    }
  }
}

template <class T>
struct IndexRows {
  T* data;  // [sequences, cols]
  std::int64_t stride;
};

__global__ void __launch_bounds__(kBlockThreads)
    expand_blocks_kernel(const std::int32_t* roots, const std::int32_t* prefix_lengths,
                         std::int32_t mask_token_id, IndexRows<std::int32_t> token_ids,
                         IndexRows<std::int32_t> positions, std::int64_t block_size) {
  const std::int64_t s = blockIdx.x;
  for_columns(block_size, [&](std::int64_t place) {
    token_ids.data[s * token_ids.stride + place] = place == 0 ? roots[s] : mask_token_id;
    positions.data[s * positions.stride + place] =
        prefix_lengths[s] + static_cast<std::int32_t>(place);
  });
}

// A malformed length counts as the nearest sound one, a malformed node as the root: every row that
// is named exists.
__global__ void __launch_bounds__(kBlockThreads)
    accepted_rows_kernel(IndexRows<const std::int32_t> paths, const std::int32_t* path_lengths,
                         const std::int32_t* prefix_lengths, std::int64_t max_path,
                         std::int64_t max_nodes, IndexRows<std::int32_t> rows,
                         IndexRows<std::int32_t> positions) {
  const std::int64_t s = blockIdx.x;
  const std::int64_t length = max(std::int64_t{1}, min(std::int64_t{path_lengths[s]}, max_path));
  for_columns(max_path, [&](std::int64_t place) {
    std::int64_t node = paths.data[s * paths.stride + min(place, length - 1)];
    node = node < 0 || node >= max_nodes ? 0 : node;
    rows.data[s * rows.stride + place] = static_cast<std::int32_t>(s * max_nodes + node);
    positions.data[s * positions.stride + place] =
        prefix_lengths[s] + static_cast<std::int32_t>(place);
  });
}

__global__ void __launch_bounds__(kBlockThreads)
    advance_kernel(const std::int32_t* path_lengths, const std::int32_t* bonus_tokens,
                   std::int32_t* prefix_lengths, std::int32_t* roots, std::int64_t num_sequences) {
  for_columns(num_sequences, [&](std::int64_t s) {
    prefix_lengths[s] += path_lengths[s];
    roots[s] = bonus_tokens[s];
  });
}

IndexRows<std::int32_t> index_rows(const TensorView& view) {
  return {view.data<std::int32_t>(), view.row_stride()};
}

}  // namespace

void CudaBackend::expand_trees(const ExpandTreesParams& params) {
  const std::int64_t num_sequences = params.prefix_lengths.size(0);
  const std::int64_t max_nodes = check_trees(params.trees, num_sequences);
  const std::int64_t rows = num_sequences * max_nodes;
  expect_matrix("ancestor_mask", params.ancestor_mask, DType::kInt64);
  const std::int64_t words = params.ancestor_mask.size(1);
  expect_tensor("ancestor_mask", params.ancestor_mask, DType::kInt64, Shape{rows, words});
  check(words * kBitsPerWord >= max_nodes, "masks of {} words for {} nodes", words, max_nodes);
  const TreeRows tree = {
      .num_nodes = device_indices("num_nodes", params.trees.num_nodes, num_sequences),
      .parents = params.trees.parents.data<std::int32_t>(),
      .parents_stride = params.trees.parents.row_stride(),
      .tokens = params.trees.token_ids.data<std::int32_t>(),
      .tokens_stride = params.trees.token_ids.row_stride(),
      .prefix_lengths = device_indices("prefix_lengths", params.prefix_lengths, num_sequences),
      .token_ids = device_indices("expand_trees' token_ids", params.token_ids, rows),
      .positions = device_indices("expand_trees' positions", params.positions, rows),
      .masks = reinterpret_cast<std::uint64_t*>(params.ancestor_mask.data<std::int64_t>()),
      .masks_stride = params.ancestor_mask.row_stride(),
      .words = words,
      .max_nodes = max_nodes};
  if (num_sequences == 0) {
    return;
  }
  const dim3 grid = row_grid(num_sequences, 1);
  expand_trees_kernel<<<grid, kBlockThreads, 0, cuda_stream()>>>(tree);
  check_launch("expand_trees");
}

void CudaBackend::expand_blocks(const ExpandBlocksParams& params) {
  expect_matrix("expand_blocks' token_ids", params.token_ids, DType::kInt32);
  const std::int64_t num_sequences = params.token_ids.size(0);
  const std::int64_t block_size = params.token_ids.size(1);
  expect_tensor("expand_blocks' positions", params.positions, DType::kInt32,
                params.token_ids.shape());
  const std::int32_t* roots = device_indices("roots", params.roots, num_sequences);
  const std::int32_t* prefixes =
      device_indices("prefix_lengths", params.prefix_lengths, num_sequences);
  if (num_sequences == 0 || block_size == 0) {
    return;
  }
  const dim3 grid = row_grid(num_sequences, block_size);
  expand_blocks_kernel<<<grid, kBlockThreads, 0, cuda_stream()>>>(
      roots, prefixes, params.mask_token_id, index_rows(params.token_ids),
      index_rows(params.positions), block_size);
  check_launch("expand_blocks");
}

void CudaBackend::accepted_rows(const AcceptedRowsParams& params) {
  expect_matrix("paths", params.paths, DType::kInt32);
  const std::int64_t num_sequences = params.paths.size(0);
  const std::int64_t max_path = params.paths.size(1);
  const std::int32_t* lengths = device_indices("path_lengths", params.path_lengths, num_sequences);
  const std::int32_t* prefixes =
      device_indices("prefix_lengths", params.prefix_lengths, num_sequences);
  expect_tensor("accepted_rows' rows", params.rows, DType::kInt32, params.paths.shape());
  expect_tensor("accepted_rows' positions", params.positions, DType::kInt32, params.paths.shape());
  check(params.max_nodes >= 1, "steps of {} rows a sequence", params.max_nodes);
  if (num_sequences == 0 || max_path == 0) {
    return;
  }
  const dim3 grid = row_grid(num_sequences, max_path);
  accepted_rows_kernel<<<grid, kBlockThreads, 0, cuda_stream()>>>(
      {params.paths.data<std::int32_t>(), params.paths.row_stride()}, lengths, prefixes, max_path,
      params.max_nodes, index_rows(params.rows), index_rows(params.positions));
  check_launch("accepted_rows");
}

void CudaBackend::advance(ConstTensorView path_lengths, ConstTensorView bonus_tokens,
                          TensorView prefix_lengths, TensorView roots) {
  const std::int64_t num_sequences = prefix_lengths.size(0);
  const std::int32_t* lengths = device_indices("path_lengths", path_lengths, num_sequences);
  const std::int32_t* tokens = device_indices("bonus_tokens", bonus_tokens, num_sequences);
  std::int32_t* prefixes = device_indices("prefix_lengths", prefix_lengths, num_sequences);
  std::int32_t* next_roots = device_indices("roots", roots, num_sequences);
  if (num_sequences == 0) {
    return;
  }
  advance_kernel<<<row_grid(1, num_sequences), kBlockThreads, 0, cuda_stream()>>>(
      lengths, tokens, prefixes, next_roots, num_sequences);
  check_launch("advance");
}

}  // namespace kdtree
