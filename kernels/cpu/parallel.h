// Sharing an op's independent outputs among OpenMP threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <exception>

#include "core/partition.h"

namespace kdtree {

// Below this many multiply-adds, waking threads costs more than it saves.
inline constexpr std::int64_t kMinParallelWork = std::int64_t{1} << 18;
// What one exponential counts for in multiply-adds.
inline constexpr std::int64_t kExpWork = 16;

struct LoopWork {
  std::int64_t count = 0;          // independent items
  std::int64_t multiply_adds = 0;  // of all items together
  std::int64_t unit = 1;           // items are handed out in whole units
};

// Runs body(begin, end) over contiguous parts of [0, count), one a thread. An item must not depend
// on another one: the split then shows in no bit of the result.
template <class Body>
void parallel_for(int num_threads, const LoopWork& work, const Body& body) {
  const std::int64_t units = (work.count + work.unit - 1) / work.unit;
  const int threads = static_cast<int>(std::min<std::int64_t>(num_threads, units));
  if (threads <= 1 || work.multiply_adds < kMinParallelWork) {
    if (work.count > 0) {
      body(std::int64_t{0}, work.count);
    }
    return;
  }
  std::exception_ptr error;
#pragma omp parallel num_threads(threads)
  {
    const Range part =
        partition(work.count, omp_get_num_threads(), omp_get_thread_num(), work.unit);
    try {
      if (part.size() > 0) {
        body(part.begin, part.end);
      }
    } catch (...) {
      // An exception that leaves a parallel region ends the process.
#pragma omp critical(kdtree_parallel_error)
      error = std::current_exception();
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

}  // namespace kdtree
