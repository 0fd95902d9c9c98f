#include "model/all_reduce_exchange.h"

namespace kdtree {

LocalExperts::LocalExperts(Backend& backend, const ExchangeSizes& sizes)
    : experts_workspace_(backend, DType::kUInt8, Shape{experts_workspace_bytes(backend, sizes)}),
      shared_(backend, backend.activation_dtype(), Shape{sizes.max_rows, sizes.hidden_size}),
      mlp_workspace_(backend, sizes.shared_width, sizes.max_rows) {}

std::int64_t LocalExperts::bytes(const MemoryTraits& traits, const ExchangeSizes& sizes) {
  const DType dtype = traits.activation_dtype();
  return experts_workspace_bytes(traits, sizes) +
         sizes.max_rows * sizes.hidden_size * dtype_bytes(dtype) +
         MlpWorkspace::bytes(sizes.shared_width, sizes.max_rows, dtype);
}

void LocalExperts::forward(Backend& backend, const RoutedRows& rows, const LayerExperts& experts,
                           const TensorView& y) {
  backend.experts({.experts = experts.experts,
                   .x = rows.x,
                   .expert_ids = rows.targets,
                   .expert_weights = rows.expert_weights,
                   .logical_to_slot = experts.placement->slots_here(),
                   .output = y,
                   .workspace = experts_workspace_.view()});
  if (experts.shared != nullptr) {
    const TensorView shared = shared_.rows(rows.x.size(0));
    experts.shared->forward(backend, rows.x, mlp_workspace_, shared);
    backend.add(y, shared);
  }
}

void AllReduceExchange::forward(const ModelContext& context, const RoutedRows& rows,
                                const LayerExperts& experts, const TensorView& y) {
  mark(context, ExchangeMark::kBegin);
  mark(context, ExchangeMark::kDispatched);
  local_.forward(context.backend, rows, experts, y);
  mark(context, ExchangeMark::kComputed);
  context.all_reduce_sum(y, {.what = "experts", .layer = experts.layer});
  mark(context, ExchangeMark::kEnd);
}

}  // namespace kdtree
