// What follows from a router's choice besides the experts themselves: replicas and counts.
#include "kernels/cpu/cpu_backend.h"
#include "kernels/op_contract.h"
#include "kernels/replica_choice.h"

namespace kdtree {

void CpuBackend::choose_replicas(const ChooseReplicasParams& params) {
  const RoutedSizes sizes = check_choose_replicas(params);
  const auto* offsets = params.replica_offsets.data<std::int32_t>();
  const auto slots = params.physical_slots.span<std::int32_t>();
  for (std::int64_t row = 0; row < sizes.rows; ++row) {
    const auto* ids = params.expert_ids.row<std::int32_t>(row);
    auto* targets = params.targets.row<std::int32_t>(row);
    const std::uint32_t bits = row_bits(ids, sizes.k);
    for (std::int64_t i = 0; i < sizes.k; ++i) {
      const std::int32_t id = ids[i];
      if (id == -1) {
        targets[i] = -1;
        continue;
      }
      check(id >= 0 && id < sizes.num_experts, "expert id {} of {} experts", id, sizes.num_experts);
      const std::int32_t first = offsets[id];
      const std::int32_t count = offsets[id + 1] - first;
      check(count > 0, "expert {} has no replica", id);
      targets[i] = slots[static_cast<std::size_t>(first) +
                         choose_replica(bits, id, static_cast<std::uint32_t>(count))];
    }
  }
}

void CpuBackend::count_experts(const CountExpertsParams& params) {
  const RoutedSizes sizes = check_count_experts(params);
  const TreeBatch& batch = params.batch;
  auto* counts = params.counts.data<std::int64_t>();
  for (std::int64_t row = 0; row < sizes.rows; ++row) {
    if (batch.num_real_rows.raw() != nullptr) {
      const std::int32_t sequence = batch.sequence_index.data<std::int32_t>()[row];
      const std::int64_t place = row - batch.row_offsets.data<std::int32_t>()[sequence];
      if (place >= batch.num_real_rows.data<std::int32_t>()[sequence]) {
        continue;
      }
    }
    const auto* ids = params.expert_ids.row<std::int32_t>(row);
    for (std::int64_t i = 0; i < sizes.k; ++i) {
      check(ids[i] >= -1 && ids[i] < sizes.num_experts, "expert id {} of {} experts", ids[i],
            sizes.num_experts);
      if (ids[i] >= 0) {
        ++counts[ids[i]];
      }
    }
  }
}

}  // namespace kdtree
