// The routed experts: what is to be done is listed on the device, ordered by slot, then computed
// for some rows of an expert at a time, and summed up row by row.
#include <algorithm>
#include <vector>

#include "kernels/cpu/weights.h"
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/experts_work.h"
#include "kernels/cuda/shapes.h"

namespace kdtree {
namespace {

struct CudaExpertSet final : ExpertSet {
  std::int64_t num_slots = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  bool all_packed = false;  // every matrix is packed INT4
  Buffer slots;             // [num_slots] SlotMatrices, on the device
};

const CudaExpertSet& cuda_set(const ExpertSet* experts) {
  const auto* set = dynamic_cast<const CudaExpertSet*>(experts);
  check(set != nullptr, "experts needs an expert set that the CUDA backend made");
  return *set;
}

// With so few rows, an expert that is chosen by more than kEntryPairs of them is rare and has two
// entries: launches for large entries would cost more than they save.
constexpr std::int64_t kRowsWithoutLargeEntries = 16;

// ---- the sum over a row's experts

// Products and sums are rounded one by one, as the CPU has them: where weights cancel, a fused
// operation would leave the product's rounding error.
template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    combine_experts_kernel(const float* outer, const std::int32_t* pair_slots, const float* weights,
                           std::int64_t weights_stride, std::int64_t k, std::int64_t hidden,
                           T* output, std::int64_t output_stride) {
  const std::int64_t row = blockIdx.x;
  for_columns(hidden, [&](std::int64_t c) {
    float sum = 0;
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int64_t pair = row * k + i;
      if (pair_slots[pair] >= 0) {
        sum =
            __fadd_rn(sum, __fmul_rn(weights[row * weights_stride + i], outer[pair * hidden + c]));
      }
    }
    output[row * output_stride + c] = from_float<T>(sum);
  });
}

}  // namespace

std::int64_t CudaBackend::experts_workspace_bytes(std::int64_t max_rows,
                                                  std::int64_t num_experts_per_tok,
                                                  std::int64_t hidden_size,
                                                  std::int64_t moe_intermediate_size) const {
  return ExpertsWorkspaceLayout(max_rows * num_experts_per_tok, hidden_size, moe_intermediate_size)
      .bytes;
}

std::unique_ptr<ExpertSet> CudaBackend::make_expert_set(const ExpertWeights& weights) {
  check(weights.up.size() == weights.gate.size() && weights.down.size() == weights.gate.size(),
        "{} gate, {} up and {} down experts", weights.gate.size(), weights.up.size(),
        weights.down.size());
  auto set = std::make_unique<CudaExpertSet>();
  set->num_slots = static_cast<std::int64_t>(weights.gate.size());
  check(set->num_slots <= kMostListSlots, "{} experts on a rank, at most {} are supported",
        set->num_slots, kMostListSlots);
  if (weights.gate.empty()) {
    return set;
  }
  set->intermediate = weights.gate[0].out_features;
  set->hidden = weights.gate[0].in_features;
  set->all_packed = true;
  std::vector<SlotMatrices> slots;
  for (std::size_t slot = 0; slot < weights.gate.size(); ++slot) {
    const auto expect = [&](std::string_view name, const WeightView& w, std::int64_t out,
                            std::int64_t in) {
      check(w.out_features == out && w.in_features == in,
            "{} of slot {} is [{}, {}], expected [{}, {}]", name, slot, w.out_features,
            w.in_features, out, in);
      check_weight(name, w);
      set->all_packed = set->all_packed && is_packed_int4(w);
      return matrix_ref(w);
    };
    slots.push_back({.gate = expect("gate", weights.gate[slot], set->intermediate, set->hidden),
                     .up = expect("up", weights.up[slot], set->intermediate, set->hidden),
                     .down = expect("down", weights.down[slot], set->hidden, set->intermediate)});
  }
  const auto bytes = static_cast<std::int64_t>(slots.size() * sizeof(SlotMatrices));
  set->slots = allocate(bytes);
  upload(set->slots.data(), slots.data(), bytes);
  synchronize();  // the host's copy ends here
  return set;
}

