#include "kernels/op_contract.h"

#include <algorithm>

namespace kdtree {

namespace {

constexpr std::int64_t kPartAlignment = 16;

constexpr std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

void expect_rank(const char* name, const ConstTensorView& view, std::size_t rank) {
  check(view.shape().rank() == rank, "{} has {} dimensions, expected {}", name, view.shape().rank(),
        rank);
}

void expect_contiguous(const char* name, const ConstTensorView& view) {
  check(view.contiguous(), "{} must be contiguous", name);
}

}  // namespace

DispatchMessage dispatch_message(std::int64_t hidden_size, std::int64_t num_experts_per_tok,
                                 DType activation_dtype) {
  DispatchMessage message;
  message.ids_offset = aligned(hidden_size * dtype_bytes(activation_dtype));
  message.weights_offset =
      message.ids_offset + aligned(num_experts_per_tok * dtype_bytes(DType::kInt32));
  message.bytes =
      message.weights_offset + aligned(num_experts_per_tok * dtype_bytes(DType::kFloat32));
  return message;
}

DispatchPlanSizes check_dispatch_plan(const DispatchPlanParams& params) {
  expect_rank("expert_ids", params.expert_ids, 2);
  expect_rank("rank_of", params.rank_of, 1);
  expect_rank("counts", params.counts, 1);
  expect_rank("row_indices", params.row_indices, 1);
  const DispatchPlanSizes sizes{.rows = params.expert_ids.size(0),
                                .k = params.expert_ids.size(1),
                                .num_experts = params.rank_of.size(0),
                                .num_ranks = params.counts.size(0),
                                .places = params.row_indices.size(0)};
  expect_tensor("expert_ids", params.expert_ids, DType::kInt32, Shape{sizes.rows, sizes.k});
  expect_tensor("rank_of", params.rank_of, DType::kInt32, Shape{sizes.num_experts});
  expect_tensor("counts", params.counts, DType::kInt64, Shape{sizes.num_ranks});
  expect_tensor("row_indices", params.row_indices, DType::kInt32, Shape{sizes.places});
  expect_contiguous("rank_of", params.rank_of);
  expect_contiguous("counts", params.counts);
  expect_contiguous("row_indices", params.row_indices);
  check(params.places_a_rank == 0 || params.places_a_rank >= sizes.rows,
        "{} places a rank for {} rows", params.places_a_rank, sizes.rows);
  const std::int64_t needed = params.places_a_rank > 0
                                  ? sizes.num_ranks * params.places_a_rank
                                  : sizes.rows * std::min(sizes.k, sizes.num_ranks);
  check(sizes.places >= needed, "a dispatch plan with {} places, {} are needed", sizes.places,
        needed);
  return sizes;
}

RoutedSizes check_choose_replicas(const ChooseReplicasParams& params) {
  expect_rank("expert_ids", params.expert_ids, 2);
  expect_rank("replica_offsets", params.replica_offsets, 1);
  expect_rank("physical_slots", params.physical_slots, 1);
  const RoutedSizes sizes{.rows = params.expert_ids.size(0),
                          .k = params.expert_ids.size(1),
                          .num_experts = params.replica_offsets.size(0) - 1};
  const Shape pairs{sizes.rows, sizes.k};
  expect_tensor("expert_ids", params.expert_ids, DType::kInt32, pairs);
  expect_tensor("targets", params.targets, DType::kInt32, pairs);
  expect_tensor("replica_offsets", params.replica_offsets, DType::kInt32,
                Shape{sizes.num_experts + 1});
  expect_tensor("physical_slots", params.physical_slots, DType::kInt32,
                Shape{params.physical_slots.size(0)});
  expect_contiguous("replica_offsets", params.replica_offsets);
  expect_contiguous("physical_slots", params.physical_slots);
  check(sizes.num_experts >= 0 && params.physical_slots.size(0) >= sizes.num_experts,
        "{} slots for {} experts", params.physical_slots.size(0), sizes.num_experts);
  return sizes;
}

RoutedSizes check_count_experts(const CountExpertsParams& params) {
  expect_rank("expert_ids", params.expert_ids, 2);
  expect_rank("counts", params.counts, 1);
  const TreeBatch& batch = params.batch;
  const RoutedSizes sizes{.rows = params.expert_ids.size(0),
                          .k = params.expert_ids.size(1),
                          .num_experts = params.counts.size(0)};
  expect_tensor("expert_ids", params.expert_ids, DType::kInt32, Shape{batch.num_rows, sizes.k});
  expect_tensor("counts", params.counts, DType::kInt64, Shape{sizes.num_experts});
  expect_contiguous("counts", params.counts);
  if (batch.num_real_rows.raw() != nullptr) {
    expect_tensor("num_real_rows", batch.num_real_rows, DType::kInt32, Shape{batch.num_sequences});
    expect_tensor("sequence_index", batch.sequence_index, DType::kInt32, Shape{batch.num_rows});
    expect_tensor("row_offsets", batch.row_offsets, DType::kInt32, Shape{batch.num_sequences + 1});
    expect_contiguous("num_real_rows", batch.num_real_rows);
    expect_contiguous("sequence_index", batch.sequence_index);
    expect_contiguous("row_offsets", batch.row_offsets);
  }
  return sizes;
}

PackDispatchSizes check_pack_dispatch(const PackDispatchParams& params, DType activation_dtype) {
  expect_rank("x", params.x, 2);
  expect_rank("expert_ids", params.expert_ids, 2);
  expect_rank("row_indices", params.row_indices, 1);
  PackDispatchSizes sizes{.rows = params.x.size(0),
                          .hidden = params.x.size(1),
                          .k = params.expert_ids.size(1),
                          .places = params.row_indices.size(0),
                          .message = {}};
  sizes.message = dispatch_message(sizes.hidden, sizes.k, activation_dtype);
  expect_tensor("x", params.x, activation_dtype, Shape{sizes.rows, sizes.hidden});
  expect_tensor("expert_ids", params.expert_ids, DType::kInt32, Shape{sizes.rows, sizes.k});
  expect_tensor("expert_weights", params.expert_weights, DType::kFloat32,
                Shape{sizes.rows, sizes.k});
  expect_tensor("row_indices", params.row_indices, DType::kInt32, Shape{sizes.places});
  expect_tensor("messages", params.messages, DType::kUInt8,
                Shape{sizes.places, sizes.message.bytes});
  expect_contiguous("row_indices", params.row_indices);
  expect_contiguous("messages", params.messages);
  check(reinterpret_cast<std::uintptr_t>(params.messages.raw()) % kPartAlignment == 0,
        "dispatch messages must begin at a {}-byte boundary", kPartAlignment);
  return sizes;
}

void check_random_fill(const RandomFill& fill, const RandomBlock& block,
                       const ConstTensorView& target) {
  expect_rank("fill_random's target", target, 2);
  expect_contiguous("fill_random's target", target);
  const bool bits = fill.kind == RandomFill::Kind::kBits;
  const DType dtype = target.dtype();
  check(bits ? dtype == DType::kInt32 : dtype == DType::kFloat32 || dtype == DType::kBFloat16,
        "fill_random of {} into {}", bits ? "bits" : "floats", dtype_name(dtype));
  check(block.first_row >= 0 && block.first_column >= 0 &&
            block.first_column + target.size(1) <= block.total_columns,
        "a block of {} columns from column {} on, the tensor has {}", target.size(1),
        block.first_column, block.total_columns);
}

}  // namespace kdtree
