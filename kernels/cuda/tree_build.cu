// Best-first draft trees (DDTree's Algorithm 1): one block a sequence, one warp of it takes the
// nodes. The same trees as the CPU's, bit for bit.
#include <algorithm>

#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/shapes.h"

namespace kdtree {
namespace {

constexpr int kTreeThreads = 128;
constexpr int kWarpThreads = 32;
constexpr unsigned kAllLanes = 0xffffffffU;

struct TreeBuildArrays {
  const float* log_probs;  // [sequences * horizon, K]
  std::int64_t log_probs_stride;
  const std::int32_t* candidates;
  std::int64_t candidates_stride;
  const std::int32_t* roots;
  std::int32_t num_candidates;  // K
  std::int32_t horizon;
  std::int32_t budget;
  std::int32_t* num_nodes;
  std::int32_t* token_ids;
  std::int64_t tokens_stride;
  std::int32_t* parents;
  std::int64_t parents_stride;
  std::int32_t* depths;
  std::int64_t depths_stride;
};

// A place in the tree: taken (a node) or open (an entry).
struct Place {
  std::int32_t parent;  // node index
  std::int32_t rank;    // among the candidates of its depth
  std::int32_t depth;   // the root's children have 1
};

// The open entries and the nodes taken, in shared memory. A node taken leaves its entry to its next
// sibling, so that there are never more entries than nodes taken and one.
struct TreeMemory {
  double* log_weights;         // [budget + 2] of the path from the root to the entry
  double* parent_log_weights;  // [budget + 2] kept: a sibling's weight is one addition, never a
                               // difference
  std::uint64_t* keys;         // [budget + 2] ordered like log_weights; 0 = no entry
  Place* entries;              // [budget + 2]
  Place* nodes;                // [budget + 1], the root's is {-1, 0, 0}
  std::int32_t* num_usable;    // [horizon] candidates before the first one that is never taken

