#include "model/all_to_all_exchange.h"

#include <algorithm>
#include <numeric>

namespace kdtree {

namespace {

struct RowLimits {
  std::int64_t own = 0;       // rows that a rank owns
  std::int64_t sent = 0;      // own rows, each to at most min(k, ranks) ranks
  std::int64_t received = 0;  // every row may come here
};

RowLimits row_limits(const ExchangeSizes& sizes, int world_size) {
  RowLimits limits;
  limits.own = (sizes.max_rows + world_size - 1) / world_size;
  limits.sent = limits.own * std::min<std::int64_t>(sizes.num_experts_per_tok, world_size);
  limits.received = sizes.max_rows;
  return limits;
}

std::int64_t workspace_bytes(const Backend& backend, const ExchangeSizes& sizes) {
  return backend.experts_workspace_bytes(sizes.max_rows, sizes.num_experts_per_tok,
                                         sizes.hidden_size, sizes.moe_intermediate_size);
}

}  // namespace

AllToAllExchange::AllToAllExchange(Backend& backend, const ExpertPlacement& placement,
                                   const ExchangeSizes& sizes, const Communicator& communicator)
    : placement_(placement),
      rank_(communicator.rank()),
      world_size_(communicator.world_size()),
      logical_to_slot_(backend, std::span<const std::int32_t>(placement.logical_to_slot(rank_))) {
  const RowLimits limits = row_limits(sizes, world_size_);
  const DType dtype = backend.activation_dtype();
  const std::int64_t k = sizes.num_experts_per_tok;
  sent_x_ = DeviceTensor(backend, dtype, Shape{limits.sent, sizes.hidden_size});
  sent_ids_ = DeviceTensor(backend, DType::kInt32, Shape{limits.sent, k});
  sent_weights_ = DeviceTensor(backend, DType::kFloat32, Shape{limits.sent, k});
  received_x_ = DeviceTensor(backend, dtype, Shape{limits.received, sizes.hidden_size});
  received_ids_ = DeviceTensor(backend, DType::kInt32, Shape{limits.received, k});
  received_weights_ = DeviceTensor(backend, DType::kFloat32, Shape{limits.received, k});
  computed_ = DeviceTensor(backend, dtype, Shape{limits.received, sizes.hidden_size});
  own_y_ = DeviceTensor(backend, dtype, Shape{limits.own, sizes.hidden_size});
  row_indices_ = DeviceTensor(backend, DType::kInt32, Shape{limits.sent});
  counts_ = DeviceTensor(backend, DType::kInt64, Shape{world_size_, world_size_});
  experts_workspace_ = DeviceTensor(backend, DType::kUInt8, Shape{workspace_bytes(backend, sizes)});
  mlp_workspace_ = MlpWorkspace(backend, sizes.shared_width, limits.own);

  const auto ranks = static_cast<std::size_t>(world_size_);
  host_ids_.reserve(static_cast<std::size_t>(sizes.max_rows * k));
  sent_rows_.reserve(static_cast<std::size_t>(limits.sent));
  local_rows_.reserve(static_cast<std::size_t>(limits.sent));
  all_counts_.resize(ranks * ranks);
  rows_to_.resize(ranks);
  rows_from_.resize(ranks);
  own_counts_.resize(ranks);
}

std::int64_t AllToAllExchange::bytes(const Backend& backend, const ExchangeSizes& sizes,
                                     int world_size) {
  const RowLimits limits = row_limits(sizes, world_size);
  const std::int64_t activation = sizes.hidden_size * dtype_bytes(backend.activation_dtype());
  const std::int64_t routing =
      sizes.num_experts_per_tok * (dtype_bytes(DType::kInt32) + dtype_bytes(DType::kFloat32));
  return limits.sent * (activation + routing) + limits.received * (2 * activation + routing) +
         limits.own * activation + workspace_bytes(backend, sizes) +
         MlpWorkspace::bytes(sizes.shared_width, limits.own, backend.activation_dtype());
}

std::int64_t AllToAllExchange::received_rows() const {
  return std::accumulate(rows_from_.begin(), rows_from_.end(), std::int64_t{0});
}

void AllToAllExchange::plan_dispatch(const ModelContext& context, const RoutedRows& rows,
                                     const Range& own, std::int64_t layer) {
  Backend& backend = context.backend;
  const std::int64_t k = rows.expert_ids.size(1);
  host_ids_.resize(static_cast<std::size_t>(rows.expert_ids.num_elements()));
  backend.download(host_ids_.data(), rows.expert_ids.raw(), rows.expert_ids.bytes());
  backend.synchronize();
  sent_rows_.clear();
  local_rows_.clear();
  for (int target = 0; target < world_size_; ++target) {
    const std::size_t before = sent_rows_.size();
    for (std::int64_t row = own.begin; row < own.end; ++row) {
      const auto* ids = host_ids_.data() + row * k;
      const bool needed = std::any_of(ids, ids + k, [&](std::int32_t expert) {
        return expert >= 0 && placement_.rank_of(expert) == target;
      });
      if (needed) {
        sent_rows_.push_back(static_cast<std::int32_t>(row));
        local_rows_.push_back(static_cast<std::int32_t>(row - own.begin));
      }
    }
    rows_to_[static_cast<std::size_t>(target)] =
        static_cast<std::int64_t>(sent_rows_.size() - before);
  }
  const TensorView own_row = counts_.view().rows(rank_, 1);
  backend.upload(own_row.raw(), rows_to_.data(), own_row.bytes());
  context.communicator.all_gather(own_row, counts_.view(), backend.stream(),
                                  {.what = "dispatch counts", .layer = layer});
  counts_.download(backend, std::span(all_counts_));
  backend.synchronize();
  for (std::size_t source = 0; source < rows_from_.size(); ++source) {
    rows_from_[source] = all_counts_[source * rows_from_.size() + static_cast<std::size_t>(rank_)];
  }
  row_indices_.upload(backend, std::span<const std::int32_t>(sent_rows_));
}

TensorView AllToAllExchange::dispatch(const ModelContext& context, const ConstTensorView& source,
                                      const DeviceTensor& sent, const DeviceTensor& received,
                                      CollectiveLabel label) {
  const auto num_sent = static_cast<std::int64_t>(sent_rows_.size());
  const TensorView to_send = sent.rows(num_sent);
  const TensorView arrived = received.rows(received_rows());
  context.backend.gather_rows(source, row_indices_.rows(num_sent), to_send);
  context.communicator.all_to_all(to_send, arrived, {.rows_to = rows_to_, .rows_from = rows_from_},
                                  context.backend.stream(), label);
  return arrived;
}

void AllToAllExchange::forward(const ModelContext& context, const RoutedRows& rows,
                               const LayerExperts& experts, const TensorView& y) {
  Backend& backend = context.backend;
  const std::int64_t num_rows = rows.x.size(0);
  const Range own = partition(num_rows, world_size_, rank_);
  const std::int64_t layer = experts.layer;
  plan_dispatch(context, rows, own, layer);
  const TensorView x =
      dispatch(context, rows.x, sent_x_, received_x_, {.what = "dispatch rows", .layer = layer});
  const TensorView ids = dispatch(context, rows.expert_ids, sent_ids_, received_ids_,
                                  {.what = "dispatch experts", .layer = layer});
  const TensorView weights =
      dispatch(context, rows.expert_weights, sent_weights_, received_weights_,
               {.what = "dispatch weights", .layer = layer});

  const TensorView computed = computed_.rows(received_rows());
  backend.experts({.experts = experts.experts,
                   .x = x,
                   .expert_ids = ids,
                   .expert_weights = weights,
                   .logical_to_slot = logical_to_slot_.view(),
                   .output = computed,
                   .workspace = experts_workspace_.view()});

  // Combine: the way back, then each own row adds what its ranks computed, in rank order, onto its
  // shared experts.
  const TensorView returned = sent_x_.rows(static_cast<std::int64_t>(sent_rows_.size()));
  context.communicator.all_to_all(computed, returned,
                                  {.rows_to = rows_from_, .rows_from = rows_to_}, backend.stream(),
                                  {.what = "combine", .layer = layer});
  const TensorView own_y = own_y_.rows(own.size());
  if (experts.shared != nullptr) {
    experts.shared->forward(backend, rows.x.rows(own.begin, own.size()), mlp_workspace_, own_y);
  } else {
    backend.fill_zero(own_y);
  }
  row_indices_.upload(backend, std::span<const std::int32_t>(local_rows_));
  backend.add_rows(returned, row_indices_.rows(static_cast<std::int64_t>(local_rows_.size())),
                   own_y);

  for (int rank = 0; rank < world_size_; ++rank) {
    own_counts_[static_cast<std::size_t>(rank)] = partition(num_rows, world_size_, rank).size();
  }
  context.communicator.all_gather_rows(own_y, y, own_counts_, backend.stream(),
                                       {.what = "gather rows", .layer = layer});
}

}  // namespace kdtree
