// Greedy accept: one block a sequence.
#include <algorithm>

#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/shapes.h"

namespace kdtree {
namespace {

constexpr int kNone = 0x7fffffff;

struct AcceptArrays {
  const std::int32_t* num_nodes;
  const std::int32_t* token_ids;
  std::int64_t tokens_stride;
  const std::int32_t* parents;
  std::int64_t parents_stride;
  std::int64_t max_nodes;
  const std::int32_t* choices;
  std::int64_t num_choices;
  const std::int32_t* row_offsets;
  std::int32_t* path_lengths;
  std::int32_t* paths;
  std::int64_t paths_stride;
  std::int64_t max_path;
  std::int32_t* bonus_tokens;
};

// A node's accepted child is the lowest node behind it that names it as its parent and holds the
// target's choice. All nodes look for theirs at once; then one thread follows the path, which
// ascends and so ends whatever the parents hold.
__global__ void __launch_bounds__(kBlockThreads) accept_kernel(AcceptArrays arrays) {
  extern __shared__ std::int32_t accepted_child[];  // [nodes]
  const std::int64_t sequence = blockIdx.x;
  const std::int32_t* tokens = arrays.token_ids + sequence * arrays.tokens_stride;
  const std::int32_t* parents = arrays.parents + sequence * arrays.parents_stride;
  std::int32_t* path = arrays.paths + sequence * arrays.paths_stride;

  // Nodes without a choice of their own count as missing; only malformed offsets have any.
  const std::int64_t begin = arrays.row_offsets[sequence];
  const std::int64_t end =
      min(static_cast<std::int64_t>(arrays.row_offsets[sequence + 1]), arrays.num_choices);
  const std::int64_t claimed =
      min(static_cast<std::int64_t>(arrays.num_nodes[sequence]), arrays.max_nodes);
  const auto num_nodes = static_cast<int>(begin < 0 ? 0 : min(claimed, end - begin));
  if (num_nodes < 1) {
    if (threadIdx.x == 0) {
      path[0] = 0;
      arrays.path_lengths[sequence] = 1;
      arrays.bonus_tokens[sequence] = tokens[0];
    }
    return;
  }
  const std::int32_t* choices = arrays.choices + begin;

  for (int node = static_cast<int>(threadIdx.x); node < num_nodes; node += kBlockThreads) {
    accepted_child[node] = kNone;
  }
  __syncthreads();
  for (int node = 1 + static_cast<int>(threadIdx.x); node < num_nodes; node += kBlockThreads) {
    const std::int32_t parent = parents[node];
    if (parent >= 0 && parent < node && tokens[node] == choices[parent]) {
      atomicMin(&accepted_child[parent], node);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    std::int32_t current = 0;
    std::int32_t length = 1;
    path[0] = 0;
    while (length < arrays.max_path && accepted_child[current] != kNone) {
      current = accepted_child[current];
      path[length++] = current;
    }
    arrays.path_lengths[sequence] = length;
    arrays.bonus_tokens[sequence] = choices[current];
  }
}

}  // namespace

void CudaBackend::accept(const AcceptParams& params) {
  expect_matrix("paths", params.paths, DType::kInt32);
  const std::int64_t num_sequences = params.paths.size(0);
  const std::int64_t max_path = params.paths.size(1);
  const std::int64_t max_nodes = check_trees(params.trees, num_sequences);
  check(max_path >= 1, "paths of {} nodes have no place for the root", max_path);
  check(params.choices.shape().rank() == 1, "choices has {} dimensions, expected 1",
        params.choices.shape().rank());
  const std::int64_t num_choices = params.choices.size(0);
  const AcceptArrays arrays = {
      .num_nodes = device_indices("num_nodes", params.trees.num_nodes, num_sequences),
      .token_ids = params.trees.token_ids.data<std::int32_t>(),
      .tokens_stride = params.trees.token_ids.row_stride(),
      .parents = params.trees.parents.data<std::int32_t>(),
      .parents_stride = params.trees.parents.row_stride(),
      .max_nodes = max_nodes,
      .choices = device_indices("choices", params.choices, num_choices),
      .num_choices = num_choices,
      .row_offsets = device_indices("row_offsets", params.row_offsets, num_sequences + 1),
      .path_lengths = device_indices("path_lengths", params.path_lengths, num_sequences),
      .paths = params.paths.data<std::int32_t>(),
      .paths_stride = params.paths.row_stride(),
      .max_path = max_path,
      .bonus_tokens = device_indices("bonus_tokens", params.bonus_tokens, num_sequences),
  };
  constexpr std::int64_t kMostNodes = 8192;
  check(max_nodes <= kMostNodes, "trees of {} nodes, at most {} are supported", max_nodes,
        kMostNodes);
  if (num_sequences == 0) {
    return;
  }
  accept_kernel<<<static_cast<unsigned>(num_sequences), kBlockThreads,
                  static_cast<std::size_t>(max_nodes) * sizeof(std::int32_t), cuda_stream()>>>(
      arrays);
  check_launch("accept");
}

}  // namespace kdtree
