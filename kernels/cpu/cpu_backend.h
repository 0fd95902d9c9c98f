// The CPU backend: float32 activations, plain loops, the reference for every other backend. Calls
// finish before they return. One file holds one group of ops.
#pragma once

#include <array>
#include <chrono>

#include "kernels/backend.h"

namespace kdtree {

class CpuBackend : public Backend {
 public:
  // `num_threads` OpenMP threads share an op's outputs; results do not depend on their number.
  explicit CpuBackend(int num_threads);

  std::string name() const override { return "cpu"; }
  DType activation_dtype() const override { return DType::kFloat32; }
  Stream stream() const override { return {}; }
  int num_threads() const override { return num_threads_; }
  DeviceFacts device_facts() const override;
  Buffer allocate(std::int64_t bytes) override;
  void upload(void* device, const void* host, std::int64_t bytes) override;
  void download(void* host, const void* device, std::int64_t bytes) override;
  void synchronize() override {}
  Buffer allocate_host(std::int64_t bytes) override { return allocate(bytes); }
  bool asynchronous() const override { return false; }
  void set_fence(std::size_t /*index*/) override {}
  void wait_fence(std::size_t /*index*/) override {}
  std::int64_t free_bytes() const override;
  void prepare(const WeightView& matrix) override;
  std::unique_ptr<ExpertSet> make_expert_set(const ExpertWeights& weights) override;
  void run_recorded(std::int64_t key, bool replayable, const std::function<void()>& body) override;
  void forget_recorded(std::int64_t /*key*/) override {}
  void mark(std::size_t index) override;
  double milliseconds_between(std::size_t first, std::size_t second) override;
  void copy(ConstTensorView source, TensorView target) override;
  void fill_zero(TensorView target) override;
  void fill_random(const RandomFill& fill, const RandomBlock& block, TensorView target) override;

  void embed(const WeightView& table, std::int64_t first_row, ConstTensorView token_ids,
             TensorView out) override;
  void rms_norm(ConstTensorView x, ConstTensorView weight, float eps, TensorView y) override;
  void linear(const WeightView& w, ConstTensorView x, TensorView y) override;
  void add(TensorView x, ConstTensorView delta) override;
  void add_rms_norm(TensorView x, ConstTensorView delta, ConstTensorView weight, float eps,
                    TensorView y) override;
  void swiglu(ConstTensorView gate, ConstTensorView up, TensorView y) override;
  void gather_rows(ConstTensorView source, ConstTensorView indices, TensorView out) override;
  void add_rows(ConstTensorView source, ConstTensorView indices, TensorView target) override;

  void rope(const RopeParams& params) override;
  void absorb_query(const WeightView& kv_b, const MlaShape& shape, ConstTensorView q,
                    TensorView query) override;
  void expand_value(const WeightView& kv_b, const MlaShape& shape, ConstTensorView o_latent,
                    TensorView out) override;
  void cache_write(const CacheWriteParams& params) override;
  void tree_attention(const TreeAttentionParams& params) override;
  void block_attention(const BlockAttentionParams& params) override;

  void router(const RouterParams& params) override;
  std::int64_t experts_workspace_bytes(std::int64_t max_rows, std::int64_t num_experts_per_tok,
                                       std::int64_t hidden_size,
                                       std::int64_t moe_intermediate_size) const override;
  void experts(const ExpertsParams& params) override;
  void choose_replicas(const ChooseReplicasParams& params) override;
  void count_experts(const CountExpertsParams& params) override;
  void plan_dispatch(const DispatchPlanParams& params) override;
  void pack_dispatch(const PackDispatchParams& params) override;

  void top_k(ConstTensorView logits, std::int64_t first_id, TensorView values,
             TensorView ids) override;
  void log_sum_exp_partials(ConstTensorView logits, TensorView partials) override;
  void merge_top_k(ConstTensorView part_values, ConstTensorView part_ids, ConstTensorView partials,
                   TensorView values, TensorView ids) override;

  void build_trees(const TreeBuildParams& params) override;
  void accept(const AcceptParams& params) override;
  void compact(const CompactParams& params) override;
  void expand_trees(const ExpandTreesParams& params) override;
  void expand_blocks(const ExpandBlocksParams& params) override;
  void accepted_rows(const AcceptedRowsParams& params) override;
  void advance(ConstTensorView path_lengths, ConstTensorView bonus_tokens,
               TensorView prefix_lengths, TensorView roots) override;

  void sum_words(ConstTensorView words, TensorView sum) override;

 private:
  int num_threads_;
  std::array<std::chrono::steady_clock::time_point, kNumMarks> marks_{};
};

}  // namespace kdtree
