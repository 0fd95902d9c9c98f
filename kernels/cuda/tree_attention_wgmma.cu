// tree_attention on sm_90's warpgroup tensor cores, for bf16 rows of 512 + 64 values and many
// heads.
//
// A block takes 64 rows (token, head) and one split of their keys, 64 keys a tile, two tiles at a
// time. Warpgroup h scores tile 2i + h and owns the output's columns 256 h, ... for both tiles.
// Weights go through shared memory, and so does the reference of each row's exponents, which the
// warpgroups move on in turns: tile after tile, as one would. Warpgroup h alone reads columns 256
// h, ... of a tile as values, hence loads them again on its own.
#include "kernels/cuda/cuda_call.h"
#include "kernels/cuda/mma_sm80.cuh"
#include "kernels/cuda/tree_attention.cuh"
#include "kernels/cuda/wgmma_sm90.cuh"

namespace kdtree {
namespace {

constexpr int kRank = 512;
constexpr int kLatent = 576;
constexpr int kRows = 64;
[[maybe_unused]] constexpr int kKeys = 64;
constexpr int kThreads = 256;
[[maybe_unused]] constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kChunks = kLatent / 64;
constexpr int kChunkBytes = 64 * 128;
constexpr int kTileBytes = kChunks * kChunkBytes;
[[maybe_unused]] constexpr float kLazyGrowth = 8;  // as in the mma.sync kernel

// Shared memory. q's last chunk is in registers, which leaves room for both tiles' weights.
constexpr int kQuery = 0;
constexpr int kTiles = kQuery + (kChunks - 1) * kChunkBytes;
constexpr int kWeights = kTiles + 2 * kTileBytes;
constexpr int kReference = kWeights + 2 * kChunkBytes;  // [2, rows]
constexpr int kRescale = kReference + 2 * kRows * 4;    // [2, rows]
constexpr int kTotals = kRescale + 2 * kRows * 4;       // [rows] of the second warpgroup
constexpr int kBarriers = kTotals + kRows * 4;          // [2, chunks], q, [2] weights, totals
constexpr int kSharedBytes = kBarriers + (2 * kChunks + 4) * 8;
static_assert(kSharedBytes <= 227 * 1024);

// Named barriers, one for each warpgroup.
[[maybe_unused]] constexpr int kGroupBarrier = 4;

// Sets infinities and NaN of two bf16 to zero.
[[maybe_unused]] __device__ __forceinline__ std::uint32_t finite_or_zero(std::uint32_t pair) {
  if ((pair & 0x00007f80U) == 0x00007f80U) pair &= 0xffff0000U;
  if ((pair & 0x7f800000U) == 0x7f800000U) pair &= 0x0000ffffU;
  return pair;
}

__global__ void __launch_bounds__(kThreads, 1)
    tree_attention_wgmma_kernel(const TreeAttentionArguments<__nv_bfloat16> p,
                                const __grid_constant__ CUtensorMap query_map,
                                const __grid_constant__ CUtensorMap cache_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];

  SequenceTile tile;
  if (!find_tile(p.batch, p.num_heads, kRows, blockIdx.x, tile)) {
    return;
  }
  const bool is_tree = blockIdx.y == 0;
  int begin;
  int count;
  {
    const int prefix = p.batch.prefix(tile.sequence);
    begin = is_tree ? prefix : (static_cast<int>(blockIdx.y) - 1) * p.split_length;
    // Nodes behind the tile's last one are seen by none of its rows.
    const int last_row = min(tile.first_row + kRows, tile.num_rows) - 1;
    count = is_tree
                ? min(tile.tokens_before + last_row / p.num_heads + 1, p.batch.capacity - prefix)
                : min(prefix - begin, p.split_length);
    if (!is_tree && count <= 0) {
      return;  // behind the prefix; the merge knows
    }
  }
  const int num_tiles = (count + kKeys - 1) / kKeys;
  const int slot = static_cast<int>(p.batch.slot(tile.sequence));

