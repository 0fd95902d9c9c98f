// Attention over a long cache runs in splits of the keys, each on its own; the merge joins them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/tensor_view.h"
#include "kernels/cuda/attention_batch.cuh"

namespace kdtree {

// Partial results of (token, head) rows, one for each split of their keys. Those of splits behind a
// row's last key are not written, nor read.
struct AttentionPartials {
  float* values = nullptr;  // [partials, rows, stride] sum_j exp(s_j - m) value_j
  float2* stats = nullptr;  // [partials, rows] (m, sum_j exp(s_j - m)); m about the largest score
  std::int64_t num_rows = 0;
  std::int64_t stride = 0;  // value_dim, rounded up to whole float4

  __device__ float* row(std::int64_t partial, std::int64_t row) const {
    return values + (partial * num_rows + row) * stride;
  }
  __device__ float2* stat(std::int64_t partial, std::int64_t row) const {
    return stats + partial * num_rows + row;
  }
};

// How one op is split. All of it follows from static sizes: the split length and the number of
// partials from the cache's capacity and the heads, never from the rows of a call, because both
// decide the order of sums.
struct AttentionPlan {
  int split_length = 0;          // keys of a split
  int num_partials = 0;          // splits that a full slot has, and the tree's own
  std::int64_t stride = 0;       // floats of a partial
  std::int64_t pass_tokens = 0;  // tokens whose partials are held at a time; changes no bits
  std::int64_t scratch_bytes = 0;

  AttentionPartials partials(void* scratch, std::int64_t num_rows) const;
};
AttentionPlan plan_attention(std::int64_t capacity, std::int64_t num_heads, std::int64_t value_dim,
                             std::int64_t num_tokens, bool tree_split);

enum class ExpBase : std::uint8_t { kE, kTwo };  // of the scores: exp(s) or 2^s

struct AttentionMerge {
  AttentionBatch batch;
  AttentionPartials partials;
  int split_length = 0;
  // True: partial 0 is the row's tree, 1, 2, ... the splits of its prefix. False: partials 0, 1,
  // ... are the splits of prefix and block together.
  bool tree_split = false;
  int num_heads = 0;
  int value_dim = 0;
  ExpBase base = ExpBase::kE;
};

// output[token, head] = the softmax-weighted sum over all of the row's partials; zeros if it has no
// key. output [batch rows, heads * value_dim] float32 or bf16.
void merge_attention(const AttentionMerge& merge, const TensorView& output, cudaStream_t stream);

}  // namespace kdtree
