// Elements that lie more than 2^31 elements or bytes behind their tensor's first one. The memory is
// zero where a test writes nothing; on the CPU pages that nobody touches take none.
#include "tests/unit/op_experts.h"
#include "tests/unit/op_tree_attention.h"

namespace kdtree::ops_test {
namespace {

constexpr std::int64_t kFar = std::int64_t{1} << 31;

class OffsetsTest : public TreeAttentionOpTest {
 protected:
  // Whether there is room for it, and for what the ops need themselves.
  bool has_room(std::int64_t bytes) {
    constexpr std::int64_t kSpare = std::int64_t{2} << 30;
    return once().free_bytes() >= bytes + kSpare;
  }
  static std::string no_room(std::int64_t bytes) {
    return "needs " + std::to_string(bytes >> 20) + " MiB of free memory";
  }

  std::int64_t element_bytes() const { return dtype_bytes(activation()); }

  static std::byte* row_data(const TensorView& rows, std::int64_t row) {
    return static_cast<std::byte*>(rows.raw()) +
           row * rows.row_stride() * dtype_bytes(rows.dtype());
  }
  // Row by row: strided copies may be limited in their stride.
  std::vector<float> read_rows(const TensorView& rows) {
    const std::int64_t bytes = rows.size(1) * dtype_bytes(rows.dtype());
    GuardedTensor dense(once(), rows.dtype(), {rows.size(0), rows.size(1)});
    std::vector<std::byte> image(static_cast<std::size_t>(bytes));
    for (std::int64_t row = 0; row < rows.size(0); ++row) {
      once().download(image.data(), row_data(rows, row), bytes);
      once().synchronize();
      once().upload(row_data(dense.view(), row), image.data(), bytes);
      once().synchronize();
    }
    return read_floats(dense);
  }
  void write_rows(const std::vector<float>& values, const TensorView& rows) {
    const std::int64_t bytes = rows.size(1) * dtype_bytes(rows.dtype());
    for (std::int64_t row = 0; row < rows.size(0); ++row) {
      const auto wide = row_of(values, row, rows.size(1));
      const auto narrow = to_bfloat16(wide);
      const void* from =
          rows.dtype() == DType::kFloat32 ? static_cast<const void*>(wide.data()) : narrow.data();
      once().upload(row_data(rows, row), from, bytes);
      once().synchronize();
    }
  }
};
KDTREE_TEST_ALL_BACKENDS(OffsetsTest);

// A cache of many slots, of which the first and the last hold the same sequence: with equal bits
// everywhere, and right ones.
TEST_P(OffsetsTest, LastSlotOfALargeCache) {
  constexpr MlaShape kShape = {.num_heads = 2,
                               .qk_nope_head_dim = 128,
                               .qk_rope_head_dim = 64,
                               .v_head_dim = 128,
                               .kv_lora_rank = 512};
  constexpr std::int64_t kCapacity = 8192;
  constexpr std::int64_t kWidth = 576;
  constexpr std::int64_t kSlots = kFar / (kCapacity * kWidth) + 2;
  constexpr std::int32_t kLast = static_cast<std::int32_t>(kSlots) - 1;
  static_assert(kLast * kCapacity * kWidth > kFar);
  const std::int64_t bytes = kSlots * kCapacity * kWidth * element_bytes();
  if (!has_room(bytes)) {
    GTEST_SKIP() << no_room(bytes);
  }
  constexpr std::int32_t kPrefix = 70;
  constexpr std::int64_t kNodes = 9;
  constexpr std::int64_t kRows = kPrefix + kNodes;
  Random random(1);
  Buffer memory = once().allocate(bytes);
  const TensorView cache(memory.data(), activation(), Shape{kSlots, kCapacity, kWidth});
  const TensorView cache_rows = cache.reshape(Shape{kSlots * kCapacity, kWidth});
  const auto latents = activations(random, kRows * kWidth);
  auto values = input({kRows, kWidth}, latents);
  for (const std::int32_t slot : {0, kLast}) {
    const DeviceBatch batch(once(), {{.slot = slot, .prefix = 0, .parents = chain(kRows)}}, false);
    once().cache_write({.values = values.view(), .cache = cache, .batch = batch.view()});
    expect_same_bits(read_rows(cache_rows.rows(slot * kCapacity, kRows)), latents, "cache_write");
  }

  // A small cache of the same capacity, which decides about splits, for the reference.
  const auto parents = random_tree(random, kNodes);
  const Data data = {
      .shape = kShape,
      .capacity = kRows,
      .query = activations(random, kNodes * kShape.num_heads * kShape.latent_dim(), -2, 2),
      .cache = latents};
  const HostSequence first = {.slot = 0, .prefix = kPrefix, .parents = parents};
  const HostSequence last = {.slot = kLast, .prefix = kPrefix, .parents = parents};
  const auto got = run_on(once(), {last}, data, cache, true);
  expect_within(got, expect_attention({first}, data), "tree_attention");
  expect_same_bits(got, run_on(once(), {first}, data, cache, true), "tree_attention");

  // Nine heads of the drafter in the same rows, as keys and as values.
  const auto attend_block = [&](const HostSequence& sequence) {
    const DeviceBatch batch(once(), {sequence}, false);
    auto query =
        make_floats(once(), activation(), {kNodes, 2 * 64}, row_of(data.query, 0, kNodes * 2 * 64));
    auto kv_head_of = make_indices(once(), {0, 8});
    GuardedTensor out(once(), activation(), {kNodes, 2 * 64});
    once().block_attention({.num_heads = 2,
                            .num_key_value_heads = 9,
                            .head_dim = 64,
                            .kv_head_of = kv_head_of.view(),
                            .softmax_scale = kScale,
                            .query = query.view(),
                            .key_cache = cache,
                            .value_cache = cache,
                            .batch = batch.view(),
                            .output = out.view()});
    return read_floats(out);
  };
  const auto block = attend_block(last);
  EXPECT_NE(block, std::vector<float>(block.size(), 0.0F));
  expect_same_bits(block, attend_block(first), "block_attention");

  // Nodes 0, 2, 5 and 8 are accepted.
  auto slots = make_indices(once(), {kLast});
  auto prefixes = make_indices(once(), {kPrefix});
  auto lengths = make_indices(once(), {4});
  auto paths = make_tensor(once(), {1, 4}, std::vector<std::int32_t>{0, 2, 5, 8});
  once().compact({.cache = cache,
                  .slots = slots.view(),
                  .prefix_lengths = prefixes.view(),
                  .path_lengths = lengths.view(),
                  .paths = paths.view()});
  auto compacted = latents;
  for (const auto& [to, from] : {std::pair{1, 2}, {2, 5}, {3, 8}}) {
    std::copy_n(latents.begin() + (kPrefix + from) * kWidth, kWidth,
                compacted.begin() + (kPrefix + to) * kWidth);
  }
  expect_same_bits(read_rows(cache_rows.rows(kLast * kCapacity, kRows)), compacted, "compact");
  expect_same_bits(read_rows(cache_rows.rows(0, kRows)), latents, "compact, another slot");
}

// A bf16 matrix whose last rows lie behind 2^31 elements; all others are zero but the first ones.
TEST_P(OffsetsTest, LastRowsOfALargeMatrix) {
  constexpr std::int64_t kIn = 8192;
  constexpr std::int64_t kEdge = 16;  // rows at either end
  constexpr std::int64_t kOut = kFar / kIn + kEdge;
  constexpr std::int64_t kRows = 2;
  constexpr std::int64_t kBytes = kOut * kIn * 2;
  if (!has_room(kBytes)) {
    GTEST_SKIP() << no_room(kBytes);
  }
  Random random(2);
  Buffer memory = once().allocate(kBytes);
  const auto first = to_bfloat16(random.floats(kEdge * kIn));
  const auto last = to_bfloat16(random.floats(kEdge * kIn));
  auto* const elements = static_cast<BFloat16*>(memory.data());
  const auto edge_bytes = static_cast<std::int64_t>(last.size() * sizeof(BFloat16));
  once().upload(elements, first.data(), edge_bytes);
  once().upload(elements + kFar, last.data(), edge_bytes);
  once().synchronize();
  const WeightView table = {.format = WeightFormat::kBFloat16,
                            .out_features = kOut,
                            .in_features = kIn,
                            .data = memory.data()};
  once().prepare(table);

  auto token_ids = make_indices(once(), {0, static_cast<std::int32_t>(kOut) - kEdge,
                                         static_cast<std::int32_t>(kOut) - 1, 100});
  GuardedTensor embedded(once(), activation(), {4, kIn});
  once().embed(table, 0, token_ids.view(), embedded.view());
  const auto got = read_floats(embedded);
  expect_same_bits(row_of(got, 0, kIn), row_of(to_float(first), 0, kIn), "first row");
  expect_same_bits(row_of(got, 1, kIn), row_of(to_float(last), 0, kIn), "row behind 2^31");
  expect_same_bits(row_of(got, 2, kIn), row_of(to_float(last), kEdge - 1, kIn), "last row");
  expect_same_bits(row_of(got, 3, kIn), std::vector<float>(kIn, 0.0F), "a row between");

  const auto x = activations(random, kRows * kIn);
  auto values = make_floats(once(), activation(), {kRows, kIn}, x);
  GuardedTensor y(once(), DType::kFloat32, {kRows, kOut});
  once().linear(table, values.view(), y.view());
  const auto all = y.download<float>();
  Expected want;  // as in LinearTest
  for (std::int64_t r = 0; r < kRows; ++r) {
    for (std::int64_t o = 0; o < kOut; ++o) {
      double sum = 0;
      double magnitude = 0;
      const bool at_edge = o < kEdge || o >= kOut - kEdge;
      for (std::int64_t i = 0; at_edge && i < kIn; ++i) {
        const auto place = static_cast<std::size_t>((o < kEdge ? o : o - (kOut - kEdge)) * kIn + i);
        const double product = (o < kEdge ? first : last)[place].to_float() *
                               static_cast<double>(x[static_cast<std::size_t>(r * kIn + i)]);
        sum += product;
        magnitude += std::abs(product);
      }
      want.add(sum, 1.01 * static_cast<double>(kIn + 1) * kRound * magnitude);
    }
  }
  expect_within(all, want, "linear");
}

// Experts whose slots lie at both ends of one large block of memory.
TEST_P(OffsetsTest, ExpertsFarApart) {
  constexpr WeightKind kPacked = {WeightFormat::kInt4Group, 32, DType::kBFloat16};
  constexpr std::int64_t kHidden = 256;
  constexpr std::int64_t kIntermediate = 128;
  constexpr std::int64_t kPiece = std::int64_t{1} << 16;  // room for a matrix's codes or scales
  constexpr std::int64_t kBytes = 2 * kFar + 16 * kPiece;
  if (!has_room(kBytes)) {
    GTEST_SKIP() << no_room(kBytes);
  }
  Random random(3);
  const Experts near(once(), kPacked, {2, kHidden, kIntermediate}, 4);
  Buffer memory = once().allocate(kBytes);
  auto* place = static_cast<std::byte*>(memory.data());
  const auto moved = [&](WeightView w) {
    const auto move = [&](const void* from, std::int64_t bytes) {
      ASSERT_LE(bytes, kPiece);
      std::vector<std::byte> image(static_cast<std::size_t>(bytes));
      once().download(image.data(), from, bytes);
      once().synchronize();
      once().upload(place, image.data(), bytes);
      once().synchronize();
    };
    move(w.data, w.out_features * w.in_features / 2);
    w.data = place;
    place += kPiece;
    move(w.scales, w.out_features * w.in_features / w.group_size * 2);
    w.scales = place;
    place += kPiece;
    return w;
  };
  // The first slot's matrices at the start, the second's behind 2^32 bytes.
  const auto views = near.views();
  std::vector<WeightView> gate = {moved(views.gate[0])};
  std::vector<WeightView> up = {moved(views.up[0])};
  std::vector<WeightView> down = {moved(views.down[0])};
  place = static_cast<std::byte*>(memory.data()) + 2 * kFar;
  gate.push_back(moved(views.gate[1]));
  up.push_back(moved(views.up[1]));
  down.push_back(moved(views.down[1]));

  constexpr std::int64_t kRows = 20;
  Routed routed = {.k = 2,
                   .x = activations(random, kRows * kHidden),
                   .ids = {},
                   .weights = random.floats(kRows * 2, 0, 1),
                   .slot_of = {1, 0}};
  for (std::int64_t row = 0; row < kRows; ++row) {
    routed.ids.insert(routed.ids.end(), {0, row % 3 == 0 ? -1 : 1});
  }
  const auto far_set = once().make_expert_set({gate, up, down});
  const auto near_set = once().make_expert_set(near.views());
  const auto run = [&](const ExpertSet* set) {
    auto x = make_floats(once(), activation(), {kRows, kHidden}, routed.x);
    auto ids = make_tensor(once(), {kRows, 2}, routed.ids);
    auto weights = make_tensor(once(), {kRows, 2}, routed.weights);
    auto slot_of = make_indices(once(), routed.slot_of);
    GuardedTensor out(once(), activation(), {kRows, kHidden});
    GuardedTensor workspace(once(), DType::kUInt8,
                            {once().experts_workspace_bytes(kRows, 2, kHidden, kIntermediate)});
    once().experts({.experts = set,
                    .x = x.view(),
                    .expert_ids = ids.view(),
                    .expert_weights = weights.view(),
                    .logical_to_slot = slot_of.view(),
                    .output = out.view(),
                    .workspace = workspace.view()});
    return read_floats(out);
  };
  const auto got = run(far_set.get());
  expect_within(got, reference(near, routed, [this](double value) { return store_error(value); }),
                "experts");
  expect_same_bits(got, run(near_set.get()), "experts near and far");
}

// Two rows more than 2^31 elements apart: an op gives what it gives for neighbours.
TEST_P(OffsetsTest, RowsFarApart) {
  constexpr std::int64_t kStride = kFar + 4096;
  constexpr std::int64_t kRows = 2;
  constexpr std::int64_t kCols = 9000;
  const std::int64_t bytes = (kStride + 2 * kCols + 64) * static_cast<std::int64_t>(sizeof(float));
  if (!has_room(bytes)) {
    GTEST_SKIP() << no_room(bytes);
  }
  Random random(5);
  Buffer memory = once().allocate(bytes);
  const auto far = [&](DType dtype, std::int64_t column) {
    auto* const first = static_cast<std::byte*>(memory.data()) + column * dtype_bytes(dtype);
    return TensorView(first, dtype, Shape{kRows, kCols}, kStride);
  };
  const auto far_values = [&](DType dtype, std::int64_t column, const std::vector<float>& values) {
    write_rows(values, far(dtype, column));
    return far(dtype, column);
  };

  const auto logits = random.floats(kRows * kCols, -9, 9);
  const auto head = [&](const ConstTensorView& view) {
    GuardedTensor values(once(), DType::kFloat32, {kRows, 8});
    GuardedTensor ids(once(), DType::kInt32, {kRows, 8});
    GuardedTensor sums(once(), DType::kFloat32, {kRows, 2});
    once().top_k(view, 0, values.view(), ids.view());
    once().log_sum_exp_partials(view, sums.view());
    auto all = read_floats(values);
    const auto partials = read_floats(sums);
    all.insert(all.end(), partials.begin(), partials.end());
    for (const std::int32_t id : ids.download<std::int32_t>()) {
      all.push_back(static_cast<float>(id));
    }
    return all;
  };
  auto near_logits = make_floats(once(), DType::kFloat32, {kRows, kCols}, logits);
  expect_same_bits(head(far_values(DType::kFloat32, 0, logits)), head(near_logits.view()), "head");

  const auto x = activations(random, kRows * kCols);
  const auto near_x = input({kRows, kCols}, x);
  const auto far_x = far_values(activation(), 0, x);
  const TensorView far_y = far(activation(), kCols + 8);
  auto near_y = output({kRows, kCols});
  auto weight = make_tensor(once(), {kCols}, random.floats(kCols, 0.5, 1.5));
  once().rms_norm(far_x, weight.view(), 1e-6F, far_y);
  once().rms_norm(near_x.view(), weight.view(), 1e-6F, near_y.view());
  expect_same_bits(read_rows(far_y), read_floats(near_y), "rms_norm");
  once().swiglu(far_x, far_x, far_y);
  once().swiglu(near_x.view(), near_x.view(), near_y.view());
  expect_same_bits(read_rows(far_y), read_floats(near_y), "swiglu");
  auto indices = make_indices(once(), {1, 0});
  once().gather_rows(far_x, indices.view(), far_y);
  once().gather_rows(near_x.view(), indices.view(), near_y.view());
  expect_same_bits(read_rows(far_y), read_floats(near_y), "gather_rows");
  once().add(far_y, far_x);
  once().add(near_y.view(), near_x.view());
  expect_same_bits(read_rows(far_y), read_floats(near_y), "add");
  once().add_rows(far_x, indices.view(), far_y);
  once().add_rows(near_x.view(), indices.view(), near_y.view());
  expect_same_bits(read_rows(far_y), read_floats(near_y), "add_rows");
}

}  // namespace
}  // namespace kdtree::ops_test
