// The golden outputs that a bundle carries, and whether a run reproduces them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/request.h"
#include "weights/checkpoint.h"

namespace kdtree {

struct GoldenCase {
  std::vector<std::int32_t> prompt_ids;
  std::vector<std::int32_t> greedy_ids;
};

struct GoldenCases {
  std::string weights;  // "original" or "quantized"
  std::vector<GoldenCase> cases;
};

// InputError if the checkpoint has no goldens for these weights, or malformed ones.
GoldenCases read_golden(const TargetCheckpoint& target, const std::string& weights);

class GoldenReport {
 public:
  // Logs the first difference of a result, if there is one.
  void compare(const GoldenCases& golden, const Result& result);
  std::int64_t mismatches() const { return mismatches_; }
  // Logs the verdict.
  void log(const GoldenCases& golden) const;

 private:
  std::int64_t mismatches_ = 0;
  std::int64_t tokens_ = 0;
};

}  // namespace kdtree
