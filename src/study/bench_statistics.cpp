#include "study/bench_statistics.h"

#include <algorithm>

#include "core/check.h"

namespace kdtree {

TimeSummary summarize_times(std::vector<double> samples_us) {
  check(!samples_us.empty(), "a summary of no times");
  std::sort(samples_us.begin(), samples_us.end());
  const std::size_t middle = samples_us.size() / 2;
  const double median = samples_us.size() % 2 == 1
                            ? samples_us[middle]
                            : (samples_us[middle - 1] + samples_us[middle]) / 2;
  return {.median_us = median, .min_us = samples_us.front(), .max_us = samples_us.back()};
}

}  // namespace kdtree
