// Grids of the ranks for tests, equal on every rank for equal arguments.
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "comm/parallel_grid.h"
#include "config/model_config.h"
#include "tests/mpi/world.h"

namespace kdtree {

inline std::string grid_name(const ParallelGrid& grid) {
  return fmt::format("moe_tp {} attention_dp {}", grid.moe_tp, grid.attention_dp);
}

// Every grid of the ranks that the model's sizes allow, with INT4 groups of group_size (1 without);
// every moe_tp with every attention_dp. The first is that without options.
inline std::vector<ParallelGrid> grids_of(const ModelConfig& config, std::int64_t group_size) {
  std::vector<ParallelGrid> grids;
  const std::int64_t groups = (config.moe_intermediate_size + group_size - 1) / group_size;
  for (int moe_tp = 1; moe_tp <= world().size(); ++moe_tp) {
    const bool cuts = moe_tp == 1 || (config.n_routed_experts > 0 && groups >= moe_tp);
    for (int dp = 1; dp <= world().size() && world().size() % moe_tp == 0 && cuts; ++dp) {
      if (world().size() % dp == 0) {
        grids.push_back({.moe_tp = moe_tp, .attention_dp = dp});
      }
    }
  }
  return grids;
}

}  // namespace kdtree
