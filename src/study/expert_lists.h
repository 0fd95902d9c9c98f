// Lists of experts as a router might choose them, for measuring expert kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "study/bench_data.h"

namespace kdtree {

enum class ExpertHistogram : std::uint8_t {
  kUniform,  // every expert is equally likely
  kZipf,     // the r-th most popular expert has weight 1 / r; which one that is, is random
  kOne,      // all rows choose the same experts: 0 to num_experts_per_tok - 1
};

// Draws lists of one popularity; a zipf router keeps its favourites from list to list.
class ExpertListSource {
 public:
  ExpertListSource(ExpertHistogram histogram, std::int64_t n_routed_experts, std::uint64_t seed);

  // [rows, num_experts_per_tok] experts, no expert twice in a row. Error where a row asks for more
  // experts than there are.
  std::vector<std::int32_t> draw(std::int64_t rows, std::int64_t num_experts_per_tok);

 private:
  std::vector<std::int32_t> draw_row(std::int64_t num_experts_per_tok);

  ExpertHistogram histogram_;
  BenchRandom random_;
  std::vector<double> weights_;  // [n_routed_experts] popularity; any scale
};

// Different slots among the experts of `lists` that logical_to_slot places here (>= 0).
std::int64_t num_distinct_slots(const std::vector<std::int32_t>& lists,
                                const std::vector<std::int32_t>& logical_to_slot);
// Entries of `lists` whose expert is here.
std::int64_t num_local_pairs(const std::vector<std::int32_t>& lists,
                             const std::vector<std::int32_t>& logical_to_slot);

}  // namespace kdtree
