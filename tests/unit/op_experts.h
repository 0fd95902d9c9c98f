// Random experts, calls of them, and the same in double precision.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "tests/unit/op_weights.h"

namespace kdtree::ops_test {

// Random experts on a device.
class Experts {
 public:
  struct Sizes {
    std::int64_t num_slots = 0;
    std::int64_t hidden = 0;
    std::int64_t intermediate = 0;
  };

  Experts(Backend& backend, const WeightKind& kind, const Sizes& sizes, std::uint64_t seed)
      : hidden(sizes.hidden), intermediate(sizes.intermediate) {
    Random random(seed);
    for (std::int64_t slot = 0; slot < sizes.num_slots; ++slot) {
      gate_views_.push_back(gate.emplace_back(backend, kind, intermediate, hidden, random).view());
      up_views_.push_back(up.emplace_back(backend, kind, intermediate, hidden, random).view());
      down_views_.push_back(down.emplace_back(backend, kind, hidden, intermediate, random).view());
    }
  }

  ExpertWeights views() const { return {gate_views_, up_views_, down_views_}; }

  std::int64_t hidden;
  std::int64_t intermediate;
  std::deque<RandomWeight> gate;  // [slots]
  std::deque<RandomWeight> up;
  std::deque<RandomWeight> down;

 private:
  std::vector<WeightView> gate_views_;
  std::vector<WeightView> up_views_;
  std::vector<WeightView> down_views_;
};

struct Routed {
  std::int64_t k = 0;
  std::vector<float> x;               // [rows, hidden]
  std::vector<std::int32_t> ids;      // [rows, k]
  std::vector<float> weights;         // [rows, k]
  std::vector<std::int32_t> slot_of;  // [experts]

  std::int64_t rows() const { return static_cast<std::int64_t>(ids.size()) / k; }
  Routed only(const std::vector<std::int64_t>& chosen) const {
    return {.k = k,
            .x = choose_rows(x, chosen, static_cast<std::int64_t>(x.size()) / rows()),
            .ids = choose_rows(ids, chosen, k),
            .weights = choose_rows(weights, chosen, k),
            .slot_of = slot_of};
  }
};

// Runs experts, with the workspace between guards and NaN at first.
class ExpertsOpTest : public OpTest {
 protected:
  std::vector<float> run(Backend& other, const Experts& experts, const Routed& routed) const {
    const std::int64_t rows = routed.rows();
    auto x = make_floats(other, activation(), {rows, experts.hidden}, routed.x, experts.hidden + 8);
    auto ids = make_tensor(other, {rows, routed.k}, routed.ids);
    auto weights = make_tensor(other, {rows, routed.k}, routed.weights);
    auto slot_of = make_indices(other, routed.slot_of);
    GuardedTensor out(other, activation(), {rows, experts.hidden}, experts.hidden + 4);
    // Exactly as much as was asked for, between guards.
    GuardedTensor workspace(
        other, DType::kUInt8,
        {other.experts_workspace_bytes(rows, routed.k, experts.hidden, experts.intermediate)});
    const auto set = other.make_expert_set(experts.views());
    other.experts({.experts = set.get(),
                   .x = x.view(),
                   .expert_ids = ids.view(),
                   .expert_weights = weights.view(),
                   .logical_to_slot = slot_of.view(),
                   .output = out.view(),
                   .workspace = workspace.view()});
    workspace.download<std::uint8_t>();
    return read_floats(out);
  }

  // Experts -1 and ones of other ranks among them; no row names an expert twice.
  Routed random_routing(Random& random, std::int64_t rows, std::int64_t k, std::int64_t num_experts,
                        const Experts& experts) const {
    Routed routed = {.k = k,
                     .x = activations(random, rows * experts.hidden),
                     .ids = {},
                     .weights = random.floats(rows * k, 0, 1),
                     .slot_of = {}};
    for (std::int64_t r = 0; r < rows; ++r) {
      auto chosen = random.permutation(num_experts);
      chosen.resize(static_cast<std::size_t>(k));
      for (std::int32_t& id : chosen) {
        id = random.below(8) == 0 ? -1 : id;
      }
      routed.ids.insert(routed.ids.end(), chosen.begin(), chosen.end());
    }
    const auto num_slots = static_cast<std::int32_t>(experts.gate.size());
    for (const std::int32_t place : random.permutation(num_experts)) {
      routed.slot_of.push_back(place < num_slots ? place : -1);
    }
    return routed;
  }
};
struct Value {
  double value = 0;
  double error = 0;
};

// Dot product of a weight row with values that have errors: what LinearTest derives, and the errors
// passed on.
inline Value dot(const RandomWeight& w, std::int64_t row, const std::vector<Value>& x) {
  Value result;
  double magnitude = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double weight = w.at(row, static_cast<std::int64_t>(i));
    result.value += weight * x[i].value;
    result.error += std::abs(weight) * x[i].error;
    magnitude += std::abs(weight) * (std::abs(x[i].value) + x[i].error);
  }
  result.error += 1.01 * static_cast<double>(x.size() + 1) * kRound * magnitude;
  return result;
}

// silu's slope is at most 1.1; silu and the product have 5 roundings, as in SwigluTest.
inline Value swiglu(const Value& gate, const Value& up) {
  const double silu = gate.value / (1 + std::exp(-gate.value));
  const double silu_error = 1.1 * gate.error;
  Value result = {silu * up.value, silu_error * std::abs(up.value) + std::abs(silu) * up.error +
                                       silu_error * up.error};
  result.error += 5.01 * kRound * (std::abs(result.value) + result.error);
  return result;
}

// The weighted sum over the k experts of a row: k products and additions.
inline Expected reference(const Experts& experts, const Routed& routed,
                          const std::function<double(double)>& store_error) {
  Expected want;
  for (std::int64_t r = 0; r < routed.rows(); ++r) {
    std::vector<Value> x;
    for (const float value : row_of(routed.x, r, experts.hidden)) {
      x.push_back({value, 0});
    }
    std::vector<Value> sums(static_cast<std::size_t>(experts.hidden));
    std::vector<double> magnitudes(sums.size());
    for (std::int64_t i = 0; i < routed.k; ++i) {
      const std::int32_t id = routed.ids[static_cast<std::size_t>(r * routed.k + i)];
      const std::int32_t slot = id < 0 ? -1 : routed.slot_of[static_cast<std::size_t>(id)];
      if (slot < 0) {
        continue;
      }
      const auto s = static_cast<std::size_t>(slot);
      std::vector<Value> inner;
      for (std::int64_t o = 0; o < experts.intermediate; ++o) {
        inner.push_back(swiglu(dot(experts.gate[s], o, x), dot(experts.up[s], o, x)));
        inner.back().error += store_error(inner.back().value);
      }
      const double weight = routed.weights[static_cast<std::size_t>(r * routed.k + i)];
      for (std::size_t c = 0; c < sums.size(); ++c) {
        const Value down = dot(experts.down[s], static_cast<std::int64_t>(c), inner);
        sums[c].value += weight * down.value;
        sums[c].error += weight * down.error;
        magnitudes[c] += weight * (std::abs(down.value) + down.error);
      }
    }
    for (std::size_t c = 0; c < sums.size(); ++c) {
      const double roundings = static_cast<double>(routed.k + 1);
      want.add(sums[c].value, sums[c].error + 1.01 * roundings * kRound * magnitudes[c] +
                                  store_error(sums[c].value));
    }
  }
  return want;
}

}  // namespace kdtree::ops_test
