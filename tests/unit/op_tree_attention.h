// Calls of tree_attention and the same in double precision.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/unit/op_batch.h"
#include "tests/unit/op_softmax.h"

namespace kdtree::ops_test {

class TreeAttentionOpTest : public OpTest {
 protected:
  struct Data {
    MlaShape shape;
    std::int64_t capacity = 0;
    std::vector<float> query;  // [rows, heads * latent]
    std::vector<float> cache;  // [slots, capacity, latent]

    Shape cache_shape() const {
      const std::int64_t slot = capacity * shape.latent_dim();
      return {static_cast<std::int64_t>(cache.size()) / slot, capacity, shape.latent_dim()};
    }
    std::int64_t query_width() const { return shape.num_heads * shape.latent_dim(); }
    std::int64_t out_width() const { return shape.num_heads * shape.kv_lora_rank; }
  };

  // `query_gap` elements lie between the query's rows; which kernel a backend has may follow from
  // it.
  std::vector<float> run(Backend& other, const std::vector<HostSequence>& sequences,
                         const Data& data, bool with_mask, std::int64_t query_gap = 4) {
    auto caches = make_floats(other, activation(), data.cache_shape(), data.cache);
    return run_on(other, sequences, data, caches.view(), with_mask, query_gap);
  }
  // Over a cache that lies on the device.
  std::vector<float> run_on(Backend& other, const std::vector<HostSequence>& sequences,
                            const Data& data, const ConstTensorView& cache, bool with_mask,
                            std::int64_t query_gap = 4) {
    const DeviceBatch batch(other, sequences, with_mask);
    const std::int64_t rows = batch.view().num_rows;
    auto queries = make_floats(other, activation(), {rows, data.query_width()}, data.query,
                               data.query_width() + query_gap);
    GuardedTensor out(other, activation(), {rows, data.out_width()}, data.out_width() + 8);
    other.tree_attention({.shape = data.shape,
                          .softmax_scale = kScale,
                          .query = queries.view(),
                          .cache = cache,
                          .batch = batch.view(),
                          .output = out.view()});
    return read_floats(out);
  }

  Expected expect_attention(const std::vector<HostSequence>& sequences, const Data& data) const {
    Expected want;
    std::int64_t row = 0;
    for (const HostSequence& sequence : sequences) {
      for (std::int32_t node = 0; node < sequence.num_nodes(); ++node, ++row) {
        add_node(sequence, node, row, data, want);
      }
    }
    return want;
  }
  // Appends what `node`, row `row` of the query, gives.
  void add_node(const HostSequence& sequence, std::int32_t node, std::int64_t row, const Data& data,
                Expected& want) const {
    const MlaShape& shape = data.shape;
    const float* slot = data.cache.data() + sequence.slot * data.capacity * shape.latent_dim();
    std::vector<std::int32_t> visible(static_cast<std::size_t>(sequence.prefix));
    std::iota(visible.begin(), visible.end(), 0);
    for (const std::int32_t ancestor : sequence.path(node)) {
      visible.push_back(sequence.prefix + ancestor);
    }
    const auto key = [&](std::int64_t j) {
      return slot + visible[static_cast<std::size_t>(j)] * shape.latent_dim();
    };
    for (std::int64_t h = 0; h < shape.num_heads; ++h) {
      add_attention(
          {.num_keys = static_cast<std::int64_t>(visible.size()),
           .key_dim = shape.latent_dim(),
           .value_dim = shape.kv_lora_rank,
           .scale = kScale,
           .weight_error = activation() == DType::kBFloat16 ? 0x1p-9 : 0,
           .query = data.query.data() + (row * shape.num_heads + h) * shape.latent_dim(),
           .key = key,
           .value = key},
          [this](double value) { return store_error(value); }, want);
    }
  }

  static constexpr float kScale = 0.3F;
};

}  // namespace kdtree::ops_test