  const int group = __shfl_sync(~0U, threadIdx.x / kGroup, 0);
  const int thread = threadIdx.x % kGroup;
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int g = lane / 4;
  const int t4 = lane % 4;
  const int row_a = warp * 16 + g;  // and row_a + 8
  const int rows_left = tile.num_rows - tile.first_row;
  const bool has_a = row_a < rows_left;
  const bool has_b = row_a + 8 < rows_left;
  const std::uint32_t base = shared_address(shared);
  const std::uint32_t barriers = base + kBarriers;
  const std::uint32_t query_barrier = barriers + 2 * kChunks * 8;
  // [2] the weights of the warpgroup's tile are there. A warpgroup publishes the next ones only
  // after the other one has published its own, hence waited for these: one phase ahead at most.
  const std::uint32_t ready_barriers = query_barrier + 8;
  const std::uint32_t totals_barrier = ready_barriers + 2 * 8;

  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * kChunks + 1; ++i) {
      mbarrier_init(barriers + i * 8, 1);
    }
    mbarrier_init(ready_barriers, kGroup);
    mbarrier_init(ready_barriers + 8, kGroup);
    mbarrier_init(totals_barrier, kGroup);
    mbarrier_init_fence();
  }
  __syncthreads();

  const auto load_chunk = [&](int buffer, int chunk, int t) {
    const std::uint32_t barrier = barriers + (buffer * kChunks + chunk) * 8;
    mbarrier_expect(barrier, kChunkBytes);
    load_box(base + kTiles + buffer * kTileBytes + chunk * kChunkBytes, &cache_map, chunk * 64,
             begin + t * kKeys, slot, barrier);
  };
  // This warpgroup's half of a tile's values; the rotated keys belong to who scores the tile.
  const auto load_half = [&](int buffer, int t) {
#pragma unroll 1
    for (int c = 0; c < 4; ++c) {
      load_chunk(buffer, group * 4 + c, t);
    }
    if (buffer == group) load_chunk(buffer, kChunks - 1, t);
  };
  const std::int64_t first_row =
      static_cast<std::int64_t>(tile.first_token - p.batch.first_row) * p.num_heads +
      tile.first_row;  // within the pass
  if (thread == 0) {
    if (num_tiles > 0) load_half(0, 0);
    if (num_tiles > 1) load_half(1, 1);
    if (group == 0) {
      mbarrier_expect(query_barrier, (kChunks - 1) * kChunkBytes);
      const int query_row = tile.first_token * p.num_heads + tile.first_row;
#pragma unroll 1
      for (int c = 0; c < kChunks - 1; ++c) {
        load_box(base + kQuery + c * kChunkBytes, &query_map, c * 64, query_row, 0, query_barrier);
      }
    }
  }
  std::uint32_t rotated_query[4][4];
  int node_a = -1;
  int node_b = -1;
  {
    const auto row_words = [&](int row) {
      return reinterpret_cast<const std::uint32_t*>(
                 p.query + (tile.first_token + row / p.num_heads) * p.query_stride +
                 static_cast<std::int64_t>(row % p.num_heads) * kLatent) +
             kRank / 2;
    };
    const int row = tile.first_row + row_a;
    const std::uint32_t* const a = row_words(has_a ? row : tile.first_row);
    const std::uint32_t* const b = row_words(has_b ? row + 8 : tile.first_row);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      rotated_query[k][0] = has_a ? __ldg(a + k * 8 + t4) : 0;
      rotated_query[k][1] = has_b ? __ldg(b + k * 8 + t4) : 0;
      rotated_query[k][2] = has_a ? __ldg(a + k * 8 + 4 + t4) : 0;
      rotated_query[k][3] = has_b ? __ldg(b + k * 8 + 4 + t4) : 0;
    }
    if (has_a) node_a = tile.tokens_before + row / p.num_heads;
    if (has_b) node_b = tile.tokens_before + (row + 8) / p.num_heads;
  }

  float output[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    output[i] = 0;
  }
  float scores[32];
  float reference_a = -INFINITY;
  float reference_b = -INFINITY;
  float total_a = 0;  // of the tiles that this warpgroup scores
  float total_b = 0;
  auto* const references = reinterpret_cast<float*>(shared + kReference);
  auto* const rescales = reinterpret_cast<float*>(shared + kRescale);
  const float scale = p.softmax_scale * 1.44269504088896340736F;  // scores to the base 2

  const auto score_tile = [&](int parity) {
    const std::uint32_t keys = base + kTiles + group * kTileBytes;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int c = i < 4 ? i : i == 4 ? kChunks - 1 : i - 1;
      mbarrier_wait(barriers + (group * kChunks + c) * 8, parity);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const std::uint64_t b = depth_major(keys + c * kChunkBytes + k * 32);
        if (c < kChunks - 1) {
          wgmma_64x64(scores, depth_major(base + kQuery + c * kChunkBytes + k * 32), b, i + k);
        } else {
          wgmma_64x64(scores, rotated_query[k], b);
        }
      }
    }
    wgmma_commit();
    wgmma_wait();
  };
  const auto add_values = [&](int buffer) {
    const std::uint32_t values = base + kTiles + buffer * kTileBytes + group * 4 * kChunkBytes;
    const std::uint32_t weights = base + kWeights + buffer * kChunkBytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_64x256(output, depth_major(weights + k * 32), column_major(values + k * 16 * 128));
    }
    wgmma_commit();
  };
  const auto rescale_output = [&](float a, float b) {
    if (__any_sync(~0U, a != 1 || b != 1)) {
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        output[4 * j] *= a;
        output[4 * j + 1] *= a;
        output[4 * j + 2] *= b;
        output[4 * j + 3] *= b;
      }
    }
  };
  // Masks the scores of tile t, makes its values safe and finds the rows' highest scores.
  const auto mask_tile = [&](int t, float& highest_a, float& highest_b) {
    const int left = count - t * kKeys;
    if (is_tree || left < kKeys) {
      std::uint64_t sees_a = left < kKeys ? (std::uint64_t{1} << left) - 1 : ~std::uint64_t{0};
      std::uint64_t sees_b = sees_a;
      if (is_tree) {
        const int token = tile.first_token - tile.tokens_before;
        sees_a &= node_a < 0 ? 0 : p.visible_nodes(token + node_a, node_a, t);
        sees_b &= node_b < 0 ? 0 : p.visible_nodes(token + node_b, node_b, t);
      }
      bool odd = false;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = j * 8 + t4 * 2 + e;
          odd |=
              !(fabsf(scores[4 * j + e]) < INFINITY) || !(fabsf(scores[4 * j + 2 + e]) < INFINITY);
          if (((sees_a >> column) & 1U) == 0) scores[4 * j + e] = -INFINITY;
          if (((sees_b >> column) & 1U) == 0) scores[4 * j + 2 + e] = -INFINITY;
        }
      }
      // From here on the warpgroup has read the tile as keys and may change it. Weight 0 times NaN
      // must not arise: rows behind the last key become zeros, and so do NaN and infinities of a
      // node's row; nodes that see it have got them through its score.
      odd = named_barrier_or(kGroupBarrier + group, kGroup, odd);
      unsigned char* const values = shared + kTiles + group * kTileBytes;
      if (odd && is_tree) {
        auto* const words = reinterpret_cast<std::uint32_t*>(values);
        for (int i = thread; i < kRank / 64 * kChunkBytes / 4; i += kGroup) {
          const int key = i % (kChunkBytes / 4) / (128 / 4);
          if (key < left) {  // the others become zeros below
            words[i] = finite_or_zero(words[i]);
          }
        }
      }
      for (int i = thread; i < (kKeys - left) * (kRank / 8); i += kGroup) {
        const int key = left + i / (kRank / 8);
        const int unit = i % (kRank / 8);
        *reinterpret_cast<uint4*>(values + unit / 8 * kChunkBytes + key * 128 + unit % 8 * 16) =
            make_uint4(0, 0, 0, 0);
      }
    }
    highest_a = -INFINITY;
    highest_b = -INFINITY;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      highest_a = fmaxf(highest_a, fmaxf(scores[4 * j], scores[4 * j + 1]));
      highest_b = fmaxf(highest_b, fmaxf(scores[4 * j + 2], scores[4 * j + 3]));
    }
    highest_a = fmaxf(highest_a, __shfl_xor_sync(~0U, highest_a, 1));
    highest_a = fmaxf(highest_a, __shfl_xor_sync(~0U, highest_a, 2)) * scale;
    highest_b = fmaxf(highest_b, __shfl_xor_sync(~0U, highest_b, 1));
    highest_b = fmaxf(highest_b, __shfl_xor_sync(~0U, highest_b, 2)) * scale;
  };
  // Moves the references on, writes this warpgroup's weights and tells the other one. Returns the
  // factors for the output.
  const auto publish_weights = [&](float highest_a, float highest_b, float& factor_a,
                                   float& factor_b) {
    const float new_a = highest_a > reference_a + kLazyGrowth ? highest_a : reference_a;
    const float new_b = highest_b > reference_b + kLazyGrowth ? highest_b : reference_b;
    const float safe_a = new_a == -INFINITY ? 0 : new_a;  // no key seen so far
    const float safe_b = new_b == -INFINITY ? 0 : new_b;
    factor_a = exp2_approx(reference_a - safe_a);
    factor_b = exp2_approx(reference_b - safe_b);
    float sum_a = 0;
    float sum_b = 0;
    unsigned char* const weights = shared + kWeights + group * kChunkBytes + t4 * 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float a0 = exp2_approx(fmaf(scores[4 * j], scale, -safe_a));
      const float a1 = exp2_approx(fmaf(scores[4 * j + 1], scale, -safe_a));
      const float b0 = exp2_approx(fmaf(scores[4 * j + 2], scale, -safe_b));
      const float b1 = exp2_approx(fmaf(scores[4 * j + 3], scale, -safe_b));
      sum_a += a0 + a1;
      sum_b += b0 + b1;
      unsigned char* const unit = weights + ((j ^ g) << 4);
      *reinterpret_cast<std::uint32_t*>(unit + row_a * 128) = pack_bf16(a0, a1);
      *reinterpret_cast<std::uint32_t*>(unit + (row_a + 8) * 128) = pack_bf16(b0, b1);
    }
    total_a = fmaf(total_a, factor_a, sum_a);
    total_b = fmaf(total_b, factor_b, sum_b);
    reference_a = new_a;
    reference_b = new_b;
    if (t4 == 0) {
      references[group * kRows + row_a] = new_a;
      references[group * kRows + row_a + 8] = new_b;
      rescales[group * kRows + row_a] = factor_a;
      rescales[group * kRows + row_a + 8] = factor_b;
    }
    fence_async_proxy();
    mbarrier_arrive(ready_barriers + group * 8);
    named_barrier(kGroupBarrier + group, kGroup);
  };
  // Takes over what the other warpgroup has published.
  const auto receive = [&](float& factor_a, float& factor_b) {
    const int other = (1 - group) * kRows + row_a;
    reference_a = references[other];
    reference_b = references[other + 8];
    factor_a = rescales[other];
    factor_b = rescales[other + 8];
    total_a *= factor_a;
    total_b *= factor_b;
  };
  const auto wait_half = [&](int buffer, int parity) {
#pragma unroll 1
    for (int c = 0; c < 4; ++c) {
      mbarrier_wait(barriers + (buffer * kChunks + group * 4 + c) * 8, parity);
    }
  };
  // All of the warpgroup has read its half of the buffer: the next tile may come.
  const auto reload_half = [&](int buffer, int t) {
    if (t < num_tiles) {
      named_barrier(kGroupBarrier + group, kGroup);
      if (thread == 0) load_half(buffer, t);
    }
  };

  mbarrier_wait(query_barrier, 0);
  const int num_pairs = (num_tiles + 1) / 2;
  float factor_a;
  float factor_b;
  float highest_a;
  float highest_b;
  if (group == 0) {
    for (int i = 0; i < num_pairs; ++i) {
      const int t = 2 * i;
      score_tile(i & 1);
      mask_tile(t, highest_a, highest_b);
      publish_weights(highest_a, highest_b, factor_a, factor_b);
      rescale_output(factor_a, factor_b);
      add_values(0);
      wgmma_wait();
      reload_half(0, t + 2);
      if (t + 1 < num_tiles) {
        mbarrier_wait(ready_barriers + 8, i & 1);
        receive(factor_a, factor_b);
        wait_half(1, i & 1);
        rescale_output(factor_a, factor_b);
        add_values(1);
        wgmma_wait();
        reload_half(1, t + 3);
      }
    }
  } else {
    for (int i = 0; i < num_pairs; ++i) {
      const int t = 2 * i + 1;
      const bool has_tile = t < num_tiles;
      if (has_tile) {
        score_tile(i & 1);
        mask_tile(t, highest_a, highest_b);
      }
      mbarrier_wait(ready_barriers, i & 1);
      receive(factor_a, factor_b);
      wait_half(0, i & 1);
      rescale_output(factor_a, factor_b);
      add_values(0);
      if (has_tile) {
        publish_weights(highest_a, highest_b, factor_a, factor_b);
        wgmma_wait();
        reload_half(0, t + 1);
        rescale_output(factor_a, factor_b);
        add_values(1);
        wgmma_wait();
        reload_half(1, t + 2);
      } else {
        wgmma_wait();
      }
    }
  }

  total_a += __shfl_xor_sync(~0U, total_a, 1);
  total_a += __shfl_xor_sync(~0U, total_a, 2);
  total_b += __shfl_xor_sync(~0U, total_b, 1);
  total_b += __shfl_xor_sync(~0U, total_b, 2);
  auto* const totals = reinterpret_cast<float*>(shared + kTotals);
  if (group == 1) {
    if (t4 == 0) {
      totals[row_a] = total_a;
      totals[row_a + 8] = total_b;
    }
    mbarrier_arrive(totals_barrier);
  } else {
    mbarrier_wait(totals_barrier, 0);
  }
  // The last tile's warpgroup has the final reference; the other one has received it, or it has
  // received the other's.
  if (group == 0 && t4 == 0) {
    if (has_a) {
      *p.partials.stat(blockIdx.y, first_row + row_a) = {reference_a, total_a + totals[row_a]};
    }
    if (has_b) {
      *p.partials.stat(blockIdx.y, first_row + row_a + 8) = {reference_b,
                                                             total_b + totals[row_a + 8]};
    }
  }
  float* const target = p.partials.row(blockIdx.y, first_row + row_a) + group * 256 + t4 * 2;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    if (has_a) {
      *reinterpret_cast<float2*>(target + j * 8) = {output[4 * j], output[4 * j + 1]};
    }
    if (has_b) {
      *reinterpret_cast<float2*>(target + 8 * kRank + j * 8) = {output[4 * j + 2],
                                                                output[4 * j + 3]};
    }
  }
