// What repeated measurements of one time come to.
#pragma once

#include <vector>

namespace kdtree {

struct TimeSummary {
  double median_us = 0;
  double min_us = 0;
  double max_us = 0;
};

// Microseconds, any order; of an even number the median is the mean of the middle two. Error
// without a sample.
TimeSummary summarize_times(std::vector<double> samples_us);

}  // namespace kdtree
