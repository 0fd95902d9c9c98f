// tree_attention on tensor cores for bf16 rows of 512 + 64 values, with mma.sync: runs on every GPU
// from sm_80 on, within the 99 KB of shared memory that sm_120 has.
//
// A block takes 16, 32 or 64 rows (token, head) and one split of their keys, 32 keys at a time in
// two stages. Keys and values are the same shared bytes. Its 8 warps are
//   for q.k:    groups of 16 rows x groups of keys x two halves of the depth. A warp keeps its part
//               of q in registers. The two warps of a pair swap eight rows of partial scores, so
//               that each has eight full rows for the softmax, still in registers;
//   for p.v:    eight slices of 64 columns, all rows.
// Every sum has the same order for each of the three row tiles: the tile changes no bits, so that
// it may follow from the number of rows.
#include "kernels/cuda/cuda_call.h"
#include "kernels/cuda/mma_sm80.cuh"
#include "kernels/cuda/tree_attention.cuh"

namespace kdtree {
namespace {

constexpr int kRank = 512;
constexpr int kLatent = 576;
constexpr int kKeys = 32;  // of a stage
constexpr int kStages = 2;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kDepthSteps = kLatent / 16 / 2;  // 16-deep products of a warp: half of the depth

// A stage holds nine chunks of 64 columns: [chunk, key, 128 bytes], 16-byte units XOR-swizzled with
// the key, which makes plain and transposed ldmatrix free of bank conflicts.
constexpr int kChunks = kLatent / 64;
constexpr int kChunkBytes = kKeys * 128;
constexpr int kStageBytes = kChunks * kChunkBytes;
constexpr int kWeightPitch = kKeys + 8;  // bf16; the eight spread ldmatrix over the banks

// The reference of the exponent follows the maximum only when that has grown by more than 2^8: O is
// rarely rescaled, and weights up to 2^8 cost no precision.
constexpr float kLazyGrowth = 8;

constexpr int kMaxSharedBytes = 99 * 1024;  // sm_120's limit for a block

template <int kRowGroups>
struct Layout {
  static constexpr int kRows = 16 * kRowGroups;
  static constexpr int kKeyGroups = 4 / kRowGroups;
  static constexpr int kTiles = kKeys / 8 / kKeyGroups;  // score tiles of eight keys a warp
  static constexpr int kSwap = kStages * kStageBytes;    // [warp, tile, lane] float2
  static constexpr int kWeights = kSwap + kWarps * kTiles * 32 * 8;     // [row, pitch] bf16
  static constexpr int kRescale = kWeights + kRows * kWeightPitch * 2;  // [row]
  static constexpr int kHighest = kRescale + kRows * 4;                 // [key group, row]
  static constexpr int kTotals = kHighest + kKeyGroups * kRows * 4;     // [tile, thread]
  static constexpr int kRowTotals = kTotals + kTiles * kThreads * 4;    // [eight keys, row]
  static constexpr int kNodes = kRowTotals + (kKeys / 8) * kRows * 4;   // [row]
  static constexpr int kBytes = kNodes + kRows * 4;
  static_assert(kBytes <= kMaxSharedBytes);
  static_assert(kWeights % 16 == 0 && kRescale % 16 == 0);
};

// Sets infinities and NaN of two bf16 to zero.
__device__ __forceinline__ std::uint32_t finite_or_zero(std::uint32_t pair) {
  if ((pair & 0x00007f80U) == 0x00007f80U) pair &= 0xffff0000U;
  if ((pair & 0x7f800000U) == 0x7f800000U) pair &= 0x0000ffffU;
  return pair;
}

template <int kRowGroups>
__global__ void __launch_bounds__(kThreads, 1)
    tree_attention_mma_kernel(const TreeAttentionArguments<__nv_bfloat16> p) {
  using L = Layout<kRowGroups>;
  constexpr int kKeyGroups = L::kKeyGroups;
  constexpr int kTiles = L::kTiles;
  extern __shared__ __align__(1024) unsigned char shared[];

  SequenceTile tile;
  if (!find_tile(p.batch, p.num_heads, L::kRows, blockIdx.x, tile)) {
    return;
  }
  const bool is_tree = blockIdx.y == 0;
  int begin;
  int count;
  {
    const int prefix = p.batch.prefix(tile.sequence);
    begin = is_tree ? prefix : (static_cast<int>(blockIdx.y) - 1) * p.split_length;
    // Nodes behind the tile's last one are seen by none of its rows.
    const int last_row = min(tile.first_row + L::kRows, tile.num_rows) - 1;
    count = is_tree
                ? min(tile.tokens_before + last_row / p.num_heads + 1, p.batch.capacity - prefix)
                : min(prefix - begin, p.split_length);
    if (!is_tree && count <= 0) {
      return;  // behind the prefix; the merge knows
    }
  }
  const int num_stages = (count + kKeys - 1) / kKeys;
  const auto* const keys =
      reinterpret_cast<const unsigned char*>(p.cache + p.batch.slot(tile.sequence) * p.slot_stride +
                                             static_cast<std::int64_t>(begin) * kLatent);

  const int thread = threadIdx.x;
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int g = lane / 4;
  const int t4 = lane % 4;
  const int row_group = warp / (2 * kKeyGroups);
  const int key_group = warp / 2 % kKeyGroups;
  const int depth_half = warp % 2;
  const int own_row = row_group * 16 + depth_half * 8 + g;  // of the softmax
  const std::uint32_t base = shared_address(shared);

  // Eight threads load a key. What lies behind the last key may be NaN: zeros instead.
  const auto load_stage = [&](int stage) {
    const int key = thread / 8;
    const int unit = thread % 8;
    const bool inside = stage * kKeys + key < count;
    const unsigned char* const source =
        inside ? keys + static_cast<std::int64_t>(stage * kKeys + key) * (kLatent * 2) + unit * 16
               : keys;
    const std::uint32_t target =
        base + (stage % kStages) * kStageBytes + key * 128 + ((unit ^ (key % 8)) << 4);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      copy_async_16(target + c * kChunkBytes, source + (inside ? c * 128 : 0), inside ? 16 : 0);
    }
    copy_async_commit();
  };
  if (num_stages > 0) load_stage(0);