#else
  __trap();  // the launcher takes devices of compute capability 9.0 only, which need sm_90a code
#endif
}

// The driver's encoder, through the runtime: the library is not linked against the driver.
auto tensor_map_encoder() {
  using Encoder = decltype(&cuTensorMapEncodeTiled);
  static const Encoder encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                cudaEnableDefault, &found),
               "looking up cuTensorMapEncodeTiled");
    check(found == cudaDriverEntryPointSuccess, "this driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encoder>(entry);
  }();
  return encoder;
}

// [planes, rows, 576] bf16 in boxes of 64 rows and 64 columns.
CUtensorMap make_tensor_map(const __nv_bfloat16* data, std::int64_t planes,
                            std::int64_t plane_stride, std::int64_t rows) {
  const cuuint64_t sizes[3] = {kLatent, static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(planes)};
  const cuuint64_t strides[2] = {kLatent * 2, static_cast<cuuint64_t>(plane_stride) * 2};
  const cuuint32_t box[3] = {64, 64, 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = tensor_map_encoder()(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<__nv_bfloat16*>(data), sizes, strides,
      box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled for [{}, {}, {}]: error {}", planes, rows,
        kLatent, static_cast<int>(status));
  return map;
}

bool aligned(const void* pointer, std::int64_t stride_bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0 && stride_bytes % 16 == 0;
}

}  // namespace

