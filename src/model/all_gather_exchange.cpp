#include "model/all_gather_exchange.h"

#include "core/partition.h"

namespace kdtree {

namespace {

std::int64_t most_own_rows(const ExchangeSizes& sizes, int world_size) {
  return partition(sizes.max_rows, world_size, 0).size();
}

}  // namespace

AllGatherExchange::AllGatherExchange(Backend& backend, const ExchangeSizes& sizes,
                                     const RankGroups& groups)
    : rank_(groups.world().rank()),
      world_size_(groups.world().world_size()),
      local_(backend, sizes),
      own_y_(backend, backend.activation_dtype(),
             Shape{most_own_rows(sizes, world_size_), sizes.hidden_size}),
      own_rows_(static_cast<std::size_t>(world_size_)) {}

std::int64_t AllGatherExchange::bytes(const MemoryTraits& traits, const ExchangeSizes& sizes,
                                      int world_size) {
  return LocalExperts::bytes(traits, sizes) + most_own_rows(sizes, world_size) * sizes.hidden_size *
                                                  dtype_bytes(traits.activation_dtype());
}

void AllGatherExchange::forward(const ModelContext& context, const RoutedRows& rows,
                                const LayerExperts& experts, const TensorView& y) {
  mark(context, ExchangeMark::kBegin);
  mark(context, ExchangeMark::kDispatched);
  local_.forward(context.backend, rows, experts, y);
  mark(context, ExchangeMark::kComputed);
  for (int rank = 0; rank < world_size_; ++rank) {
    own_rows_[static_cast<std::size_t>(rank)] = partition(y.size(0), world_size_, rank).size();
  }
  const TensorView own_y = own_y_.rows(own_rows_[static_cast<std::size_t>(rank_)]);
  context.communicator.reduce_scatter_rows(y, own_y, own_rows_, context.backend.stream(),
                                           {.what = "scatter sums", .layer = experts.layer});
  context.communicator.all_gather_rows(own_y, y, own_rows_, context.backend.stream(),
                                       {.what = "gather rows", .layer = experts.layer});
  mark(context, ExchangeMark::kEnd);
}

}  // namespace kdtree
