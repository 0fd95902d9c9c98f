// Which rows go to which rank, and the messages that carry them.
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/row_copy.h"
#include "kernels/op_contract.h"

namespace kdtree {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kWarpThreads = 32;
constexpr unsigned kAllLanes = 0xffffffffU;
constexpr std::int64_t kMostRanks = 4096;  // whose offsets fit the shared memory of a block

struct PlanArrays {
  const std::int32_t* ids;
  std::int64_t ids_stride;
  std::int64_t k;
  std::int64_t rows;
  const std::int32_t* rank_of;
  std::int64_t num_experts;
  std::int64_t num_ranks;
  std::int64_t places_a_rank;
  std::int64_t places;
  std::int32_t* row_indices;
  std::int64_t* counts;
};

__device__ bool row_needs(const PlanArrays& arrays, std::int64_t row, std::int64_t rank) {
  const std::int32_t* ids = arrays.ids + row * arrays.ids_stride;
  bool needed = false;
  for (std::int64_t i = 0; i < arrays.k; ++i) {
    const std::int32_t id = ids[i];
    needed = needed || (id >= 0 && id < arrays.num_experts && arrays.rank_of[id] == rank);
  }
  return needed;
}

// One block; a warp walks over all rows for a rank, 32 at a time, so that rows stay in order.
__global__ void __launch_bounds__(kPlanThreads) plan_dispatch_kernel(PlanArrays arrays) {
  extern __shared__ std::int64_t first_place[];  // [ranks]
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  constexpr int kWarps = kPlanThreads / kWarpThreads;

  for (std::int64_t p = threadIdx.x; p < arrays.places; p += kPlanThreads) {
    arrays.row_indices[p] = -1;
  }
  for (std::int64_t rank = warp; rank < arrays.num_ranks; rank += kWarps) {
    std::int64_t count = 0;
    for (std::int64_t base = 0; base < arrays.rows; base += kWarpThreads) {
      const std::int64_t row = base + lane;
      const bool needed = row < arrays.rows && row_needs(arrays, row, rank);
      count += __popc(__ballot_sync(kAllLanes, needed));
    }
    if (lane == 0) {
      arrays.counts[rank] = count;
      first_place[rank] = count;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    std::int64_t place = 0;
    for (std::int64_t rank = 0; rank < arrays.num_ranks; ++rank) {
      const std::int64_t count = first_place[rank];
      first_place[rank] = arrays.places_a_rank > 0 ? rank * arrays.places_a_rank : place;
      place += count;
    }
  }
  __syncthreads();
  for (std::int64_t rank = warp; rank < arrays.num_ranks; rank += kWarps) {
    std::int64_t place = first_place[rank];
    for (std::int64_t base = 0; base < arrays.rows; base += kWarpThreads) {
      const std::int64_t row = base + lane;
      const bool needed = row < arrays.rows && row_needs(arrays, row, rank);
      const unsigned lanes = __ballot_sync(kAllLanes, needed);
      if (needed) {
        arrays.row_indices[place + __popc(lanes & ((1U << lane) - 1))] =
            static_cast<std::int32_t>(row);
      }
      place += __popc(lanes);
    }
  }
}

struct PackArrays {
  const std::byte* x;
  std::int64_t x_stride_bytes;
  std::int64_t x_bytes;
  const std::int32_t* ids;
  std::int64_t ids_stride;
  const float* weights;
  std::int64_t weights_stride;
  std::int64_t k;
  std::int64_t rows;
  const std::int32_t* row_indices;
  std::byte* messages;
  DispatchMessage message;
};

template <class Unit>
__global__ void __launch_bounds__(kBlockThreads) pack_dispatch_kernel(PackArrays arrays) {
  const std::int64_t place = blockIdx.x;
  const std::int64_t row = arrays.row_indices[place];
  const bool empty = row < 0 || row >= arrays.rows;
  std::byte* message = arrays.messages + place * arrays.message.bytes;
  constexpr std::int64_t kUnit = sizeof(Unit);
  const auto* from =
      reinterpret_cast<const Unit*>(arrays.x + (empty ? 0 : row) * arrays.x_stride_bytes);
  auto* to = reinterpret_cast<Unit*>(message);
  const std::int64_t x_units = arrays.x_bytes / kUnit;
  for_columns(arrays.message.ids_offset / kUnit,
              [&](std::int64_t c) { to[c] = empty || c >= x_units ? Unit{} : from[c]; });
  if (blockIdx.y == 0) {
    auto* ids = reinterpret_cast<std::int32_t*>(message + arrays.message.ids_offset);
    auto* weights = reinterpret_cast<float*>(message + arrays.message.weights_offset);
    const std::int64_t words = (arrays.message.weights_offset - arrays.message.ids_offset) / 4;
    for (std::int64_t i = threadIdx.x; i < words; i += kBlockThreads) {
      const bool padding = i >= arrays.k;  // up to the next boundary
      ids[i] = padding ? 0 : empty ? -1 : arrays.ids[row * arrays.ids_stride + i];
      weights[i] = padding || empty ? 0.0F : arrays.weights[row * arrays.weights_stride + i];
    }
  }
}

}  // namespace

void CudaBackend::plan_dispatch(const DispatchPlanParams& params) {
  const DispatchPlanSizes sizes = check_dispatch_plan(params);
  check(sizes.num_ranks <= kMostRanks, "dispatch to {} ranks, at most {} are supported",
        sizes.num_ranks, kMostRanks);
  if (sizes.num_ranks == 0) {
    return;
  }
  const PlanArrays arrays = {.ids = params.expert_ids.data<std::int32_t>(),
                             .ids_stride = params.expert_ids.row_stride(),
                             .k = sizes.k,
                             .rows = sizes.rows,
                             .rank_of = params.rank_of.data<std::int32_t>(),
                             .num_experts = sizes.num_experts,
                             .num_ranks = sizes.num_ranks,
                             .places_a_rank = params.places_a_rank,
                             .places = sizes.places,
                             .row_indices = params.row_indices.data<std::int32_t>(),
                             .counts = params.counts.data<std::int64_t>()};
  plan_dispatch_kernel<<<1, kPlanThreads,
                         static_cast<std::size_t>(sizes.num_ranks) * sizeof(std::int64_t),
                         cuda_stream()>>>(arrays);
  check_launch("plan_dispatch");
}

void CudaBackend::pack_dispatch(const PackDispatchParams& params) {
  const PackDispatchSizes sizes = check_pack_dispatch(params, activation_dtype());
  if (sizes.places == 0) {
    return;
  }
  const std::int64_t element = dtype_bytes(activation_dtype());
  const PackArrays arrays = {.x = static_cast<const std::byte*>(params.x.raw()),
                             .x_stride_bytes = params.x.row_stride() * element,
                             .x_bytes = sizes.hidden * element,
                             .ids = params.expert_ids.data<std::int32_t>(),
                             .ids_stride = params.expert_ids.row_stride(),
                             .weights = params.expert_weights.data<float>(),
                             .weights_stride = params.expert_weights.row_stride(),
                             .k = sizes.k,
                             .rows = sizes.rows,
                             .row_indices = params.row_indices.data<std::int32_t>(),
                             .messages = static_cast<std::byte*>(params.messages.raw()),
                             .message = sizes.message};
  const int unit =
      copy_unit_bytes(arrays.x, arrays.messages, {arrays.x_stride_bytes, arrays.x_bytes});
  with_copy_unit(unit, [&](auto type) {
    using Unit = decltype(type);
    pack_dispatch_kernel<Unit>
        <<<row_grid(sizes.places, arrays.x_bytes / unit), kBlockThreads, 0, cuda_stream()>>>(
            arrays);
  });
  check_launch("pack_dispatch");
}

}  // namespace kdtree
