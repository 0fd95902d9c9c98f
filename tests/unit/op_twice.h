// A backend whose ops all run twice, for the tests of ops.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"

namespace kdtree::ops_test {

// Passes every call on to another backend. An op runs a second time on what its tensors held before
// the first, with other contents of all scratch memory, and must write the same bits again.
// Recorded work runs as it is.
class TwiceBackend final : public Backend {
 public:
  explicit TwiceBackend(std::unique_ptr<Backend> once) : once_(std::move(once)) {
    if (once_->name() == "cuda") {
      allocate_nan();
    }
  }

  // The backend itself, whose ops run once.
  Backend& once() { return *once_; }

  std::string name() const override { return once_->name(); }
  DType activation_dtype() const override { return once_->activation_dtype(); }
  Stream stream() const override { return once_->stream(); }
  int num_threads() const override { return once_->num_threads(); }
  DeviceFacts device_facts() const override { return once_->device_facts(); }
  Buffer allocate(std::int64_t bytes) override { return once_->allocate(bytes); }
  void upload(void* device, const void* host, std::int64_t bytes) override {
    once_->upload(device, host, bytes);
  }
  void download(void* host, const void* device, std::int64_t bytes) override {
    once_->download(host, device, bytes);
  }
  void synchronize() override { once_->synchronize(); }
  Buffer allocate_host(std::int64_t bytes) override { return once_->allocate_host(bytes); }
  bool asynchronous() const override { return once_->asynchronous(); }
  void set_fence(std::size_t index) override { once_->set_fence(index); }
  void wait_fence(std::size_t index) override { once_->wait_fence(index); }
  std::int64_t free_bytes() const override { return once_->free_bytes(); }
  void prepare(const WeightView& matrix) override { once_->prepare(matrix); }
  std::unique_ptr<ExpertSet> make_expert_set(const ExpertWeights& weights) override {
    return once_->make_expert_set(weights);
  }
  void run_recorded(std::int64_t key, bool replayable, const std::function<void()>& body) override {
    once_->run_recorded(key, replayable, [&] {
      recording_ = true;
      body();
      recording_ = false;
    });
  }
  void forget_recorded(std::int64_t key) override { once_->forget_recorded(key); }
  void mark(std::size_t index) override { once_->mark(index); }
  double milliseconds_between(std::size_t first, std::size_t second) override {
    return once_->milliseconds_between(first, second);
  }
  void copy(ConstTensorView source, TensorView target) override {
    twice("copy", {target}, [&] { once_->copy(source, target); });
  }
  void fill_zero(TensorView target) override {
    twice("fill_zero", {target}, [&] { once_->fill_zero(target); });
  }
  void fill_random(const RandomFill& fill, const RandomBlock& block, TensorView target) override {
    twice("fill_random", {target}, [&] { once_->fill_random(fill, block, target); });
  }

  void embed(const WeightView& table, std::int64_t first_row, ConstTensorView token_ids,
             TensorView out) override {
    twice("embed", {out}, [&] { once_->embed(table, first_row, token_ids, out); });
  }
  void rms_norm(ConstTensorView x, ConstTensorView weight, float eps, TensorView y) override {
    twice("rms_norm", {y}, [&] { once_->rms_norm(x, weight, eps, y); });
  }
  void linear(const WeightView& w, ConstTensorView x, TensorView y) override {
    twice("linear", {y}, [&] { once_->linear(w, x, y); });
  }
  void add(TensorView x, ConstTensorView delta) override {
    twice("add", {x}, [&] { once_->add(x, delta); });
  }
  void add_rms_norm(TensorView x, ConstTensorView delta, ConstTensorView weight, float eps,
                    TensorView y) override {
    twice("add_rms_norm", {x, y}, [&] { once_->add_rms_norm(x, delta, weight, eps, y); });
  }
  void swiglu(ConstTensorView gate, ConstTensorView up, TensorView y) override {
    twice("swiglu", {y}, [&] { once_->swiglu(gate, up, y); });
  }
  void gather_rows(ConstTensorView source, ConstTensorView indices, TensorView out) override {
    twice("gather_rows", {out}, [&] { once_->gather_rows(source, indices, out); });
  }
  void add_rows(ConstTensorView source, ConstTensorView indices, TensorView target) override {
    twice("add_rows", {target}, [&] { once_->add_rows(source, indices, target); });
  }