  // This warp's part of q as A operands: of each 64-column chunk two of the four steps.
  std::uint32_t q[kDepthSteps][4];
  {
    const int row_a = tile.first_row + row_group * 16 + g;
    const int row_b = row_a + 8;
    const auto row_words = [&](int row) {
      return reinterpret_cast<const std::uint32_t*>(
          p.query + (tile.first_token + row / p.num_heads) * p.query_stride +
          static_cast<std::int64_t>(row % p.num_heads) * kLatent);
    };
    const bool has_a = row_a < tile.num_rows;
    const bool has_b = row_b < tile.num_rows;
    const std::uint32_t* const a = row_words(has_a ? row_a : tile.first_row);
    const std::uint32_t* const b = row_words(has_b ? row_b : tile.first_row);
#pragma unroll
    for (int i = 0; i < kDepthSteps; ++i) {
      const int word = ((i / 2) * 4 + depth_half * 2 + i % 2) * 8 + t4;
      q[i][0] = has_a ? __ldg(a + word) : 0;
      q[i][1] = has_b ? __ldg(b + word) : 0;
      q[i][2] = has_a ? __ldg(a + word + 4) : 0;
      q[i][3] = has_b ? __ldg(b + word + 4) : 0;
    }
  }

  auto* const nodes = reinterpret_cast<int*>(shared + L::kNodes);
  if (thread < L::kRows) {
    const int row = tile.first_row + thread;
    nodes[thread] = row < tile.num_rows ? tile.tokens_before + row / p.num_heads : -1;
  }
  // Row sums stay in shared memory, one for each thread and eight keys: registers are full.
  auto* const totals = reinterpret_cast<float*>(shared + L::kTotals) + thread;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    totals[i * kThreads] = 0;
  }
  float output[kRowGroups][8][4] = {};
  float reference = -INFINITY;  // of own_row

