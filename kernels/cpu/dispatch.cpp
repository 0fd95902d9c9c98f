// Which rows go to which rank, and the messages that carry them.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel.h"
#include "kernels/op_contract.h"

namespace kdtree {

void CpuBackend::plan_dispatch(const DispatchPlanParams& params) {
  const DispatchPlanSizes sizes = check_dispatch_plan(params);
  const auto* rank_of = params.rank_of.data<std::int32_t>();
  auto* indices = params.row_indices.data<std::int32_t>();
  auto* counts = params.counts.data<std::int64_t>();
  std::fill(indices, indices + sizes.places, -1);
  std::int64_t place = 0;
  for (std::int64_t rank = 0; rank < sizes.num_ranks; ++rank) {
    if (params.places_a_rank > 0) {
      place = rank * params.places_a_rank;
    }
    const std::int64_t begin = place;
    for (std::int64_t row = 0; row < sizes.rows; ++row) {
      const auto* ids = params.expert_ids.row<std::int32_t>(row);
      const bool needed = std::any_of(ids, ids + sizes.k, [&](std::int32_t id) {
        return id >= 0 && id < sizes.num_experts && rank_of[id] == rank;
      });
      if (needed) {
        indices[place++] = static_cast<std::int32_t>(row);
      }
    }
    counts[rank] = place - begin;
  }
}

void CpuBackend::pack_dispatch(const PackDispatchParams& params) {
  const PackDispatchSizes sizes = check_pack_dispatch(params, activation_dtype());
  const auto* indices = params.row_indices.data<std::int32_t>();
  for (std::int64_t place = 0; place < sizes.places; ++place) {
    check(indices[place] < sizes.rows, "dispatch place {} names row {} of {}", place,
          indices[place], sizes.rows);
  }
  const auto hidden_bytes = static_cast<std::size_t>(sizes.hidden) * sizeof(float);
  const auto routing_bytes = static_cast<std::size_t>(sizes.k) * sizeof(std::int32_t);
  const auto pack = [&](std::int64_t place) {
    auto* message = static_cast<std::byte*>(params.messages.raw()) + place * sizes.message.bytes;
    std::memset(message, 0, static_cast<std::size_t>(sizes.message.bytes));
    const std::int64_t row = indices[place];
    if (row < 0) {
      std::memset(message + sizes.message.ids_offset, 0xff, routing_bytes);  // -1 each
      return;
    }
    if (sizes.hidden > 0) {
      std::memcpy(message, params.x.row<float>(row), hidden_bytes);
    }
    if (sizes.k > 0) {
      std::memcpy(message + sizes.message.ids_offset, params.expert_ids.row<std::int32_t>(row),
                  routing_bytes);
      std::memcpy(message + sizes.message.weights_offset, params.expert_weights.row<float>(row),
                  routing_bytes);
    }
  };
  parallel_for(num_threads_, {sizes.places, sizes.places * sizes.hidden},
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t place = begin; place < end; ++place) {
                   pack(place);
                 }
               });
}

}  // namespace kdtree
