// Softmax attention of one query over a list of cache rows.
#pragma once

#include <cstdint>
#include <span>

namespace kdtree {

// The keys of one attention head: entry i is key_dim values at keys + i * stride, and value_dim
// values at values + i * stride.
struct HeadCache {
  const float* keys = nullptr;
  const float* values = nullptr;
  std::int64_t stride = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
};

struct HeadQuery {
  const float* query = nullptr;
  float scale = 1;
  std::span<const std::int32_t> visible;  // the entries it attends to, in this order
};

// output = sum_j softmax_j(query . key[visible[j]] * scale) * value[visible[j]]; zeros if nothing
// is visible. Every sum runs over j in the order of `visible` (that of the weights in eight lanes),
// and nothing else enters: the same keys in the same order give the same bits, wherever they lie.
// `scores` is scratch, one value per visible entry.
void attend(const HeadCache& cache, const HeadQuery& head, float* scores, float* output);

}  // namespace kdtree