  // Operand addresses within a stage. B of q.k: rows of keys; B of p.v: the same bytes transposed.
  std::uint32_t key_address[2];
  {
    const int key = (kTiles >= 2 ? (lane / 16) * 8 : 0) + lane % 8;
    const int unit = lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      key_address[j] = base + (key_group * (kKeys / kKeyGroups) + key) * 128 +
                       (((depth_half * 4 + 2 * j + unit) ^ (lane % 8)) << 4);
    }
  }
  std::uint32_t value_address[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    value_address[j] =
        base + warp * kChunkBytes + (lane % 16) * 128 + (((2 * j + lane / 16) ^ (lane % 8)) << 4);
  }
  const std::uint32_t weight_address =
      base + L::kWeights + ((lane % 16) * kWeightPitch + (lane / 16) * 8) * 2;
  auto* const highest = reinterpret_cast<float*>(shared + L::kHighest);
  auto* const rescale = reinterpret_cast<float*>(shared + L::kRescale);
  const float scale = p.softmax_scale * 1.44269504088896340736F;  // scores to the base 2

  for (int stage = 0; stage < num_stages; ++stage) {
    copy_async_wait<kStages - 2>();
    __syncthreads();  // the stage is there, and everyone has left the other one
    if (stage + 1 < num_stages) load_stage(stage + 1);
    const std::uint32_t stage_offset = (stage % kStages) * kStageBytes;

    // Scores of 16 rows and this warp's keys over half of the depth.
    float scores[kTiles][4] = {};
#pragma unroll
    for (int i = 0; i < kDepthSteps; ++i) {
      const std::uint32_t address = key_address[i % 2] + stage_offset + (i / 2) * kChunkBytes;
      if constexpr (kTiles == 1) {
        std::uint32_t b[2];
        load_matrix_x2(b, address);
        mma_bf16(scores[0], q[i], b[0], b[1]);
      } else {
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
          std::uint32_t b[4];
          load_matrix_x4(b, address + n * 16 * 128);
          mma_bf16(scores[2 * n], q[i], b[0], b[1]);
          mma_bf16(scores[2 * n + 1], q[i], b[2], b[3]);
        }
      }
    }

    // The pair's other warp gets the eight rows that are its own.
    auto* const swap = reinterpret_cast<float2*>(shared + L::kSwap) + lane;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      swap[(warp * kTiles + i) * 32] = depth_half != 0 ? make_float2(scores[i][0], scores[i][1])
                                                       : make_float2(scores[i][2], scores[i][3]);
    }
    named_barrier(1 + warp / 2, 64);

    float own[kTiles][2];
    bool odd = false;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float2 other = swap[((warp ^ 1) * kTiles + i) * 32];
      // Rounded step by step: a contraction that differs between row tiles would change bits.
      own[i][0] =
          __fmul_rn(__fadd_rn(depth_half != 0 ? scores[i][2] : scores[i][0], other.x), scale);
      own[i][1] =
          __fmul_rn(__fadd_rn(depth_half != 0 ? scores[i][3] : scores[i][1], other.y), scale);
    }
    if (is_tree || stage == num_stages - 1) {
      std::uint32_t visible =
          static_cast<std::uint32_t>((std::uint64_t{1} << min(count - stage * kKeys, kKeys)) - 1);
      if (is_tree) {
        const int node = nodes[own_row];
        const int token = tile.first_token - tile.tokens_before + node;
        visible &= node < 0 ? 0
                            : static_cast<std::uint32_t>(p.visible_nodes(token, node, stage / 2) >>
                                                         (stage % 2 * 32));
      }
      const int column = key_group * (kKeys / kKeyGroups) + t4 * 2;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          odd |= !(fabsf(own[i][e]) < INFINITY);
          if (((visible >> (column + i * 8 + e)) & 1U) == 0) own[i][e] = -INFINITY;
        }
      }
    }

    float row_highest = own[0][0];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      row_highest = fmaxf(row_highest, fmaxf(own[i][0], own[i][1]));
    }
    row_highest = fmaxf(row_highest, __shfl_xor_sync(~0U, row_highest, 1));
    row_highest = fmaxf(row_highest, __shfl_xor_sync(~0U, row_highest, 2));
    if constexpr (kKeyGroups > 1) {
      if (t4 == 0) highest[key_group * L::kRows + own_row] = row_highest;
      named_barrier(8 + row_group, 64 * kKeyGroups);
#pragma unroll
      for (int h = 0; h < kKeyGroups; ++h) {
        row_highest = fmaxf(row_highest, highest[h * L::kRows + own_row]);
      }
    }
    const float new_reference =
        row_highest > __fadd_rn(reference, kLazyGrowth) ? row_highest : reference;
    const float safe = new_reference == -INFINITY ? 0 : new_reference;  // no key seen so far
    const float factor = exp2_approx(__fsub_rn(reference, safe));
    auto* const weights = reinterpret_cast<std::uint32_t*>(
        shared + L::kWeights +
        (own_row * kWeightPitch + key_group * (kKeys / kKeyGroups) + t4 * 2) * 2);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float a = exp2_approx(__fsub_rn(own[i][0], safe));
      const float b = exp2_approx(__fsub_rn(own[i][1], safe));
      totals[i * kThreads] = __fmaf_rn(totals[i * kThreads], factor, __fadd_rn(a, b));
      weights[i * 4] = pack_bf16(a, b);
    }
    if (key_group == 0 && t4 == 0) rescale[own_row] = factor;
    reference = new_reference;

    if (!is_tree) {
      __syncthreads();
    } else if (__syncthreads_or(static_cast<int>(odd)) != 0) {
      // A node's row may hold NaN or infinities. Nodes that see it have got them through its score;
      // for the others 0 * NaN must not arise: such values become zeros.
      auto* const words = reinterpret_cast<std::uint32_t*>(shared + stage_offset);
      for (int i = thread; i < kRank / 64 * kChunkBytes / 4; i += kThreads) {
        words[i] = finite_or_zero(words[i]);
      }
      __syncthreads();
    }

    // output = output * factor + weights * values, all rows, 64 columns.
    {
      float factor_a[kRowGroups];
      float factor_b[kRowGroups];
      bool changed = false;
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i) {
        factor_a[i] = rescale[i * 16 + g];
        factor_b[i] = rescale[i * 16 + 8 + g];
        changed |= factor_a[i] != 1 || factor_b[i] != 1;
      }
      if (__any_sync(~0U, changed)) {
#pragma unroll
        for (int i = 0; i < kRowGroups; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            output[i][j][0] *= factor_a[i];
            output[i][j][1] *= factor_a[i];
            output[i][j][2] *= factor_b[i];
            output[i][j][3] *= factor_b[i];
          }
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      std::uint32_t a[kRowGroups][4];
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i) {
        load_matrix_x4(a[i], weight_address + i * 16 * kWeightPitch * 2 + k * 32);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        std::uint32_t b[4];
        load_matrix_x4_transposed(b, value_address[j] + stage_offset + k * 16 * 128);
#pragma unroll
        for (int i = 0; i < kRowGroups; ++i) {
          mma_bf16(output[i][2 * j], a[i], b[0], b[1]);
          mma_bf16(output[i][2 * j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  // Row sums: the four lanes of a row, then the four groups of eight keys, whichever warp had them.
  auto* const row_totals = reinterpret_cast<float*>(shared + L::kRowTotals);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    float sum = totals[i * kThreads];
    sum += __shfl_xor_sync(~0U, sum, 1);
    sum += __shfl_xor_sync(~0U, sum, 2);
    if (t4 == 0) row_totals[(key_group * kTiles + i) * L::kRows + own_row] = sum;
  }
  __syncthreads();
  const std::int64_t first_row =
      static_cast<std::int64_t>(tile.first_token - p.batch.first_row) * p.num_heads +
      tile.first_row;
  const int rows_left = tile.num_rows - tile.first_row;
  if (key_group == 0 && t4 == 0 && own_row < rows_left) {
    const float* const groups = row_totals + own_row;
    const float total =
        (groups[0] + groups[L::kRows]) + (groups[2 * L::kRows] + groups[3 * L::kRows]);
    *p.partials.stat(blockIdx.y, first_row + own_row) = {reference, total};
  }
#pragma unroll
  for (int i = 0; i < kRowGroups; ++i) {
    const int row = i * 16 + g;
    float* const target = p.partials.row(blockIdx.y, first_row + row) + warp * 64 + t4 * 2;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (row < rows_left) {
        *reinterpret_cast<float2*>(target + j * 8) = {output[i][j][0], output[i][j][1]};
      }
      if (row + 8 < rows_left) {
        *reinterpret_cast<float2*>(target + 8 * kRank + j * 8) = {output[i][j][2], output[i][j][3]};
      }
    }
  }
}

template <int kRowGroups>
void launch(const TreeAttentionArguments<__nv_bfloat16>& arguments, cudaStream_t stream) {
  using L = Layout<kRowGroups>;
  const auto kernel = tree_attention_mma_kernel<kRowGroups>;
  // For the current device, so at every launch; it costs less than remembering which had it.
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes),
             "cudaFuncSetAttribute for tree_attention");
  const std::int64_t tiles =
      max_tiles(static_cast<std::int64_t>(arguments.batch.num_rows) * arguments.num_heads,
                arguments.batch.num_sequences, L::kRows);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(arguments.num_partials));
  kernel<<<grid, kThreads, L::kBytes, stream>>>(arguments);
  check_launch("tree_attention_mma");
}

