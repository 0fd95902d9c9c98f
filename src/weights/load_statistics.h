// What loading read from files, and how long that took.
#pragma once

#include <cstdint>

namespace kdtree {

struct LoadPlan;

// Pieces that a reading thread may have on their way to the device.
inline constexpr std::int64_t kSlotsPerThread = 2;

// Of one rank, or summed over several. Only the tensors' bytes count, not the files' headers; bytes
// that are read twice count twice.
struct LoadStatistics {
  std::int64_t bytes_read = 0;      // all of them
  std::int64_t checksum_bytes = 0;  // of these, read for a checksum alone
  std::int64_t own_bytes = 0;       // own_bytes() of the plan: what had to be read
  double seconds = 0;
  // Most host memory of one load that pieces and the readers' scratch held: see
  // max_staging_bytes().
  std::int64_t staging_bytes = 0;

  // Sums, but for staging_bytes, of which the larger stays.
  LoadStatistics& operator+=(const LoadStatistics& other);
  // 10^9 bytes read a second; 0 if no time has passed.
  double gigabytes_per_second() const;
};

// What a load holds in host memory between file and device, at most, in bytes: for each thread two
// slots of piece_bytes and scratch of a reader, four times piece_bytes (a piece of FP32 values that
// become bf16 is twice as long as read, and as long again as FP32). A row longer than a piece is
// cut. Not in it: the block scales of the fp8 matrix that a thread reads, 8 bytes for 128 x 128
// values.
std::int64_t max_staging_bytes(int num_threads, std::int64_t piece_bytes);

// Bytes in files of what a rank holds by this plan, in the stored format: the rows and columns of
// its regions, their scales (of fp8 the blocks that the region touches), the contents of
// weight_shape tensors, and the whole tensors whose checksum is this rank's to verify. Random
// tensors are in no file.
std::int64_t own_bytes(const LoadPlan& plan);

}  // namespace kdtree
