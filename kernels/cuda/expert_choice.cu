// What follows from a router's choice besides the experts themselves: replicas and counts.
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/elements.h"
#include "kernels/op_contract.h"
#include "kernels/replica_choice.h"

namespace kdtree {
namespace {

struct IdRows {
  const std::int32_t* data;  // [rows, k]
  std::int64_t stride;
  std::int64_t rows;
  std::int64_t k;
  std::int64_t num_experts;
};

IdRows id_rows(const ConstTensorView& ids, const RoutedSizes& sizes) {
  return {.data = ids.data<std::int32_t>(),
          .stride = ids.row_stride(),
          .rows = sizes.rows,
          .k = sizes.k,
          .num_experts = sizes.num_experts};
}

unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>((threads + kBlockThreads - 1) / kBlockThreads);
}

// A thread a row: k is small, and the bits are of the whole row.
__global__ void __launch_bounds__(kBlockThreads)
    choose_replicas_kernel(IdRows ids, const std::int32_t* offsets, const std::int32_t* slots,
                           std::int64_t num_slots, std::int32_t* targets,
                           std::int64_t targets_stride) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
  if (row >= ids.rows) {
    return;
  }
  const std::int32_t* own = ids.data + row * ids.stride;
  const std::uint32_t bits = row_bits(own, ids.k);
  for (std::int64_t i = 0; i < ids.k; ++i) {
    const std::int32_t id = own[i];
    std::int32_t target = -1;
    if (id >= 0 && id < ids.num_experts) {
      const std::int32_t first = offsets[id];
      const std::int32_t count = offsets[id + 1] - first;
      if (first >= 0 && count > 0 && std::int64_t{first} + count <= num_slots) {
        target = slots[first + choose_replica(bits, id, static_cast<std::uint32_t>(count))];
      }
    }
    targets[row * targets_stride + i] = target;
  }
}

struct RealRows {
  const std::int32_t* num_real_rows;   // [sequences], or nullptr: all rows are real
  const std::int32_t* sequence_index;  // [rows]
  const std::int32_t* row_offsets;     // [sequences + 1]
};

__global__ void __launch_bounds__(kBlockThreads)
    count_experts_kernel(IdRows ids, RealRows real, unsigned long long* counts) {
  const std::int64_t pair = std::int64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
  if (pair >= ids.rows * ids.k) {
    return;
  }
  const std::int64_t row = pair / ids.k;
  if (real.num_real_rows != nullptr) {
    const std::int32_t sequence = real.sequence_index[row];
    if (row - real.row_offsets[sequence] >= real.num_real_rows[sequence]) {
      return;
    }
  }
  const std::int32_t id = ids.data[row * ids.stride + pair % ids.k];
  if (id >= 0 && id < ids.num_experts) {
    atomicAdd(counts + id, 1ULL);  // whole numbers: the order does not matter
  }
}

}  // namespace

void CudaBackend::choose_replicas(const ChooseReplicasParams& params) {
  const RoutedSizes sizes = check_choose_replicas(params);
  if (sizes.rows == 0) {
    return;
  }
  choose_replicas_kernel<<<blocks_for(sizes.rows), kBlockThreads, 0, cuda_stream()>>>(
      id_rows(params.expert_ids, sizes), params.replica_offsets.data<std::int32_t>(),
      params.physical_slots.data<std::int32_t>(), params.physical_slots.size(0),
      params.targets.data<std::int32_t>(), params.targets.row_stride());
  check_launch("choose_replicas");
}

void CudaBackend::count_experts(const CountExpertsParams& params) {
  const RoutedSizes sizes = check_count_experts(params);
  if (sizes.rows == 0 || sizes.k == 0) {
    return;
  }
  static_assert(sizeof(unsigned long long) == sizeof(std::int64_t));
  const TreeBatch& batch = params.batch;
  const bool padded = batch.num_real_rows.raw() != nullptr;
  const RealRows real = {
      .num_real_rows = padded ? batch.num_real_rows.data<std::int32_t>() : nullptr,
      .sequence_index = padded ? batch.sequence_index.data<std::int32_t>() : nullptr,
      .row_offsets = padded ? batch.row_offsets.data<std::int32_t>() : nullptr};
  count_experts_kernel<<<blocks_for(sizes.rows * sizes.k), kBlockThreads, 0, cuda_stream()>>>(
      id_rows(params.expert_ids, sizes), real,
      reinterpret_cast<unsigned long long*>(params.counts.data<std::int64_t>()));
  check_launch("count_experts");
}

}  // namespace kdtree
