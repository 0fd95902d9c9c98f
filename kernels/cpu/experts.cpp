#include <algorithm>
#include <span>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/exp_lanes.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/shapes.h"
#include "kernels/cpu/weights.h"

namespace kdtree {
namespace {

// The CPU reads the matrices where they are.
struct CpuExpertSet final : ExpertSet {
  std::vector<WeightView> gate;  // [slots]
  std::vector<WeightView> up;    // [slots]
  std::vector<WeightView> down;  // [slots]
};

const CpuExpertSet& cpu_set(const ExpertSet* experts) {
  const auto* set = dynamic_cast<const CpuExpertSet*>(experts);
  check(set != nullptr, "experts needs an expert set that the CPU backend made");
  return *set;
}

// The (row, k) pairs whose experts this rank holds, ordered by slot, with what is computed for
// each. Everything lies in the caller's workspace.
struct Pairs {
  std::span<std::int64_t> order;     // [pairs] slot << 32 | (row * k + place), ascending
  std::span<std::int32_t> row;       // [pairs] input row, in that order
  std::span<std::int32_t> place_of;  // [rows * k] place in that order, or -1
  float* gate = nullptr;             // [pairs, moe_intermediate]; later silu(gate) * up
  float* up = nullptr;               // [pairs, moe_intermediate]
  float* down = nullptr;             // [pairs, hidden]

  std::int64_t size() const { return static_cast<std::int64_t>(order.size()); }
  std::int64_t slot(std::int64_t i) const { return order[static_cast<std::size_t>(i)] >> 32; }
  // One behind the last pair that shares pair i's slot.
  std::int64_t group_end(std::int64_t i) const {
    std::int64_t end = i + 1;
    while (end < size() && slot(end) == slot(i)) {
      ++end;
    }
    return end;
  }
};

constexpr std::int64_t kPairBytes = sizeof(std::int64_t) + 2 * sizeof(std::int32_t);

std::int64_t workspace_bytes(std::int64_t num_pairs, std::int64_t hidden,
                             std::int64_t intermediate) {
  return num_pairs *
         (kPairBytes + (2 * intermediate + hidden) * static_cast<std::int64_t>(sizeof(float)));
}

// Lists the pairs in the workspace.
Pairs group_pairs(const ExpertsParams& params, std::int64_t num_slots, std::int64_t intermediate) {
  const std::int64_t rows = params.x.size(0);
  const std::int64_t k = params.expert_ids.size(1);
  const std::int64_t most = rows * k;
  const auto slot_of = params.logical_to_slot.span<std::int32_t>();
  auto* order = static_cast<std::int64_t*>(params.workspace.raw());
  auto* row = reinterpret_cast<std::int32_t*>(order + most);
  Pairs pairs;
  pairs.place_of = {row + most, static_cast<std::size_t>(most)};
  pairs.gate = reinterpret_cast<float*>(row + 2 * most);
  pairs.up = pairs.gate + most * intermediate;
  pairs.down = pairs.up + most * intermediate;

  std::int64_t count = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto* ids = params.expert_ids.row<std::int32_t>(r);
    for (std::int64_t i = 0; i < k; ++i) {
      pairs.place_of[static_cast<std::size_t>(r * k + i)] = -1;
      if (ids[i] == -1) {
        continue;
      }
      check(ids[i] >= 0 && ids[i] < static_cast<std::int64_t>(slot_of.size()),
            "expert id {} of {} experts", ids[i], slot_of.size());
      const std::int64_t slot = slot_of[static_cast<std::size_t>(ids[i])];
      check(slot >= -1 && slot < num_slots, "expert {} lies in slot {} of {}", ids[i], slot,
            num_slots);
      if (slot >= 0) {
        order[count++] = (slot << 32) | (r * k + i);
      }
    }
  }
  std::sort(order, order + count);
  pairs.order = {order, static_cast<std::size_t>(count)};
  pairs.row = {row, static_cast<std::size_t>(count)};
  for (std::int64_t p = 0; p < count; ++p) {
    const std::int64_t pair = order[p] & 0xffffffff;
    row[p] = static_cast<std::int32_t>(pair / k);
    pairs.place_of[static_cast<std::size_t>(pair)] = static_cast<std::int32_t>(p);
  }
  return pairs;
}

void check_expert(const CpuExpertSet& weights, std::size_t slot, std::int64_t hidden,
                  std::int64_t intermediate) {
  const auto expect = [slot](std::string_view name, const WeightView& w, std::int64_t out,
                             std::int64_t in) {
    check(w.out_features == out && w.in_features == in,
          "{} of slot {} is [{}, {}], expected [{}, {}]", name, slot, w.out_features, w.in_features,
          out, in);
    check_weight(name, w);
  };
  expect("gate", weights.gate[slot], intermediate, hidden);
  expect("up", weights.up[slot], intermediate, hidden);
  expect("down", weights.down[slot], hidden, intermediate);
}

}  // namespace

