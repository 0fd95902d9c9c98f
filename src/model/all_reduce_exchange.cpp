#include "model/all_reduce_exchange.h"

namespace kdtree {

AllReduceExchange::AllReduceExchange(Backend& backend, const ExchangeSizes& sizes)
    : experts_workspace_(backend, DType::kUInt8, Shape{experts_workspace_bytes(backend, sizes)}),
      shared_(backend, backend.activation_dtype(), Shape{sizes.max_rows, sizes.hidden_size}),
      mlp_workspace_(backend, sizes.shared_width, sizes.max_rows) {}

std::int64_t AllReduceExchange::bytes(const MemoryTraits& traits, const ExchangeSizes& sizes) {
  const DType dtype = traits.activation_dtype();
  return experts_workspace_bytes(traits, sizes) +
         sizes.max_rows * sizes.hidden_size * dtype_bytes(dtype) +
         MlpWorkspace::bytes(sizes.shared_width, sizes.max_rows, dtype);
}

void AllReduceExchange::forward(const ModelContext& context, const RoutedRows& rows,
                                const LayerExperts& experts, const TensorView& y) {
  context.backend.experts({.experts = experts.experts,
                           .x = rows.x,
                           .expert_ids = rows.targets,
                           .expert_weights = rows.expert_weights,
                           .logical_to_slot = experts.placement->slots_here(),
                           .output = y,
                           .workspace = experts_workspace_.view()});
  if (experts.shared != nullptr) {
    const TensorView shared = shared_.rows(rows.x.size(0));
    experts.shared->forward(context.backend, rows.x, mlp_workspace_, shared);
    context.backend.add(y, shared);
  }
  context.all_reduce_sum(y, {.what = "experts", .layer = experts.layer});
}

}  // namespace kdtree