  __device__ TreeMemory(void* memory, int budget) {
    log_weights = static_cast<double*>(memory);
    parent_log_weights = log_weights + budget + 2;
    keys = reinterpret_cast<std::uint64_t*>(parent_log_weights + budget + 2);
    entries = reinterpret_cast<Place*>(keys + budget + 2);
    nodes = entries + budget + 2;
    num_usable = reinterpret_cast<std::int32_t*>(nodes + budget + 1);
  }
};

std::size_t tree_memory_bytes(std::int64_t budget, std::int64_t horizon) {
  return static_cast<std::size_t>((budget + 2) * (2 * sizeof(double) + sizeof(std::uint64_t)) +
                                  (2 * budget + 3) * sizeof(Place) +
                                  horizon * sizeof(std::int32_t));
}

// Unsigned order of the keys = order of the values. There are no NaNs and no -0.0: sums of the
// root's 0.0 and of values that are not -infinity.
__device__ std::uint64_t ordered_key(double value) {
  const auto bits = static_cast<std::uint64_t>(__double_as_longlong(value));
  return (bits >> 63) != 0 ? ~bits : bits | (std::uint64_t{1} << 63);
}

// Whether a's tuple of ranks from the root down is lexicographically smaller than b's; a and b are
// different entries. Both climb to where their paths meet.
__device__ bool has_smaller_tuple(const Place* nodes, Place a, Place b) {
  const std::int32_t depth_a = a.depth;
  const std::int32_t depth_b = b.depth;
  while (a.depth > b.depth) {
    a = nodes[a.parent];
  }
  while (b.depth > a.depth) {
    b = nodes[b.parent];
  }
  while (a.parent != b.parent) {
    a = nodes[a.parent];
    b = nodes[b.parent];
  }
  return a.rank != b.rank ? a.rank < b.rank : depth_a < depth_b;
}

// A lane's best entry, of those at places lane, lane + 32, ...
struct Best {
  std::uint64_t key = 0;
  std::int32_t entry = 0;
};

__device__ void improve(const TreeMemory& memory, std::int32_t entry, Best& best) {
  const std::uint64_t key = memory.keys[entry];
  if (key > best.key ||
      (key != 0 && key == best.key &&
       has_smaller_tuple(memory.nodes, memory.entries[entry], memory.entries[best.entry]))) {
    best = {key, entry};
  }
}

// The warp's best entry, in every lane.
__device__ Best warp_best(const TreeMemory& memory, const Best& own) {
  const auto high = static_cast<std::uint32_t>(own.key >> 32);
  const std::uint32_t best_high = __reduce_max_sync(kAllLanes, high);
  const auto low = high == best_high ? static_cast<std::uint32_t>(own.key) : 0U;
  const std::uint32_t best_low = __reduce_max_sync(kAllLanes, low);
  Best best;
  best.key = (std::uint64_t{best_high} << 32) | best_low;
  if (best.key == 0) {
    return best;
  }
  unsigned holders = __ballot_sync(kAllLanes, own.key == best.key);
  best.entry = __shfl_sync(kAllLanes, own.entry, __ffs(holders) - 1);
  holders &= holders - 1;
  while (holders != 0) {  // equally probable ones
    const std::int32_t other = __shfl_sync(kAllLanes, own.entry, __ffs(holders) - 1);
    holders &= holders - 1;
    if (has_smaller_tuple(memory.nodes, memory.entries[other], memory.entries[best.entry])) {
      best.entry = other;
    }
  }
  return best;
}

// Fills memory.nodes and returns their number; for one whole warp.
__device__ std::int32_t take_nodes(const TreeBuildArrays& arrays, const TreeMemory& memory,
                                   const float* log_probs) {
  const int lane = static_cast<int>(threadIdx.x);
  const auto exists = [&](const Place& place) {
    return place.depth <= arrays.horizon && place.rank < memory.num_usable[place.depth - 1];
  };
  const auto put = [&](std::int32_t entry, const Place& place, double parent_log_weight) {
    const float own = __ldg(log_probs + (place.depth - 1) * arrays.log_probs_stride + place.rank);
    const double log_weight = parent_log_weight + static_cast<double>(own);
    memory.log_weights[entry] = log_weight;
    memory.parent_log_weights[entry] = parent_log_weight;
    memory.entries[entry] = place;
    memory.keys[entry] = ordered_key(log_weight);
  };

  std::int32_t num_entries = 0;
  std::int32_t num_nodes = 1;
  const Place first = {0, 0, 1};
  if (lane == 0) {
    memory.nodes[0] = {-1, 0, 0};
  }
  if (exists(first)) {
    if (lane == 0) {
      put(0, first, 0.0);
    }
    num_entries = 1;
  }
  __syncwarp();
  Best own;
  if (lane < num_entries) {
    own = {memory.keys[lane], lane};
  }
  while (num_nodes <= arrays.budget) {
    const Best taken = warp_best(memory, own);
    if (taken.key == 0) {
      break;
    }
    const Place place = memory.entries[taken.entry];
    const double log_weight = memory.log_weights[taken.entry];
    const double parent_log_weight = memory.parent_log_weights[taken.entry];
    const std::int32_t node = num_nodes++;
    const Place sibling = {place.parent, place.rank + 1, place.depth};
    const Place child = {node, 0, place.depth + 1};
    const bool has_sibling = exists(sibling);
    const bool has_child = exists(child);
    const std::int32_t child_entry = has_sibling ? num_entries : taken.entry;
    __syncwarp();  // all have read the entry
    if (lane == 0) {
      memory.nodes[node] = place;
      if (has_sibling) {
        put(taken.entry, sibling, parent_log_weight);
      } else if (!has_child) {
        memory.keys[taken.entry] = 0;
      }
    }
    if (lane == 1 && has_child) {
      put(child_entry, child, log_weight);
    }
    num_entries += has_sibling && has_child ? 1 : 0;
    __syncwarp();
    // The lane that had the best looks through its entries again; a new entry is one more for its
    // lane.
    if (taken.entry % kWarpThreads == lane) {
      own = Best{};
      for (std::int32_t entry = lane; entry < num_entries; entry += kWarpThreads) {
        improve(memory, entry, own);
      }
    } else if (has_sibling && has_child && child_entry % kWarpThreads == lane) {
      improve(memory, child_entry, own);
    }
    __syncwarp();
  }
  return num_nodes;
}

__global__ void __launch_bounds__(kTreeThreads) build_trees_kernel(TreeBuildArrays arrays) {
  extern __shared__ double tree_memory[];
  __shared__ std::int32_t shared_num_nodes;
  const TreeMemory memory(tree_memory, arrays.budget);
  const std::int64_t sequence = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const float* log_probs = arrays.log_probs + sequence * arrays.horizon * arrays.log_probs_stride;
  const std::int32_t* candidates =
      arrays.candidates + sequence * arrays.horizon * arrays.candidates_stride;

  for (int depth = warp; depth < arrays.horizon; depth += kTreeThreads / kWarpThreads) {
    std::int32_t usable = arrays.num_candidates;
    for (std::int32_t i = 0; i < arrays.num_candidates; i += kWarpThreads) {
      const std::int32_t c = i + lane;
      const bool bad = c < arrays.num_candidates &&
                       !(candidates[depth * arrays.candidates_stride + c] >= 0 &&
                         log_probs[depth * arrays.log_probs_stride + c] > -INFINITY);  // nor NaN
      const unsigned bad_lanes = __ballot_sync(kAllLanes, bad);
      if (bad_lanes != 0) {
        usable = i + __ffs(static_cast<int>(bad_lanes)) - 1;
        break;
      }
    }
    if (lane == 0) {
      memory.num_usable[depth] = usable;
    }
  }
  __syncthreads();
  if (warp == 0) {
    const std::int32_t taken = take_nodes(arrays, memory, log_probs);
    if (lane == 0) {
      shared_num_nodes = taken;
    }
  }
  __syncthreads();
  const std::int32_t num_nodes = shared_num_nodes;
  if (threadIdx.x == 0) {
    arrays.num_nodes[sequence] = num_nodes;
  }
  for (int node = static_cast<int>(threadIdx.x); node < num_nodes; node += kTreeThreads) {
    const Place place = memory.nodes[node];
    arrays.token_ids[sequence * arrays.tokens_stride + node] =
        node == 0 ? arrays.roots[sequence]
                  : candidates[(place.depth - 1) * arrays.candidates_stride + place.rank];
    arrays.parents[sequence * arrays.parents_stride + node] = place.parent;
    arrays.depths[sequence * arrays.depths_stride + node] = place.depth;
  }
}

}  // namespace

void CudaBackend::build_trees(const TreeBuildParams& params) {
  check(params.roots.shape().rank() == 1, "roots has {} dimensions, expected 1",
        params.roots.shape().rank());
  const std::int64_t num_sequences = params.roots.size(0);
  check(params.draft_horizon >= 0 && params.tree_budget >= 0, "draft_horizon {} and tree_budget {}",
        params.draft_horizon, params.tree_budget);
  // Bounds of the shared memory: 63 slots and 512 nodes are what a drafter needs.
  constexpr std::int64_t kMostNodes = 768;
  constexpr std::int64_t kLongestHorizon = 1024;
  check(params.tree_budget <= kMostNodes && params.draft_horizon <= kLongestHorizon,
        "draft_horizon {} and tree_budget {}, at most {} and {} are supported",
        params.draft_horizon, params.tree_budget, kLongestHorizon, kMostNodes);
  expect_matrix("log_probs", params.log_probs, DType::kFloat32);
  const Shape shape{num_sequences * params.draft_horizon, params.log_probs.size(1)};
  expect_tensor("log_probs [sequences * draft_horizon, K]", params.log_probs, DType::kFloat32,
                shape);
  expect_tensor("candidates [sequences * draft_horizon, K]", params.candidates, DType::kInt32,
                shape);
  const std::int64_t max_nodes = check_trees(params.trees, num_sequences);
  check(params.tree_budget + 1 <= max_nodes,
        "trees of {} nodes and the root do not fit max_nodes {}", params.tree_budget, max_nodes);
  check(shape[1] <= 0x7fffffff, "{} candidates a slot", shape[1]);
  const TreeBuildArrays arrays = {
      .log_probs = params.log_probs.data<float>(),
      .log_probs_stride = params.log_probs.row_stride(),
      .candidates = params.candidates.data<std::int32_t>(),
      .candidates_stride = params.candidates.row_stride(),
      .roots = device_indices("roots", params.roots, num_sequences),
      .num_candidates = static_cast<std::int32_t>(shape[1]),
      .horizon = static_cast<std::int32_t>(params.draft_horizon),
      .budget = static_cast<std::int32_t>(params.tree_budget),
      .num_nodes = device_indices("num_nodes", params.trees.num_nodes, num_sequences),
      .token_ids = params.trees.token_ids.data<std::int32_t>(),
      .tokens_stride = params.trees.token_ids.row_stride(),
      .parents = params.trees.parents.data<std::int32_t>(),
      .parents_stride = params.trees.parents.row_stride(),
      .depths = params.trees.depths.data<std::int32_t>(),
      .depths_stride = params.trees.depths.row_stride(),
  };
  if (num_sequences == 0) {
    return;
  }
  build_trees_kernel<<<static_cast<unsigned>(num_sequences), kTreeThreads,
                       tree_memory_bytes(params.tree_budget, params.draft_horizon),
                       cuda_stream()>>>(arrays);
  check_launch("build_trees");
}

}  // namespace kdtree
