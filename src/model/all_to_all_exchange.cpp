#include "model/all_to_all_exchange.h"

#include <algorithm>
#include <numeric>

namespace kdtree {

namespace {

// How the expert groups own rows.
struct Owners {
  int num_ranks = 1;  // expert groups
  bool by_group = false;
  int num_owners = 1;  // that share rows with this one
};

Owners owners_of(const ParallelGrid& grid, int world_size) {
  const bool nested = grid.attention_tp(world_size) % grid.moe_tp == 0;
  const int ranks = grid.moe_ep(world_size);
  const bool by_group = nested && grid.attention_dp > 1;
  return {.num_ranks = ranks,
          .by_group = by_group,
          .num_owners = by_group ? ranks / grid.attention_dp : ranks};
}

struct RowLimits {
  std::int64_t own = 0;       // rows that a rank owns
  std::int64_t sent = 0;      // messages to all ranks: own rows, each to every rank at most
  std::int64_t received = 0;  // every row may come here
};

RowLimits row_limits(const ExchangeSizes& sizes, const Owners& owners) {
  const std::int64_t divided = owners.by_group ? sizes.max_group_rows : sizes.max_rows;
  RowLimits limits;
  limits.own = (divided + owners.num_owners - 1) / owners.num_owners;
  limits.sent = limits.own * owners.num_ranks;
  limits.received = sizes.max_rows;
  return limits;
}

DispatchMessage message_of(const MemoryTraits& traits, const ExchangeSizes& sizes) {
  return dispatch_message(sizes.hidden_size, sizes.num_experts_per_tok, traits.activation_dtype());
}

std::int64_t sum(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

// A part of each message as the rows of a matrix.
TensorView part_of(const TensorView& messages, std::int64_t offset, DType dtype,
                   std::int64_t cols) {
  return {messages.data<std::uint8_t>() + offset, dtype, Shape{messages.size(0), cols},
          messages.row_stride() / dtype_bytes(dtype)};
}

}  // namespace

AllToAllExchange::AllToAllExchange(Backend& backend, const ExchangeSizes& sizes,
                                   const RankGroups& groups)
    : rank_(groups.expert_group()),
      num_ranks_(groups.moe_ep()),
      sliced_(groups.grid().moe_tp > 1),
      fixed_counts_(sizes.fixed_counts),
      message_(message_of(backend, sizes)) {
  const Owners owners = owners_of(groups.grid(), groups.world().world_size());
  num_owners_ = owners.num_owners;
  by_group_ = owners.by_group;
  const RowLimits limits = row_limits(sizes, owners);
  const DType dtype = backend.activation_dtype();
  sent_ = DeviceTensor(backend, DType::kUInt8, Shape{limits.sent, message_.bytes});
  received_ = DeviceTensor(backend, DType::kUInt8, Shape{limits.received, message_.bytes});
  computed_ = DeviceTensor(backend, dtype, Shape{limits.received, sizes.hidden_size});
  returned_ = DeviceTensor(backend, dtype, Shape{limits.sent, sizes.hidden_size});
  own_y_ = DeviceTensor(backend, dtype, Shape{limits.own, sizes.hidden_size});
  row_indices_ = DeviceTensor(backend, DType::kInt32, Shape{limits.sent});
  own_counts_ = DeviceTensor(backend, DType::kInt64, Shape{num_ranks_});
  counts_ = DeviceTensor(backend, DType::kInt64, Shape{num_ranks_, num_ranks_});
  experts_workspace_ =
      DeviceTensor(backend, DType::kUInt8, Shape{experts_workspace_bytes(backend, sizes)});
  mlp_workspace_ = MlpWorkspace(backend, sizes.shared_width, limits.own);

  const auto ranks = static_cast<std::size_t>(num_ranks_);
  all_counts_.resize(ranks * ranks);
  rows_to_.resize(ranks);
  rows_from_.resize(ranks);
  own_rows_.resize(ranks);
}

std::int64_t AllToAllExchange::bytes(const MemoryTraits& traits, const ExchangeSizes& sizes,
                                     int world_size) {
  const Owners owners = owners_of(sizes.grid, world_size);
  const RowLimits limits = row_limits(sizes, owners);
  const DType dtype = traits.activation_dtype();
  const std::int64_t activation = sizes.hidden_size * dtype_bytes(dtype);
  const std::int64_t ranks = owners.num_ranks;
  // row_indices_; own_counts_ and counts_.
  const std::int64_t indices = limits.sent * 4;
  const std::int64_t counts = ranks * (1 + ranks) * 8;
  return (limits.sent + limits.received) * (message_of(traits, sizes).bytes + activation) +
         limits.own * activation + indices + counts + experts_workspace_bytes(traits, sizes) +
         MlpWorkspace::bytes(sizes.shared_width, limits.own, dtype);
}

void AllToAllExchange::plan(const ModelContext& context, const RoutedRows& own,
                            const LayerExperts& experts) {
  Backend& backend = context.backend;
  const std::int64_t num_own = own.x.size(0);
  backend.plan_dispatch({.expert_ids = own.targets,
                         .rank_of = experts.placement->ranks(),
                         .places_a_rank = fixed_counts_ ? num_own : 0,
                         .row_indices = row_indices_.rows(num_own * num_ranks_),
                         .counts = own_counts_.view()});
  if (fixed_counts_) {
    std::fill(rows_to_.begin(), rows_to_.end(), num_own);
    rows_from_ = own_rows_;
    return;
  }
  context.groups.experts().all_gather(own_counts_.view(), counts_.view(), backend.stream(),
                                      {.what = "dispatch counts", .layer = experts.layer});
  counts_.download(backend, std::span(all_counts_));
  backend.synchronize();
  const auto rank = static_cast<std::size_t>(rank_);
  for (std::size_t other = 0; other < rows_to_.size(); ++other) {
    rows_to_[other] = all_counts_[rank * rows_to_.size() + other];
    rows_from_[other] = all_counts_[other * rows_to_.size() + rank];
  }
}

RoutedRows AllToAllExchange::dispatch(const ModelContext& context, const RoutedRows& own,
                                      const LayerExperts& experts) {
  Backend& backend = context.backend;
  plan(context, own, experts);
  const std::int64_t num_sent = sum(rows_to_);
  const TensorView sent = sent_.rows(num_sent);
  const TensorView received = received_.rows(sum(rows_from_));
  backend.pack_dispatch({.x = own.x,
                         .expert_ids = own.targets,
                         .expert_weights = own.expert_weights,
                         .row_indices = row_indices_.rows(num_sent),
                         .messages = sent});
  context.groups.experts().all_to_all(
      sent, received, {.rows_to = rows_to_, .rows_from = rows_from_}, backend.stream(),
      {.what = "dispatch", .layer = experts.layer});
  const std::int64_t k = own.targets.size(1);
  return {.x = part_of(received, 0, backend.activation_dtype(), own.x.size(1)),
          .targets = part_of(received, message_.ids_offset, DType::kInt32, k),
          .expert_weights = part_of(received, message_.weights_offset, DType::kFloat32, k)};
}

Range AllToAllExchange::divide(const RoutedRows& rows) {
  const std::int64_t num_rows = rows.x.size(0);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const auto group = static_cast<std::size_t>(rank / num_owners_);
    const std::int64_t divided = by_group_ ? rows.rows_of_groups[group] : num_rows;
    own_rows_[static_cast<std::size_t>(rank)] =
        partition(divided, num_owners_, rank % num_owners_).size();
  }
  return partition(num_rows, num_owners_, rank_ % num_owners_);
}

void AllToAllExchange::forward(const ModelContext& context, const RoutedRows& rows,
                               const LayerExperts& experts, const TensorView& y) {
  Backend& backend = context.backend;
  const Range own = divide(rows);
  const std::int64_t layer = experts.layer;
  const RoutedRows own_rows = {.x = rows.x.rows(own.begin, own.size()),
                               .targets = rows.targets.rows(own.begin, own.size()),
                               .expert_weights = rows.expert_weights.rows(own.begin, own.size())};
  mark(context, ExchangeMark::kBegin);
  const RoutedRows arrived = dispatch(context, own_rows, experts);
  mark(context, ExchangeMark::kDispatched);
  const TensorView computed = computed_.rows(arrived.x.size(0));
  backend.experts({.experts = experts.experts,
                   .x = arrived.x,
                   .expert_ids = arrived.targets,
                   .expert_weights = arrived.expert_weights,
                   .logical_to_slot = experts.placement->slots_here(),
                   .output = computed,
                   .workspace = experts_workspace_.view()});

  mark(context, ExchangeMark::kComputed);

  // Combine: the way back, then each own row adds what its ranks computed, in rank order, onto its
  // shared experts.
  const std::int64_t num_sent = sum(rows_to_);
  const TensorView returned = returned_.rows(num_sent);
  context.groups.experts().all_to_all(computed, returned,
                                      {.rows_to = rows_from_, .rows_from = rows_to_},
                                      backend.stream(), {.what = "combine", .layer = layer});
  const TensorView own_y = own_y_.rows(own.size());
  if (experts.shared != nullptr) {
    experts.shared->forward(backend, own_rows.x, mlp_workspace_, own_y);
  } else {
    backend.fill_zero(own_y);
  }
  backend.add_rows(returned, row_indices_.rows(num_sent), own_y);
  if (sliced_) {
    context.groups.slices().all_reduce_sum(own_y, backend.stream(),
                                           {.what = "slices of experts", .layer = layer});
  }
  Communicator& owners = by_group_ ? context.groups.owners() : context.groups.experts();
  const int first = rank_ / num_owners_ * num_owners_;
  const std::span rows_of_owners = std::span(own_rows_).subspan(
      static_cast<std::size_t>(first), static_cast<std::size_t>(num_owners_));
  owners.all_gather_rows(own_y, y, rows_of_owners, backend.stream(),
                         {.what = "gather rows", .layer = layer});
  mark(context, ExchangeMark::kEnd);
}

}  // namespace kdtree
