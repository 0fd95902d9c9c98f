// Results of two runs whose sums over ranks run in another order.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>

#include "engine/request.h"

namespace kdtree {

// Sums over ranks run in another order, so that tokens may first differ at a near-tie of either.
inline void expect_same_tokens(const Result& got, const Result& want) {
  if (got.output_ids == want.output_ids) {
    return;
  }
  const auto [a, b] = std::mismatch(got.output_ids.begin(), got.output_ids.end(),
                                    want.output_ids.begin(), want.output_ids.end());
  const std::int64_t first = a - got.output_ids.begin();
  const auto near_tie = [first](const Result& result) {
    return std::find(result.near_ties.begin(), result.near_ties.end(), first) !=
           result.near_ties.end();
  };
  EXPECT_TRUE(near_tie(got) || near_tie(want))
      << "token " << first << " of " << want.output_ids.size() << " differs and is no near-tie";
}

}  // namespace kdtree
