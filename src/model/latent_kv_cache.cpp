#include "model/latent_kv_cache.h"

namespace kdtree {

LatentKvCache::LatentKvCache(Backend& backend, const CacheSizes& sizes)
    : backend_(backend), sizes_(sizes), committed_(static_cast<std::size_t>(sizes.num_slots), 0) {
  layers_.reserve(static_cast<std::size_t>(sizes.num_layers));
  for (std::int64_t layer = 0; layer < sizes.num_layers; ++layer) {
    layers_.emplace_back(backend, backend.activation_dtype(),
                         Shape{sizes.num_stored(), sizes.capacity, sizes.width});
  }
}

void LatentKvCache::commit_rows(std::int32_t slot, std::int64_t rows) {
  std::int64_t& committed = committed_[static_cast<std::size_t>(slot)];
  check(rows >= 0 && committed + rows <= sizes_.capacity, "commit of {} rows on {} of {}", rows,
        committed, sizes_.capacity);
  committed += rows;
}

void LatentKvCache::compact(const CompactParams& params) const {
  CompactParams layer_params = params;
  for (const DeviceTensor& layer : layers_) {
    layer_params.cache = layer.view();
    backend_.compact(layer_params);
  }
}

std::int64_t LatentKvCache::bytes(const CacheSizes& sizes, DType dtype) {
  return sizes.num_layers * sizes.num_stored() * sizes.capacity * sizes.width * dtype_bytes(dtype);
}

}  // namespace kdtree