  void rope(const RopeParams& params) override {
    twice("rope", {params.x}, [&] { once_->rope(params); });
  }
  void absorb_query(const WeightView& kv_b, const MlaShape& shape, ConstTensorView q,
                    TensorView query) override {
    twice("absorb_query", {query}, [&] { once_->absorb_query(kv_b, shape, q, query); });
  }
  void expand_value(const WeightView& kv_b, const MlaShape& shape, ConstTensorView o_latent,
                    TensorView out) override {
    twice("expand_value", {out}, [&] { once_->expand_value(kv_b, shape, o_latent, out); });
  }
  void cache_write(const CacheWriteParams& params) override {
    twice("cache_write", {params.cache}, [&] { once_->cache_write(params); });
  }
  void tree_attention(const TreeAttentionParams& params) override {
    twice("tree_attention", {params.output}, [&] { once_->tree_attention(params); });
  }
  void block_attention(const BlockAttentionParams& params) override {
    twice("block_attention", {params.output}, [&] { once_->block_attention(params); });
  }

  void router(const RouterParams& params) override {
    twice("router", {params.expert_ids, params.expert_weights}, [&] { once_->router(params); });
  }
  std::int64_t experts_workspace_bytes(std::int64_t max_rows, std::int64_t num_experts_per_tok,
                                       std::int64_t hidden_size,
                                       std::int64_t moe_intermediate_size) const override {
    return once_->experts_workspace_bytes(max_rows, num_experts_per_tok, hidden_size,
                                          moe_intermediate_size);
  }
  void experts(const ExpertsParams& params) override {
    bool again = false;
    twice("experts", {params.output}, [&] {
      // The first run finds NaN, which spreads, and -1 as an integer; the second zeros, which are
      // sound indices.
      if (again) {
        write(params.workspace, std::vector<std::byte>(span_bytes(params.workspace)));
      }
      again = true;
      once_->experts(params);
    });
  }
  void choose_replicas(const ChooseReplicasParams& params) override {
    twice("choose_replicas", {params.targets}, [&] { once_->choose_replicas(params); });
  }
  void count_experts(const CountExpertsParams& params) override {
    twice("count_experts", {params.counts}, [&] { once_->count_experts(params); });
  }
  void plan_dispatch(const DispatchPlanParams& params) override {
    twice("plan_dispatch", {params.row_indices, params.counts},
          [&] { once_->plan_dispatch(params); });
  }
  void pack_dispatch(const PackDispatchParams& params) override {
    twice("pack_dispatch", {params.messages}, [&] { once_->pack_dispatch(params); });
  }

  void top_k(ConstTensorView logits, std::int64_t first_id, TensorView values,
             TensorView ids) override {
    twice("top_k", {values, ids}, [&] { once_->top_k(logits, first_id, values, ids); });
  }
  void log_sum_exp_partials(ConstTensorView logits, TensorView partials) override {
    twice("log_sum_exp_partials", {partials},
          [&] { once_->log_sum_exp_partials(logits, partials); });
  }
  void merge_top_k(ConstTensorView part_values, ConstTensorView part_ids, ConstTensorView partials,
                   TensorView values, TensorView ids) override {
    twice("merge_top_k", {values, ids},
          [&] { once_->merge_top_k(part_values, part_ids, partials, values, ids); });
  }

  void build_trees(const TreeBuildParams& params) override {
    const TreeArrays& trees = params.trees;
    twice("build_trees", {trees.num_nodes, trees.token_ids, trees.parents, trees.depths},
          [&] { once_->build_trees(params); });
  }
  void accept(const AcceptParams& params) override {
    twice("accept", {params.path_lengths, params.paths, params.bonus_tokens},
          [&] { once_->accept(params); });
  }
  void compact(const CompactParams& params) override {
    twice("compact", {params.cache}, [&] { once_->compact(params); });
  }
  void expand_trees(const ExpandTreesParams& params) override {
    twice("expand_trees", {params.token_ids, params.positions, params.ancestor_mask},
          [&] { once_->expand_trees(params); });
  }
  void expand_blocks(const ExpandBlocksParams& params) override {
    twice("expand_blocks", {params.token_ids, params.positions},
          [&] { once_->expand_blocks(params); });
  }
  void accepted_rows(const AcceptedRowsParams& params) override {
    twice("accepted_rows", {params.rows, params.positions}, [&] { once_->accepted_rows(params); });
  }
  void sum_words(ConstTensorView words, TensorView sum) override {
    twice("sum_words", {sum}, [&] { once_->sum_words(words, sum); });
  }
  void advance(ConstTensorView path_lengths, ConstTensorView bonus_tokens,
               TensorView prefix_lengths, TensorView roots) override {
    twice("advance", {prefix_lengths, roots},
          [&] { once_->advance(path_lengths, bonus_tokens, prefix_lengths, roots); });
  }