void CudaBackend::experts(const ExpertsParams& params) {
  const CudaExpertSet& set = cuda_set(params.experts);
  expect_matrix("experts' x", params.x, activation_dtype());
  expect_matrix("expert_ids", params.expert_ids, DType::kInt32);
  const std::int64_t rows = params.x.size(0);
  const std::int64_t hidden = params.x.size(1);
  const std::int64_t k = params.expert_ids.size(1);
  expect_tensor("expert_ids", params.expert_ids, DType::kInt32, Shape{rows, k});
  expect_tensor("expert_weights", params.expert_weights, DType::kFloat32, Shape{rows, k});
  expect_tensor("experts' output", params.output, activation_dtype(), Shape{rows, hidden});
  check(params.logical_to_slot.shape().rank() == 1, "logical_to_slot has {} dimensions, expected 1",
        params.logical_to_slot.shape().rank());
  const std::int64_t num_experts = params.logical_to_slot.size(0);
  const std::int32_t* logical_to_slot =
      device_indices("logical_to_slot", params.logical_to_slot, num_experts);
  check(set.num_slots == 0 || set.hidden == hidden, "experts of hidden size {}, x has {}",
        set.hidden, hidden);
  const std::int64_t num_pairs = rows * k;
  check(num_pairs <= kMostListPairs, "{} rows with {} experts each", rows, k);
  const ExpertsWorkspaceLayout layout(num_pairs, hidden, set.intermediate);
  check(params.workspace.bytes() >= layout.bytes,
        "the experts' workspace has {} bytes, {} are needed", params.workspace.bytes(),
        layout.bytes);
  if (rows == 0 || hidden == 0) {
    return;
  }
  auto* base = reinterpret_cast<std::byte*>(ExpertsWorkspaceLayout::aligned_bytes(
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(params.workspace.raw()))));
  auto* counts = reinterpret_cast<std::int32_t*>(base + layout.counts);
  auto* pair_slots = reinterpret_cast<std::int32_t*>(base + layout.pair_slots);
  auto* entries = reinterpret_cast<ExpertEntry*>(base + layout.entries);

  const bool x_aligned = reinterpret_cast<std::uintptr_t>(params.x.raw()) % 16 == 0 &&
                         params.x.row_stride() * dtype_bytes(activation_dtype()) % 16 == 0;
  const bool int4 =
      !is_float32() && set.all_packed && x_aligned && int4_experts_fit(hidden, set.intermediate);
  auto* large_entries = int4 && rows > kRowsWithoutLargeEntries
                            ? reinterpret_cast<LargeExpertEntry*>(base + layout.large_entries)
                            : nullptr;

  // Experts without width add nothing: as if there were none.
  const std::int64_t num_slots = set.intermediate == 0 ? 0 : set.num_slots;
  const auto* slots = static_cast<const SlotMatrices*>(set.slots.data());
  list_experts({.ids = params.expert_ids.data<std::int32_t>(),
                .ids_stride = params.expert_ids.row_stride(),
                .k = k,
                .num_pairs = num_pairs,
                .logical_to_slot = logical_to_slot,
                .num_experts = num_experts,
                .num_slots = static_cast<std::int32_t>(num_slots),
                .slots = slots,
                .pair_slots = pair_slots,
                .num_entries = counts,
                .entries = entries,
                .num_large_entries = counts + 1,
                .large_entries = large_entries},
               cuda_stream());

  if (num_slots > 0 && num_pairs > 0) {
    const ExpertsWork work = {
        .slots = slots,
        .num_entries = counts,
        .entries = entries,
        .num_large_entries = counts + 1,
        .large_entries = large_entries,
        .num_pairs = num_pairs,
        .k = k,
        .x = params.x.raw(),
        .x_stride = params.x.row_stride(),
        .hidden = hidden,
        .intermediate = set.intermediate,
        .inner = base + layout.inner,
        .outer = reinterpret_cast<float*>(base + layout.outer),
    };
    if (int4) {
      run_int4_experts(work, properties(), cuda_stream());
    } else {
      run_generic_experts(work, activation_dtype(), properties().multiProcessorCount,
                          cuda_stream());
    }
  }
  with_float_type(activation_dtype(), [&](auto type) {
    using T = decltype(type);
    combine_experts_kernel<T><<<row_grid(rows, hidden), kBlockThreads, 0, cuda_stream()>>>(
        reinterpret_cast<const float*>(base + layout.outer), pair_slots,
        params.expert_weights.data<float>(), params.expert_weights.row_stride(), k, hidden,
        static_cast<T*>(params.output.raw()), params.output.row_stride());
  });
  check_launch("experts, sum");
}

}  // namespace kdtree
