// The class behind make_cuda_backend. One file holds one group of ops.
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/cuda_call.h"
#include "kernels/cuda/gemm.h"

namespace kdtree {

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(const BackendOptions& options);
  ~CudaBackend() override;

  // memory.cpp
  std::string name() const override { return "cuda"; }
  DType activation_dtype() const override { return activation_dtype_; }
  Stream stream() const override { return {stream_}; }
  int num_threads() const override { return num_threads_; }
  DeviceFacts device_facts() const override;
  Buffer allocate(std::int64_t bytes) override;
  void upload(void* device, const void* host, std::int64_t bytes) override;
  void download(void* host, const void* device, std::int64_t bytes) override;
  void synchronize() override;
  Buffer allocate_host(std::int64_t bytes) override;
  bool asynchronous() const override { return true; }
  void set_fence(std::size_t index) override;
  void wait_fence(std::size_t index) override;
  std::int64_t free_bytes() const override;
  void copy(ConstTensorView source, TensorView target) override;
  void fill_zero(TensorView target) override;
  void fill_random(const RandomFill& fill, const RandomBlock& block, TensorView target) override;
  // recording.cpp
  void run_recorded(std::int64_t key, bool replayable, const std::function<void()>& body) override;
  void forget_recorded(std::int64_t key) override;
  void mark(std::size_t index) override;
  double milliseconds_between(std::size_t first, std::size_t second) override;

  // linear.cpp (cuBLAS), elementwise.cu, norm.cu, rope.cu
  void embed(const WeightView& table, std::int64_t first_row, ConstTensorView token_ids,
             TensorView out) override;
  void rms_norm(ConstTensorView x, ConstTensorView weight, float eps, TensorView y) override;
  void add_rms_norm(TensorView x, ConstTensorView delta, ConstTensorView weight, float eps,
                    TensorView y) override;
  void linear(const WeightView& w, ConstTensorView x, TensorView y) override;
  void add(TensorView x, ConstTensorView delta) override;
  void swiglu(ConstTensorView gate, ConstTensorView up, TensorView y) override;
  void gather_rows(ConstTensorView source, ConstTensorView indices, TensorView out) override;
  void add_rows(ConstTensorView source, ConstTensorView indices, TensorView target) override;
  void rope(const RopeParams& params) override;
  // mla.cpp (cuBLAS), cache.cu, tree_attention.cu, block_attention.cu
  void absorb_query(const WeightView& kv_b, const MlaShape& shape, ConstTensorView q,
                    TensorView query) override;
  void expand_value(const WeightView& kv_b, const MlaShape& shape, ConstTensorView o_latent,
                    TensorView out) override;
  void cache_write(const CacheWriteParams& params) override;
  void tree_attention(const TreeAttentionParams& params) override;
  void block_attention(const BlockAttentionParams& params) override;
  // router.cu, experts*.cu
  void prepare(const WeightView& matrix) override;
  std::unique_ptr<ExpertSet> make_expert_set(const ExpertWeights& weights) override;
  void router(const RouterParams& params) override;
  std::int64_t experts_workspace_bytes(std::int64_t max_rows, std::int64_t num_experts_per_tok,
                                       std::int64_t hidden_size,
                                       std::int64_t moe_intermediate_size) const override;
  void experts(const ExpertsParams& params) override;
  void choose_replicas(const ChooseReplicasParams& params) override;
  void count_experts(const CountExpertsParams& params) override;
  void plan_dispatch(const DispatchPlanParams& params) override;
  void pack_dispatch(const PackDispatchParams& params) override;
  // vocabulary.cu
  void top_k(ConstTensorView logits, std::int64_t first_id, TensorView values,
             TensorView ids) override;
  void log_sum_exp_partials(ConstTensorView logits, TensorView partials) override;
  void merge_top_k(ConstTensorView part_values, ConstTensorView part_ids, ConstTensorView partials,
                   TensorView values, TensorView ids) override;
  // tree_build.cu, accept.cu, step.cu
  void build_trees(const TreeBuildParams& params) override;
  void accept(const AcceptParams& params) override;
  void compact(const CompactParams& params) override;
  void expand_trees(const ExpandTreesParams& params) override;
  void expand_blocks(const ExpandBlocksParams& params) override;
  void accepted_rows(const AcceptedRowsParams& params) override;
  void advance(ConstTensorView path_lengths, ConstTensorView bonus_tokens,
               TensorView prefix_lengths, TensorView roots) override;
  // read_ceiling.cu
  void sum_words(ConstTensorView words, TensorView sum) override;

  // For the ops' files.
  cudaStream_t cuda_stream() const { return stream_; }
  const cudaDeviceProp& properties() const { return properties_; }
  bool is_float32() const { return activation_dtype_ == DType::kFloat32; }
  // Device scratch of at least `bytes`, shared by all ops in stream order: its content does not
  // outlive the op, which asks for all of its scratch at once. Grows outside of recording only
  // (Error while recording: a first run outside must have seen the largest size).
  void* scratch(std::int64_t bytes);
  cublasHandle_t cublas() const { return cublas_; }

 private:
  static constexpr std::int64_t kCublasWorkspaceBytes = std::int64_t{32} << 20;

  // What run_recorded knows of a key that it has run.
  struct Recorded {
    Recorded() = default;
    Recorded(const Recorded&) = delete;
    Recorded& operator=(const Recorded&) = delete;
    ~Recorded();

    cudaGraphExec_t executable = nullptr;  // nullptr: run once, not recorded yet
  };

  cudaGraphExec_t record(const std::function<void()>& body);
  // A product with operands that cuBLAS takes as they are (linear.cpp).
  void gemm(const Gemm& product);
  // The product with w in float32 throughout; `product` as it would be without widening.
  void linear_float32(const WeightView& w, const Gemm& product);
  // One product a head with the part of kv_b that begins at first_element (mla.cpp).
  void head_products(const WeightView& kv_b, std::int64_t first_element, Gemm product);

  DType activation_dtype_;
  int num_threads_;
  int device_;
  cudaDeviceProp properties_{};
  cudaStream_t stream_ = nullptr;
  cublasHandle_t cublas_ = nullptr;
  void* cublas_workspace_ = nullptr;
  GemmPlans gemm_plans_;
  void* scratch_ = nullptr;
  std::int64_t scratch_bytes_ = 0;
  std::vector<void*> outgrown_;  // earlier scratch that recorded work may still name
  bool recording_ = false;
  std::map<std::int64_t, std::unique_ptr<Recorded>> recorded_;
  std::array<cudaEvent_t, kNumMarks> marks_{};
  std::array<cudaEvent_t, kNumFences> fences_{};
};

}  // namespace kdtree
