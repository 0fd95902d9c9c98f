// Attention of a draft tree over its sequence's latent cache.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "model/rope.h"
#include "study/bench_data.h"
#include "study/kernel_bench_cases.h"

namespace kdtree {

namespace {

constexpr std::int64_t kManySequences = 16;
constexpr std::int64_t kSampledAttentionRows = 2;
constexpr std::int64_t kSampledAttentionHeads = 2;
constexpr std::int64_t kMaskBitsPerWord = 64;

// The rows of a call: `nodes` of each of `sequences`, trees with a mask or chains without one.
struct RowsShape {
  std::int64_t sequences = 1;
  std::int64_t nodes = 1;
  bool tree = true;

  std::int64_t rows() const { return sequences * nodes; }
};

// The same tree for every sequence.
std::vector<std::int32_t> make_parents(const RowsShape& shape, BenchRandom& random) {
  std::vector<std::int32_t> parents;
  for (std::int64_t node = 0; node < shape.nodes; ++node) {
    // A node hangs below one of the last few: deep as well as wide, as best-first trees are.
    const std::int64_t back =
        node == 0 || !shape.tree ? 1 : 1 + random.below(std::min<std::int64_t>(node, 4));
    parents.push_back(static_cast<std::int32_t>(node - back));
  }
  return parents;
}

// The node's ancestors and itself, ascending.
std::vector<std::int32_t> path_of(const std::vector<std::int32_t>& parents, std::int32_t node) {
  std::vector<std::int32_t> path;
  for (; node >= 0; node = parents[static_cast<std::size_t>(node)]) {
    path.push_back(node);
  }
  std::reverse(path.begin(), path.end());
  return path;
}

// Caches of one prefix length, and which slots each call reads.
struct AttentionData {
  MlaShape shape;
  float scale = 1;
  std::int64_t prefix = 0;
  std::int64_t num_slots = 0;
  std::int64_t capacity = 0;
  LargeValues cache_values;
  DeviceTensor cache;        // [num_slots, capacity, latent_dim]
  std::vector<float> query;  // [max rows, heads * latent_dim]
  DeviceTensor device_query;
  DeviceTensor output;  // [max rows, heads * kv_lora_rank]
};

// Device tensors of a TreeBatch; `slots` differs from call to call.
struct BatchTensors {
  std::vector<std::int32_t> parents;
  DeviceTensor token_ids;
  DeviceTensor positions;
  DeviceTensor sequence_index;
  DeviceTensor prefix_lengths;
  DeviceTensor row_offsets;
  DeviceTensor ancestor_mask;
  std::vector<DeviceTensor> slots;  // of each call
};

BatchTensors make_batch(const BenchContext& context, const AttentionData& data,
                        const RowsShape& shape) {
  Backend& backend = context.backend;
  BenchRandom random(context.seed("tree"));
  BatchTensors batch;
  batch.parents = make_parents(shape, random);
  const std::int64_t words = (shape.nodes + kMaskBitsPerWord - 1) / kMaskBitsPerWord;
  std::vector<std::int32_t> positions;
  std::vector<std::int32_t> sequence_index;
  std::vector<std::int32_t> offsets = {0};
  std::vector<std::int64_t> mask(static_cast<std::size_t>(shape.rows() * words));
  for (std::int64_t s = 0; s < shape.sequences; ++s) {
    for (std::int32_t node = 0; node < shape.nodes; ++node) {
      const std::vector<std::int32_t> path = path_of(batch.parents, node);
      positions.push_back(static_cast<std::int32_t>(data.prefix) +
                          static_cast<std::int32_t>(path.size()) - 1);
      sequence_index.push_back(static_cast<std::int32_t>(s));
      for (const std::int32_t ancestor : path) {
        auto& word = mask[static_cast<std::size_t>((s * shape.nodes + node) * words +
                                                   ancestor / kMaskBitsPerWord)];
        word = static_cast<std::int64_t>(static_cast<std::uint64_t>(word) |
                                         std::uint64_t{1} << (ancestor % kMaskBitsPerWord));
      }
    }
    offsets.push_back(static_cast<std::int32_t>((s + 1) * shape.nodes));
  }
  const std::vector<std::int32_t> prefixes(static_cast<std::size_t>(shape.sequences),
                                           static_cast<std::int32_t>(data.prefix));
  batch.token_ids = DeviceTensor(backend, DType::kInt32, Shape{shape.rows()});
  batch.positions = upload_indices(backend, Shape{shape.rows()}, positions);
  batch.sequence_index = upload_indices(backend, Shape{shape.rows()}, sequence_index);
  batch.prefix_lengths = upload_indices(backend, Shape{shape.sequences}, prefixes);
  batch.row_offsets = upload_indices(backend, Shape{shape.sequences + 1}, offsets);
  if (shape.tree) {
    batch.ancestor_mask = DeviceTensor(backend, DType::kInt64, Shape{shape.rows(), words});
    batch.ancestor_mask.upload(backend, std::span<const std::int64_t>(mask));
    backend.synchronize();
  }
  std::vector<std::int32_t> slots(static_cast<std::size_t>(shape.sequences));
  for (std::int64_t first = 0; first + shape.sequences <= data.num_slots;
       first += shape.sequences) {
    std::iota(slots.begin(), slots.end(), static_cast<std::int32_t>(first));
    batch.slots.push_back(upload_indices(backend, Shape{shape.sequences}, slots));
  }
  return batch;
}

TreeAttentionParams attention_params(const AttentionData& data, const BatchTensors& batch,
                                     const RowsShape& shape, std::int64_t copy) {
  return {.shape = data.shape,
          .softmax_scale = data.scale,
          .query = data.device_query.rows(shape.rows()),
          .cache = data.cache.view(),
          .batch = {.num_sequences = shape.sequences,
                    .num_rows = shape.rows(),
                    .token_ids = batch.token_ids.view(),
                    .positions = batch.positions.view(),
                    .sequence_index = batch.sequence_index.view(),
                    .slots = batch.slots[static_cast<std::size_t>(copy)].view(),
                    .prefix_lengths = batch.prefix_lengths.view(),
                    .row_offsets = batch.row_offsets.view(),
                    .ancestor_mask = batch.ancestor_mask.view()},
          .output = data.output.rows(shape.rows())};
}

// Softmax attention of one head of one row. With K keys of d values, to first order: a score is off
// by e = (d + 1) u max sum |scale q k|; a weight by a factor within 1 +- eta, eta = 2 e + (the
// scores' range + 2) u; numerator and denominator add K terms each; the denominator has the
// weights' errors as well, the product with a value and the quotient round once:
// |error| <= (2 eta + (2 K + 2) u) sum p |v|. With bf16 activations weights may be rounded to bf16,
// 2^-9 each. 5 % covers second order.
void check_head(const AttentionData& data, const std::vector<std::int64_t>& keys,
                const float* query, const float* got, ResultCheck& check) {
  const DType activation = data.cache.view().dtype();
  const std::int64_t latent = data.shape.latent_dim();
  const auto num_keys = static_cast<double>(keys.size());
  std::vector<double> scores;
  double score_error = 0;
  for (const std::int64_t key : keys) {
    double sum = 0;
    double magnitude = 0;
    for (std::int64_t i = 0; i < latent; ++i) {
      const double product =
          static_cast<double>(data.scale) * query[i] * data.cache_values.at(key * latent + i);
      sum += product;
      magnitude += std::abs(product);
    }
    scores.push_back(sum);
    score_error = std::max(score_error, static_cast<double>(latent + 1) * kFloatRound * magnitude);
  }
  const double highest = *std::max_element(scores.begin(), scores.end());
  const double lowest = *std::min_element(scores.begin(), scores.end());
  double total = 0;
  for (double& score : scores) {
    score = std::exp(score - highest);
    total += score;
  }
  const double eta = 2 * score_error + (highest - lowest + 2) * kFloatRound;
  const double relative =
      2 * eta + (2 * num_keys + 2) * kFloatRound + (activation == DType::kBFloat16 ? 0x1p-9 : 0);
  for (std::int64_t c = 0; c < data.shape.kv_lora_rank; ++c) {
    double sum = 0;
    double magnitude = 0;
    for (std::size_t j = 0; j < keys.size(); ++j) {
      const double term = scores[j] / total * data.cache_values.at(keys[j] * latent + c);
      sum += term;
      magnitude += std::abs(term);
    }
    check.within(got[c], sum, 1.05 * relative * magnitude + store_error(activation, sum), "output",
                 c);
  }
}

// The calls on copy 0 read slots 0 to sequences - 1.
ResultCheck check_attention(const AttentionData& data, const BatchTensors& batch,
                            const RowsShape& shape, const std::vector<float>& got) {
  ResultCheck check;
  for (const std::int64_t row : sample_places(shape.rows(), kSampledAttentionRows)) {
    const std::int64_t first_key = row / shape.nodes * data.capacity;
    std::vector<std::int64_t> keys(static_cast<std::size_t>(data.prefix));
    std::iota(keys.begin(), keys.end(), first_key);
    const auto node = static_cast<std::int32_t>(row % shape.nodes);
    for (const std::int32_t ancestor : path_of(batch.parents, node)) {
      keys.push_back(first_key + data.prefix + ancestor);
    }
    for (const std::int64_t head : sample_places(data.shape.num_heads, kSampledAttentionHeads)) {
      const std::int64_t place = row * data.shape.num_heads + head;
      check_head(data, keys, data.query.data() + place * data.shape.latent_dim(),
                 got.data() + place * data.shape.kv_lora_rank, check);
    }
  }
  return check;
}

void measure_rows(const BenchContext& context, const AttentionData& data, const RowsShape& shape) {
  if (shape.sequences > data.num_slots) {
    return;  // memory does not suffice for so many caches
  }
  Backend& backend = context.backend;
  const BatchTensors batch = make_batch(context, data, shape);
  double visible = 0;  // keys of all rows together
  for (std::int32_t node = 0; node < shape.nodes; ++node) {
    visible += static_cast<double>(shape.sequences) *
               static_cast<double>(data.prefix +
                                   static_cast<std::int64_t>(path_of(batch.parents, node).size()));
  }
  const MlaShape& mla = data.shape;
  const ConstTensorView query = data.device_query.rows(shape.rows());
  const ConstTensorView output = data.output.rows(shape.rows());
  context.measure({.kernel = "tree_attention",
                   .shape = {{"num_heads", mla.num_heads},
                             {"kv_lora_rank", mla.kv_lora_rank},
                             {"qk_rope_head_dim", mla.qk_rope_head_dim},
                             {"prefix", data.prefix},
                             {"sequences", shape.sequences},
                             {"nodes", shape.nodes},
                             {"mask", shape.tree ? "tree" : "chain"}},
                   .rows = shape.rows(),
                   .cache_bytes = shape.sequences * (data.prefix + shape.nodes) * mla.latent_dim() *
                                  context.activation_size(),
                   .activation_bytes = query.bytes() + output.bytes(),
                   .flops = 2.0 * visible * static_cast<double>(mla.num_heads) *
                            static_cast<double>(mla.latent_dim() + mla.kv_lora_rank),
                   .num_copies = static_cast<std::int64_t>(batch.slots.size()),
                   .run =
                       [&](std::int64_t copy) {
                         backend.tree_attention(attention_params(data, batch, shape, copy));
                       },
                   .check =
                       [&] {
                         return check_attention(
                             data, batch, shape,
                             download_rows(backend, data.output.view(), 0, shape.rows()));
                       }});
}

}  // namespace

void bench_attention(const BenchContext& context) {
  Backend& backend = context.backend;
  const DType activation = context.activation();
  const std::int64_t most = std::max(context.max_rows(), kManySequences);
  for (const std::int64_t prefix : context.options.prefixes) {
    AttentionData data;
    data.shape = context.mla_shape();
    data.scale =
        static_cast<float>(softmax_scale(context.config.rope, context.config.qk_head_dim()));
    data.prefix = prefix;
    data.capacity = prefix + context.max_rows();
    const std::int64_t latent = data.shape.latent_dim();
    const std::int64_t slot_bytes = data.capacity * latent * context.activation_size();
    const std::int64_t copies = context.num_copies("tree_attention", slot_bytes);
    // Room for a second turn of the many sequences, as far as the memory goes.
    data.num_slots = std::clamp<std::int64_t>(std::max(copies, 2 * kManySequences), 1,
                                              context.memory_bytes / slot_bytes);
    data.cache_values = {.seed = context.seed("latent cache")};
    data.cache = DeviceTensor(backend, activation, Shape{data.num_slots, data.capacity, latent});
    fill_large(backend, data.cache_values, data.cache.view());
    const std::int64_t query_width = data.shape.num_heads * latent;
    data.query = BenchRandom(context.seed("query")).floats(most * query_width, -2, 2, activation);
    data.device_query = upload_floats(backend, activation, Shape{most, query_width}, data.query);
    data.output = DeviceTensor(backend, activation,
                               Shape{most, data.shape.num_heads * data.shape.kv_lora_rank});
    for (const std::int64_t rows : context.options.rows) {
      measure_rows(context, data, {.sequences = 1, .nodes = rows, .tree = true});
    }
    measure_rows(context, data, {.sequences = 1, .nodes = context.max_rows(), .tree = false});
    measure_rows(context, data, {.sequences = kManySequences, .nodes = 1, .tree = false});
  }
}

}  // namespace kdtree
