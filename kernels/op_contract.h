// What backend.h demands of shapes and types, for the ops that all backends check alike.
#pragma once

#include <cstdint>

#include "kernels/backend.h"

namespace kdtree {

struct DispatchPlanSizes {
  std::int64_t rows = 0;
  std::int64_t k = 0;
  std::int64_t num_experts = 0;
  std::int64_t num_ranks = 0;
  std::int64_t places = 0;
};
// Error unless shapes and types are what backend.h says.
DispatchPlanSizes check_dispatch_plan(const DispatchPlanParams& params);

struct RoutedSizes {
  std::int64_t rows = 0;
  std::int64_t k = 0;
  std::int64_t num_experts = 0;
};
RoutedSizes check_choose_replicas(const ChooseReplicasParams& params);
RoutedSizes check_count_experts(const CountExpertsParams& params);

struct PackDispatchSizes {
  std::int64_t rows = 0;
  std::int64_t hidden = 0;
  std::int64_t k = 0;
  std::int64_t places = 0;
  DispatchMessage message;
};
PackDispatchSizes check_pack_dispatch(const PackDispatchParams& params, DType activation_dtype);

void check_random_fill(const RandomFill& fill, const RandomBlock& block,
                       const ConstTensorView& target);

}  // namespace kdtree
