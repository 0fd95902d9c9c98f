// The order in which INT4 matrices lie on the device.
//
// Packed matrices: 16 rows are a tile, 64 columns of it a unit; tiles lie one after the other, each
// with its units in order. A tile takes the bytes that its 16 rows take in the plain order, codes
// and scales each.
// - Codes of a unit: 512 bytes, 16 for each of the 32 lanes of a warp, so that word (group, step)
//   of lane 4 * g + t is the lane's A operand of mma.m16n8k16: rows g and g + 8, columns
//   32 * group + 8 * t + 4 * step + 0..3. Nibbles 0, 4, 2, 6 hold row g, nibbles 1, 5, 3, 7 row
//   g + 8.
// - Scales of a unit: 64 bytes, word (g, group) with row g's bf16 below row g + 8's.
// Any slice of a tile's units is one run of memory. Other matrices keep the plain order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/weight_view.h"

namespace kdtree {

inline constexpr std::int64_t kInt4TileRows = 16;
inline constexpr std::int64_t kInt4UnitColumns = 64;
inline constexpr std::int64_t kInt4GroupSize = 32;

// How the warps of a block share the columns of a packed matrix: num_slices (1, 2, 4 or 8) slices
// of slice_units units. {0, 0}: not at all.
struct Int4Slices {
  int slice_units = 0;
  int num_slices = 0;
};
Int4Slices int4_slices(std::int64_t in_features);

// Whether prepare() packs a matrix of this shape and format; ops ask the same.
bool is_packed_int4(const WeightView& w);

// out [num_rows, in_features] = rows [first_row, first_row + num_rows) of an INT4 matrix in either
// order, as float32 ((code - 8) * scale) or bf16 (that, rounded). Contiguous.
void expand_int4_rows(const WeightView& w, std::int64_t first_row, std::int64_t num_rows,
                      DType out_dtype, void* out, cudaStream_t stream);

}  // namespace kdtree