bool fits_tree_attention_wgmma(const TreeAttentionArguments<__nv_bfloat16>& arguments,
                               const cudaDeviceProp& device) {
  // Tiles of 64 rows: with few heads they stay empty in plain decoding.
  constexpr int kMinHeads = 32;
  return device.major == 9 && device.minor == 0 && arguments.num_heads >= kMinHeads &&
         arguments.kv_lora_rank == kRank && arguments.latent_dim == kLatent &&
         arguments.softmax_scale > 0 &&
         arguments.query_stride == static_cast<std::int64_t>(arguments.num_heads) * kLatent &&
         aligned(arguments.query, 0) && aligned(arguments.cache, arguments.slot_stride * 2);
}

void tree_attention_wgmma(const TreeAttentionArguments<__nv_bfloat16>& arguments,
                          cudaStream_t stream) {
  const AttentionBatch& batch = arguments.batch;
  const std::int64_t heads = arguments.num_heads;
  // Rows of this pass and those in front of it: rows behind it are zeros to TMA.
  const std::int64_t query_rows = (batch.first_row + batch.num_rows) * heads;
  const CUtensorMap query_map =
      make_tensor_map(arguments.query, 1, query_rows * kLatent, query_rows);
  const CUtensorMap cache_map =
      make_tensor_map(arguments.cache, batch.num_slots, arguments.slot_stride, batch.capacity);
  check_cuda(cudaFuncSetAttribute(tree_attention_wgmma_kernel,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
             "cudaFuncSetAttribute for tree_attention_wgmma");
  const std::int64_t tiles = max_tiles(batch.num_rows * heads, batch.num_sequences, kRows);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(arguments.num_partials));
  tree_attention_wgmma_kernel<<<grid, kThreads, kSharedBytes, stream>>>(arguments, query_map,
                                                                        cache_map);
  check_launch("tree_attention_wgmma");
}

}  // namespace kdtree
