// How a dimension is split over ranks: contiguous parts, the remainder on the low ranks, parts may
// be empty.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kdtree {

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
  bool contains(std::int64_t index) const { return index >= begin && index < end; }
  bool operator==(const Range&) const = default;
};

// Part `index` of `parts` of [0, total), in whole units of `unit` (the last part also takes a
// broken last unit). With unit 1 the first total % parts parts hold one more than the others.
constexpr Range partition(std::int64_t total, std::int64_t parts, std::int64_t index,
                          std::int64_t unit = 1) {
  const std::int64_t units = (total + unit - 1) / unit;
  const std::int64_t base = units / parts;
  const std::int64_t rest = units % parts;
  const std::int64_t begin = index * base + std::min(index, rest);
  const std::int64_t count = base + (index < rest ? 1 : 0);
  return {std::min(total, begin * unit), std::min(total, (begin + count) * unit)};
}

}  // namespace kdtree