std::int64_t CpuBackend::experts_workspace_bytes(std::int64_t max_rows,
                                                 std::int64_t num_experts_per_tok,
                                                 std::int64_t hidden_size,
                                                 std::int64_t moe_intermediate_size) const {
  return workspace_bytes(max_rows * num_experts_per_tok, hidden_size, moe_intermediate_size);
}

std::unique_ptr<ExpertSet> CpuBackend::make_expert_set(const ExpertWeights& weights) {
  check(weights.up.size() == weights.gate.size() && weights.down.size() == weights.gate.size(),
        "{} gate, {} up and {} down experts", weights.gate.size(), weights.up.size(),
        weights.down.size());
  auto set = std::make_unique<CpuExpertSet>();
  set->gate.assign(weights.gate.begin(), weights.gate.end());
  set->up.assign(weights.up.begin(), weights.up.end());
  set->down.assign(weights.down.begin(), weights.down.end());
  return set;
}

void CpuBackend::experts(const ExpertsParams& params) {
  const CpuExpertSet& weights = cpu_set(params.experts);
  expect_matrix("experts' x", params.x, DType::kFloat32);
  expect_matrix("expert_ids", params.expert_ids, DType::kInt32);
  const std::int64_t rows = params.x.size(0);
  const std::int64_t hidden = params.x.size(1);
  const std::int64_t k = params.expert_ids.size(1);
  const std::int64_t intermediate = weights.gate.empty() ? 0 : weights.gate[0].out_features;
  expect_tensor("expert_ids", params.expert_ids, DType::kInt32, Shape{rows, k});
  expect_tensor("expert_weights", params.expert_weights, DType::kFloat32, Shape{rows, k});
  expect_tensor("experts' output", params.output, DType::kFloat32, Shape{rows, hidden});
  check(
      params.logical_to_slot.shape().rank() == 1 && params.logical_to_slot.dtype() == DType::kInt32,
      "logical_to_slot must be I32 with one dimension");
  check(params.workspace.bytes() >= workspace_bytes(rows * k, hidden, intermediate),
        "the experts' workspace has {} bytes, {} are needed", params.workspace.bytes(),
        workspace_bytes(rows * k, hidden, intermediate));
  check(reinterpret_cast<std::uintptr_t>(params.workspace.raw()) % alignof(std::int64_t) == 0,
        "the experts' workspace is not aligned to {} bytes", alignof(std::int64_t));
  if (rows == 0) {
    return;
  }
  const Pairs pairs =
      group_pairs(params, static_cast<std::int64_t>(weights.gate.size()), intermediate);
  for (std::int64_t i = 0; i < pairs.size(); i = pairs.group_end(i)) {
    check_expert(weights, static_cast<std::size_t>(pairs.slot(i)), hidden, intermediate);
  }

  // Every thread takes its share of output features of every expert, so that the load is even
  // whatever the grouping.
  LoopWork work = {
      .count = intermediate, .multiply_adds = 2 * pairs.size() * hidden * intermediate, .unit = 4};
  parallel_for(num_threads_, work, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = 0; i < pairs.size(); i = pairs.group_end(i)) {
      const auto slot = static_cast<std::size_t>(pairs.slot(i));
      const std::int64_t last = pairs.group_end(i);
      const InputRows x = {params.x.data<float>(), params.x.row_stride(), pairs.row.data() + i};
      const OutputRows gate = {pairs.gate + i * intermediate, intermediate};
      const OutputRows up = {pairs.up + i * intermediate, intermediate};
      linear_outputs({weights.gate[slot], x, gate, last - i}, begin, end);
      linear_outputs({weights.up[slot], x, up, last - i}, begin, end);
      for (std::int64_t r = 0; r < last - i; ++r) {
        swiglu_row(gate.row(r) + begin, up.row(r) + begin, end - begin, gate.row(r) + begin);
      }
    }
  });
  work.count = hidden;
  parallel_for(num_threads_, work, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = 0; i < pairs.size(); i = pairs.group_end(i)) {
      const InputRows x = {.base = pairs.gate + i * intermediate, .stride = intermediate};
      const OutputRows down = {pairs.down + i * hidden, hidden};
      const WeightView& w = weights.down[static_cast<std::size_t>(pairs.slot(i))];
      linear_outputs({w, x, down, pairs.group_end(i) - i}, begin, end);
    }
  });
  parallel_for(num_threads_, {rows, rows * k * hidden}, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      float* out = params.output.row<float>(r);
      std::fill_n(out, hidden, 0.0F);
      for (std::int64_t i = 0; i < k; ++i) {
        const std::int32_t place = pairs.place_of[static_cast<std::size_t>(r * k + i)];
        if (place < 0) {
          continue;
        }
        const float weight = params.expert_weights.row<float>(r)[i];
        const float* down = pairs.down + place * hidden;
        for (std::int64_t c = 0; c < hidden; ++c) {
          out[c] += weight * down[c];
        }
      }
    }
  });
}

}  // namespace kdtree