bool aligned(const void* pointer, std::int64_t stride_bytes, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0 &&
         stride_bytes % static_cast<std::int64_t>(bytes) == 0;
}

}  // namespace

bool fits_tree_attention_mma(const TreeAttentionArguments<float>& /*arguments*/) {
  return false;
}

bool fits_tree_attention_mma(const TreeAttentionArguments<__nv_bfloat16>& arguments) {
  return arguments.kv_lora_rank == kRank && arguments.latent_dim == kLatent &&
         aligned(arguments.query, arguments.query_stride * 2, 4) &&
         aligned(arguments.cache, arguments.slot_stride * 2, 16);
}

void tree_attention_mma(const TreeAttentionArguments<__nv_bfloat16>& arguments,
                        cudaStream_t stream) {
  // The smallest tile that takes a sequence's rows at once; it changes no bits.
  const std::int64_t tokens = (arguments.batch.num_rows + arguments.batch.num_sequences - 1) /
                              arguments.batch.num_sequences;
  const std::int64_t rows = tokens * arguments.num_heads;
  if (rows <= 16) {
    launch<1>(arguments, stream);
  } else if (rows <= 64) {
    launch<2>(arguments, stream);
  } else {
    launch<4>(arguments, stream);
  }
}

}  // namespace kdtree
