#include "study/expert_lists.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>

#include "core/check.h"

namespace kdtree {

ExpertListSource::ExpertListSource(ExpertHistogram histogram, std::int64_t n_routed_experts,
                                   std::uint64_t seed)
    : histogram_(histogram),
      random_(seed),
      weights_(static_cast<std::size_t>(n_routed_experts), 1.0) {
  if (histogram != ExpertHistogram::kZipf) {
    return;
  }
  for (std::size_t rank = 0; rank < weights_.size(); ++rank) {
    weights_[rank] = 1.0 / static_cast<double>(rank + 1);
  }
  for (std::size_t i = weights_.size(); i > 1; --i) {
    std::swap(weights_[i - 1],
              weights_[static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(i)))]);
  }
}

// Without replacement: the largest keys log(u) / weight (Efraimidis and Spirakis 2006).
std::vector<std::int32_t> ExpertListSource::draw_row(std::int64_t num_experts_per_tok) {
  std::vector<std::int32_t> experts(weights_.size());
  std::iota(experts.begin(), experts.end(), 0);
  if (histogram_ != ExpertHistogram::kOne) {
    std::vector<double> keys(weights_.size());
    for (std::size_t e = 0; e < keys.size(); ++e) {
      keys[e] = std::log(random_.uniform(0x1p-53, 1)) / weights_[e];
    }
    std::stable_sort(experts.begin(), experts.end(), [&](std::int32_t a, std::int32_t b) {
      return keys[static_cast<std::size_t>(a)] > keys[static_cast<std::size_t>(b)];
    });
  }
  experts.resize(static_cast<std::size_t>(num_experts_per_tok));
  return experts;
}

std::vector<std::int32_t> ExpertListSource::draw(std::int64_t rows,
                                                 std::int64_t num_experts_per_tok) {
  check(num_experts_per_tok <= static_cast<std::int64_t>(weights_.size()),
        "{} experts a token of {}", num_experts_per_tok, weights_.size());
  std::vector<std::int32_t> lists;
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::vector<std::int32_t> row = draw_row(num_experts_per_tok);
    lists.insert(lists.end(), row.begin(), row.end());
  }
  return lists;
}

std::int64_t num_distinct_slots(const std::vector<std::int32_t>& lists,
                                const std::vector<std::int32_t>& logical_to_slot) {
  std::set<std::int32_t> slots;
  for (const std::int32_t expert : lists) {
    const std::int32_t slot = logical_to_slot.at(static_cast<std::size_t>(expert));
    if (slot >= 0) {
      slots.insert(slot);
    }
  }
  return static_cast<std::int64_t>(slots.size());
}

std::int64_t num_local_pairs(const std::vector<std::int32_t>& lists,
                             const std::vector<std::int32_t>& logical_to_slot) {
  return std::count_if(lists.begin(), lists.end(), [&](std::int32_t expert) {
    return logical_to_slot.at(static_cast<std::size_t>(expert)) >= 0;
  });
}

}  // namespace kdtree