 private:
  static constexpr std::byte kNan{0xFF};  // of all bytes: NaN in float32 and bf16

  using Images = std::vector<std::vector<std::byte>>;

  // From a tensor's first element to its last, with what lies between its rows.
  static std::size_t span_bytes(const TensorView& tensor) {
    if (tensor.empty() || tensor.num_elements() == 0) {
      return 0;
    }
    const std::int64_t elements =
        tensor.shape().rank() == 0
            ? 1
            : (tensor.size(0) - 1) * tensor.row_stride() + tensor.shape().row_elements();
    return static_cast<std::size_t>(elements * dtype_bytes(tensor.dtype()));
  }
  Images read(const std::vector<TensorView>& tensors) {
    Images images;
    for (const TensorView& tensor : tensors) {
      images.emplace_back(span_bytes(tensor));
      once_->download(images.back().data(), tensor.raw(),
                      static_cast<std::int64_t>(images.back().size()));
    }
    once_->synchronize();
    return images;
  }
  void write(const TensorView& tensor, const std::vector<std::byte>& image) {
    once_->upload(tensor.raw(), image.data(), static_cast<std::int64_t>(image.size()));
    once_->synchronize();
  }

  void twice(const char* op, std::initializer_list<TensorView> written,
             const std::function<void()>& run) {
    if (recording_) {
      run();
      return;
    }
    const std::vector<TensorView> tensors(written);
    const Images before = read(tensors);
    run();
    const Images first = read(tensors);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      write(tensors[i], before[i]);
    }
    fill_scratch_with_nan();
    run();
    EXPECT_TRUE(read(tensors) == first) << op << " gives other bits when it runs again";
  }

  // The CUDA backend's ops share one scratch memory, and linear widens operands that are not
  // float32 into its first bytes: with NaN there, the next op finds NaN.
  void allocate_nan() {
    constexpr std::int64_t kIn = 1024;
    constexpr std::int64_t kWide = 2048;  // rows that are widened: 8 MiB of NaN
    constexpr std::int64_t kFew = 8;
    const bool widens_x = activation_dtype() == DType::kBFloat16;
    const std::int64_t rows = widens_x ? kWide : kFew;
    const std::int64_t out = widens_x ? kFew : kWide;
    const std::vector<std::byte> image(static_cast<std::size_t>(kWide * kIn * 2), kNan);
    const auto allocate_filled = [&](std::int64_t bytes) -> void* {
      nan_memory_.push_back(once_->allocate(bytes));
      once_->upload(nan_memory_.back().data(), image.data(), bytes);
      return nan_memory_.back().data();
    };
    nan_w_ = {.format = widens_x ? WeightFormat::kFloat32 : WeightFormat::kBFloat16,
              .out_features = out,
              .in_features = kIn,
              .data = allocate_filled(out * kIn * (widens_x ? 4 : 2))};
    nan_x_ = {allocate_filled(rows * kIn * dtype_bytes(activation_dtype())), activation_dtype(),
              Shape{rows, kIn}};
    nan_y_ = {allocate_filled(rows * out * 4), DType::kFloat32, Shape{rows, out}};
    once_->synchronize();
  }
  void fill_scratch_with_nan() {
    if (!nan_memory_.empty()) {
      once_->linear(nan_w_, nan_x_, nan_y_);
    }
  }

  std::unique_ptr<Backend> once_;
  bool recording_ = false;
  std::vector<Buffer> nan_memory_;  // of the three below; none on the CPU, which has no scratch
  WeightView nan_w_;
  ConstTensorView nan_x_;
  TensorView nan_y_;
};

}  // namespace kdtree::ops_test
