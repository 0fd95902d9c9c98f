// What loading read from files, and how long that took.
#pragma once

#include <cstdint>

namespace kdtree {

struct LoadPlan;

// Of one rank, or summed over several. Only the tensors' bytes count, not the files' headers; bytes
// that are read twice count twice.
struct LoadStatistics {
  std::int64_t bytes_read = 0;      // all of them
  std::int64_t checksum_bytes = 0;  // of these, read for a checksum alone
  std::int64_t own_bytes = 0;       // own_bytes() of the plan: what had to be read
  double seconds = 0;

  LoadStatistics& operator+=(const LoadStatistics& other);
  // 10^9 bytes read a second; 0 if no time has passed.
  double gigabytes_per_second() const;
};

// Bytes in files of what a rank holds by this plan, in the stored format: the rows and columns of
// its regions, their scales (of fp8 the blocks that the region touches), the contents of
// weight_shape tensors, and the whole tensors whose checksum is this rank's to verify. Random
// tensors are in no file.
std::int64_t own_bytes(const LoadPlan& plan);

}  // namespace kdtree
