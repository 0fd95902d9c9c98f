#include <algorithm>

#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/experts_decode.cuh"
#include "kernels/cuda/int4_layout.h"

namespace kdtree {
namespace {

constexpr std::int64_t kMostBlocks = 1 << 16;

unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>(
      std::clamp<std::int64_t>((threads + kBlockThreads - 1) / kBlockThreads, 1, kMostBlocks));
}

__device__ std::int64_t first_index() {
  return std::int64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
}
__device__ std::int64_t index_step() {
  return std::int64_t{gridDim.x} * kBlockThreads;
}

// The four codes of one step of a plain word, at a packed word's nibbles of `half`.
__device__ std::uint32_t pack_step(std::uint32_t plain, int step, int half) {
  const std::uint32_t v = plain >> (16 * step);
  return ((v & 0xfU) | (v & 0xf0U) << 12 | (v & 0xf00U) | (v & 0xf000U) << 12) << (4 * half);
}

// Packs whole tiles: `from` is the first one's plain rows. A thread makes the two words that a lane
// has of a group.
__global__ void __launch_bounds__(kBlockThreads)
    pack_codes_kernel(const std::uint32_t* from, std::int64_t units, std::int64_t num_tiles,
                      uint2* to) {
  const std::int64_t row_words = units * kInt4UnitColumns / 8;
  const std::int64_t count = num_tiles * units * 64;
  for (std::int64_t i = first_index(); i < count; i += index_step()) {
    const std::int64_t group = i % 2;
    const std::int64_t lane = i / 2 % 32;
    const std::int64_t unit = i / 64 % units;
    const std::int64_t tile = i / 64 / units;
    const std::int64_t word = unit * 8 + group * 4 + lane % 4;
    const std::uint32_t* rows = from + tile * kInt4TileRows * row_words + word;
    const std::uint32_t low = rows[lane / 4 * row_words];
    const std::uint32_t high = rows[(lane / 4 + 8) * row_words];
    to[i] = {pack_step(low, 0, 0) | pack_step(high, 0, 1),
             pack_step(low, 1, 0) | pack_step(high, 1, 1)};
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    pack_scales_kernel(const std::uint16_t* from, std::int64_t units, std::int64_t num_tiles,
                       std::uint32_t* to) {
  const std::int64_t row_groups = units * 2;
  const std::int64_t count = num_tiles * units * 16;
  for (std::int64_t i = first_index(); i < count; i += index_step()) {
    const std::int64_t group = i % 2;
    const std::int64_t g = i / 2 % 8;
    const std::int64_t unit = i / 16 % units;
    const std::int64_t tile = i / 16 / units;
    const std::uint16_t* rows = from + tile * kInt4TileRows * row_groups + unit * 2 + group;
    to[i] = rows[g * row_groups] | static_cast<std::uint32_t>(rows[(g + 8) * row_groups]) << 16;
  }
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    expand_kernel(MatrixRef w, std::int64_t in_features, std::int64_t first_row,
                  std::int64_t num_rows, T* out) {
  const std::int64_t row_words = in_features / 8;
  const std::int64_t count = num_rows * row_words;
  for (std::int64_t i = first_index(); i < count; i += index_step()) {
    float values[8];
    expand_int4(read_int4(w, in_features, first_row + i / row_words, i % row_words * 8), values);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      out[i * 8 + j] = from_float<T>(values[j]);
    }
  }
}

bool is_aligned(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

}  // namespace

Int4Slices int4_slices(std::int64_t in_features) {
  // Long slices first: one copy of 8 to 9 KiB a slice reaches the memory's bandwidth. These are the
  // slices that the kernels are compiled for.
  constexpr int kSliceUnits[] = {16, 14, 8, 4, 2};
  if (in_features <= 0 || in_features % kInt4UnitColumns != 0) {
    return {};
  }
  const std::int64_t units = in_features / kInt4UnitColumns;
  for (const int slice_units : kSliceUnits) {
    const std::int64_t slices = units / slice_units;
    const bool shared_evenly = slices == 1 || slices == 2 || slices == 4 || slices == 8;
    if (units % slice_units == 0 && shared_evenly) {
      return {slice_units, static_cast<int>(slices)};
    }
  }
  return {};
}

bool is_packed_int4(const WeightView& w) {
  return w.format == WeightFormat::kInt4Group && w.group_size == kInt4GroupSize &&
         w.scale_dtype == DType::kBFloat16 && w.out_features > 0 &&
         w.out_features % kInt4TileRows == 0 && int4_slices(w.in_features).num_slices > 0;
}

void expand_int4_rows(const WeightView& w, std::int64_t first_row, std::int64_t num_rows,
                      DType out_dtype, void* out, cudaStream_t stream) {
  check(w.format == WeightFormat::kInt4Group, "expand_int4_rows got another format");
  check(first_row >= 0 && num_rows >= 0 && first_row + num_rows <= w.out_features,
        "rows [{}, {}) of an INT4 matrix of {} rows", first_row, first_row + num_rows,
        w.out_features);
  if (num_rows == 0 || w.in_features == 0) {
    return;
  }
  const unsigned blocks = blocks_for(num_rows * w.in_features / 8);
  with_float_type(out_dtype, [&](auto type) {
    using T = decltype(type);
    expand_kernel<T><<<blocks, kBlockThreads, 0, stream>>>(matrix_ref(w), w.in_features, first_row,
                                                           num_rows, static_cast<T*>(out));
  });
  check_launch("expand_int4_rows");
}

void CudaBackend::prepare(const WeightView& matrix) {
  if (!is_packed_int4(matrix)) {
    return;
  }
  check(is_aligned(matrix.data, 16) && is_aligned(matrix.scales, 16),
        "the codes and scales of an INT4 matrix must be aligned to 16 bytes");
  const std::int64_t units = matrix.in_features / kInt4UnitColumns;
  const std::int64_t num_tiles = matrix.out_features / kInt4TileRows;
  const std::int64_t code_bytes = units * 512;  // of a tile
  const std::int64_t scale_bytes = units * 64;
  // A tile keeps its place, so that any number of tiles can be packed at a time.
  constexpr std::int64_t kTemporaryBytes = 16 << 20;
  const std::int64_t tiles_at_once =
      std::clamp<std::int64_t>(kTemporaryBytes / (code_bytes + scale_bytes), 1, num_tiles);
  auto* temporary = static_cast<std::byte*>(scratch(tiles_at_once * (code_bytes + scale_bytes)));
  auto* codes = static_cast<std::byte*>(const_cast<void*>(matrix.data));
  auto* scales = static_cast<std::byte*>(const_cast<void*>(matrix.scales));
  for (std::int64_t tile = 0; tile < num_tiles; tile += tiles_at_once) {
    const std::int64_t count = std::min(tiles_at_once, num_tiles - tile);
    std::byte* tile_codes = codes + tile * code_bytes;
    std::byte* tile_scales = scales + tile * scale_bytes;
    std::byte* temporary_scales = temporary + count * code_bytes;
    pack_codes_kernel<<<blocks_for(count * units * 64), kBlockThreads, 0, cuda_stream()>>>(
        reinterpret_cast<const std::uint32_t*>(tile_codes), units, count,
        reinterpret_cast<uint2*>(temporary));
    check_launch("prepare, codes");
    pack_scales_kernel<<<blocks_for(count * units * 16), kBlockThreads, 0, cuda_stream()>>>(
        reinterpret_cast<const std::uint16_t*>(tile_scales), units, count,
        reinterpret_cast<std::uint32_t*>(temporary_scales));
    check_launch("prepare, scales");
    check_cuda(cudaMemcpyAsync(tile_codes, temporary, static_cast<std::size_t>(count * code_bytes),
                               cudaMemcpyDeviceToDevice, cuda_stream()),
               "prepare, codes");
    check_cuda(cudaMemcpyAsync(tile_scales, temporary_scales,
                               static_cast<std::size_t>(count * scale_bytes),
                               cudaMemcpyDeviceToDevice, cuda_stream()),
               "prepare, scales");
  }
}

}  // namespace kdtree
