// Matrix products by cuBLAS whose rows do not depend on each other.
//
// cuBLAS's own choice of a kernel depends on the number of rows, and with it the order of every
// sum. Here the kernel is chosen once for a product's other sizes and then serves every number of
// rows, so that a row has the same bits in a call of one row and in a call of many.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <map>

#include "core/dtype.h"

namespace kdtree {

// What a part of a workspace takes, so that the one behind it starts aligned as all memory does.
constexpr std::int64_t aligned_bytes(std::int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// y[b][r, o] = sum_k w[b][o, k] * x[b][r, k] for b in [0, batch). w and x are both float32 (summed
// in float32 without shortcuts) or both bf16 (products exact, summed in float32); y is float32 or,
// for bf16 operands, bf16. Strides in elements; no size may be 0.
struct Gemm {
  std::int64_t rows = 0;
  std::int64_t out = 0;
  std::int64_t in = 0;
  std::int64_t batch = 1;
  DType dtype = DType::kFloat32;  // of w and x
  DType y_dtype = DType::kFloat32;
  // w as it lies in memory: row-major [out, in], or its transpose [in, out].
  bool w_transposed = false;
  const void* w = nullptr;
  std::int64_t w_stride = 0;
  std::int64_t w_batch_stride = 0;
  const void* x = nullptr;
  std::int64_t x_stride = 0;
  std::int64_t x_batch_stride = 0;
  void* y = nullptr;
  std::int64_t y_stride = 0;
  std::int64_t y_batch_stride = 0;
};

// Device memory that a product may use while it runs.
struct GemmWorkspace {
  void* data = nullptr;
  std::int64_t bytes = 0;
};

class GemmPlans {
 public:
  // Queues the product on `stream`. The same `workspace` size every time.
  void run(cublasLtHandle_t handle, const Gemm& gemm, const GemmWorkspace& workspace,
           cudaStream_t stream);

 private:
  struct Plan {
    bool found = false;  // false: cuBLAS has no kernel for these sizes and addresses
    cublasLtMatmulAlgo_t algo{};
  };
  using Key = std::array<std::int64_t, 16>;

  const Plan& plan(cublasLtHandle_t handle, const Gemm& gemm, std::int64_t workspace_bytes);

  std::map<Key, Plan> plans_;
};

// The same product by a plain kernel, for what cuBLAS has no kernel for. Slow.
void plain_gemm(const Gemm& gemm, cudaStream_t stream);

}  // namespace kdtree
