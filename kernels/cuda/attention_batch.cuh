// What the attention kernels know of a TreeBatch, on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/backend.h"

namespace kdtree {

// The index arrays of a batch, and the rows [first_row, first_row + num_rows) of it that one pass
// handles. Lengths and offsets are read on the device, so that recorded work may be replayed with
// others.
struct AttentionBatch {
  const std::int32_t* sequence_index = nullptr;  // [rows of the batch]
  const std::int32_t* slots = nullptr;           // [num_sequences]
  const std::int32_t* prefix_lengths = nullptr;  // [num_sequences]
  const std::int32_t* row_offsets = nullptr;     // [num_sequences + 1]
  int num_sequences = 0;
  int num_slots = 0;
  int capacity = 0;  // rows of a slot
  int first_row = 0;
  int num_rows = 0;

  // Wrong values of the arrays give wrong results, but no access outside of a tensor.
  __device__ int sequence(int row) const {
    return min(max(sequence_index[row], 0), num_sequences - 1);
  }
  __device__ std::int64_t slot(int sequence) const {
    return min(max(slots[sequence], 0), num_slots - 1);
  }
  __device__ int prefix(int sequence) const {
    return min(max(prefix_lengths[sequence], 0), capacity);
  }
};

// The sequence's part of a pass, cut into tiles.
struct SequenceTile {
  int sequence = 0;
  int first_token = 0;    // batch row of the sequence's first row in this pass
  int first_row = 0;      // of the tile, counted from first_token's first
  int num_rows = 0;       // rows of the sequence in this pass; the tile may be broken
  int tokens_before = 0;  // nodes of the sequence in front of first_token
};

// Finds tile number `tile` of the pass, tokens having `rows_per_token` rows. A tile never holds
// rows of two sequences. False behind the last tile: grids have max_tiles() tiles.
__device__ __forceinline__ bool find_tile(const AttentionBatch& batch, int rows_per_token,
                                          int tile_rows, int tile, SequenceTile& found) {
  for (int s = 0; s < batch.num_sequences; ++s) {
    const int offset = batch.row_offsets[s];
    const int begin = max(offset, batch.first_row);
    const int end = min(batch.row_offsets[s + 1], batch.first_row + batch.num_rows);
    const int rows = max(end - begin, 0) * rows_per_token;
    const int tiles = (rows + tile_rows - 1) / tile_rows;
    if (tile < tiles) {
      found = {s, begin, tile * tile_rows, rows, begin - offset};
      return true;
    }
    tile -= tiles;
  }
  return false;
}

// Tiles of a pass at most, however its rows are spread over the sequences.
inline std::int64_t max_tiles(std::int64_t num_rows, std::int64_t num_sequences,
                              std::int64_t tile_rows) {
  return (num_rows + tile_rows - 1) / tile_rows + num_sequences - 1;
}

// Checks the index tensors' types and shapes (their values are on the device) and returns them.
AttentionBatch attention_batch(const TreeBatch& batch, std::int64_t num_slots,
                               std::int64_t capacity);

}  // namespace kdtree
