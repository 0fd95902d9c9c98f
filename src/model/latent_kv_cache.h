// The latent key/value cache of multi-head latent attention: for each layer, slot and position one
// row of the compressed key/value (after its norm) and the rotated key. Every rank holds all rows
// of its attention group's slots: one latent row serves every head.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/device_tensor.h"

namespace kdtree {

struct CacheSizes {
  std::int64_t num_layers = 0;
  std::int64_t num_slots = 0;  // sequences at a time, of all attention groups
  std::int64_t capacity = 0;   // rows a slot, provisional ones included
  std::int64_t width = 0;      // values a row
  // Slots whose rows are here; -1: all. Lengths are kept of all of them.
  std::int64_t stored_slots = -1;

  std::int64_t num_stored() const { return stored_slots < 0 ? num_slots : stored_slots; }
};

// Rows of a slot below committed() belong to the sequence. A step writes only rows at and above it
// ("provisional"); commit_rows alone moves it.
class LatentKvCache {
 public:
  LatentKvCache(Backend& backend, const CacheSizes& sizes);

  // [stored slots, capacity, width] of one layer.
  const TensorView& layer(std::int64_t index) const {
    return layers_[static_cast<std::size_t>(index)].view();
  }
  std::int64_t num_layers() const { return static_cast<std::int64_t>(layers_.size()); }
  std::int64_t committed(std::int32_t slot) const {
    return committed_[static_cast<std::size_t>(slot)];
  }

  // Forgets a slot's rows.
  void clear(std::int32_t slot) { committed_[static_cast<std::size_t>(slot)] = 0; }
  // Makes the next `rows` provisional rows the sequence's own.
  void commit_rows(std::int32_t slot, std::int64_t rows);
  // Moves accepted provisional rows together in every layer: of each sequence row prefix + paths[i]
  // goes to prefix + i. Rows were rotated by position = prefix + depth, so the move is a plain
  // copy. params.cache is ignored, and its slots count from the first that is stored here.
  // commit_rows follows once the host knows how many there are.
  void compact(const CompactParams& params) const;

  static std::int64_t bytes(const CacheSizes& sizes, DType dtype);

 private:
  Backend& backend_;
  CacheSizes sizes_;
  std::vector<DeviceTensor> layers_;
  std::vector<std::int64_t> committed_;
};

}  // namespace kdtree
