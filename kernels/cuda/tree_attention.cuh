// What the kernels of tree_attention share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/attention_batch.cuh"
#include "kernels/cuda/attention_merge.cuh"

namespace kdtree {

template <class T>
struct TreeAttentionArguments {
  AttentionBatch batch;
  const T* query = nullptr;  // [batch rows, heads * latent_dim]
  std::int64_t query_stride = 0;
  const T* cache = nullptr;  // [slots, capacity, latent_dim]
  std::int64_t slot_stride = 0;
  const std::int64_t* mask = nullptr;  // [batch rows, mask_words], or null: chains
  std::int64_t mask_stride = 0;
  int mask_words = 0;
  int num_heads = 0;
  int kv_lora_rank = 0;
  int latent_dim = 0;
  float softmax_scale = 1;
  int split_length = 0;
  int num_partials = 0;  // partial 0 is the tree's, i + 1 split i of the prefix
  AttentionPartials partials;

  // Nodes [64 * word, 64 * word + 64) that node `node`, batch row `token`, sees. Bits above the
  // node itself are cut off: those rows may not have been written.
  __device__ __forceinline__ std::uint64_t visible_nodes(int token, int node, int word) const {
    std::uint64_t bits = ~std::uint64_t{0};
    if (mask != nullptr) {
      bits = word < mask_words ? static_cast<std::uint64_t>(mask[token * mask_stride + word]) : 0;
    }
    const int last = node - word * 64;
    if (last < 0) return 0;
    return last >= 63 ? bits : bits & ((std::uint64_t{2} << last) - 1);
  }
};

// The tensor core kernels: bf16, heads of DeepSeek-V3 and Kimi K2 only. Which kernel runs follows
// from the device, shapes, strides and alignment, never from the rows of a call. Both leave the
// pass's partials, with scores to the base 2.
bool fits_tree_attention_mma(const TreeAttentionArguments<__nv_bfloat16>& arguments);
void tree_attention_mma(const TreeAttentionArguments<__nv_bfloat16>& arguments,
                        cudaStream_t stream);

bool fits_tree_attention_wgmma(const TreeAttentionArguments<__nv_bfloat16>& arguments,
                               const cudaDeviceProp& device);
void tree_attention_wgmma(const TreeAttentionArguments<__nv_bfloat16>& arguments,
                          cudaStream_t stream);

}  // namespace kdtree
