#include "weights/load_statistics.h"

#include <algorithm>

#include "weights/load_plan.h"
#include "weights/number_formats.h"

namespace kdtree {

namespace {

// Blocks of `size` that the range touches.
std::int64_t blocks_touched(Range range, std::int64_t size) {
  return (range.end + size - 1) / size - range.begin / size;
}

std::int64_t region_file_bytes(const LoadRegion& region) {
  const std::int64_t elements = region.rows.size() * region.columns.size();
  const std::int64_t value_bytes = dtype_bytes(region.values->dtype);
  switch (region.decode) {
    case LoadRegion::Decode::kCopy:
    case LoadRegion::Decode::kWiden:
      return elements * value_bytes;
    case LoadRegion::Decode::kInt4:
      return elements / kInt4PerWord * value_bytes +
             elements / region.group_size * dtype_bytes(region.scales->dtype);
    case LoadRegion::Decode::kFloat8:
      return elements * value_bytes + blocks_touched(region.rows, kFloat8Block) *
                                          blocks_touched(region.columns, kFloat8Block) *
                                          dtype_bytes(region.scales->dtype);
  }
  return 0;
}

}  // namespace

LoadStatistics& LoadStatistics::operator+=(const LoadStatistics& other) {
  bytes_read += other.bytes_read;
  checksum_bytes += other.checksum_bytes;
  own_bytes += other.own_bytes;
  seconds += other.seconds;
  staging_bytes = std::max(staging_bytes, other.staging_bytes);
  return *this;
}

double LoadStatistics::gigabytes_per_second() const {
  return seconds > 0 ? static_cast<double>(bytes_read) / 1e9 / seconds : 0;
}

std::int64_t max_staging_bytes(int num_threads, std::int64_t piece_bytes) {
  constexpr std::int64_t kScratchPieces = 4;
  return num_threads * (kSlotsPerThread + kScratchPieces) * piece_bytes;
}

std::int64_t own_bytes(const LoadPlan& plan) {
  std::int64_t bytes = 0;
  for (const LoadRegion& region : plan.regions) {
    bytes += region.values->random ? 0 : region_file_bytes(region);
  }
  for (const StoredTensor* tensor : plan.checksum_only) {
    bytes += tensor->bytes;
  }
  for (const ShapeCheck& shape : plan.shape_checks) {
    bytes += shape.tensor->bytes;
  }
  return bytes;
}

}  // namespace kdtree
