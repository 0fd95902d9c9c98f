#include "kernels/cuda/gemm.h"

#include <algorithm>
#include <cstddef>

#include "kernels/cuda/cuda_call.h"

namespace kdtree {
namespace {

// Rows for which cuBLAS is asked for its best kernel: a verify step's.
constexpr std::int64_t kPlannedRows = 64;
// Rows of one call: a chosen kernel that splits the sum needs workspace for each of them.
constexpr std::int64_t kMaxRows = 512;
constexpr int kMaxCandidates = 16;

cudaDataType_t cuda_type(DType dtype) {
  check(dtype == DType::kFloat32 || dtype == DType::kBFloat16, "a matrix product of {}",
        dtype_name(dtype));
  return dtype == DType::kFloat32 ? CUDA_R_32F : CUDA_R_16BF;
}

// The largest power of two up to 16 that divides the address of every row: it does not depend on
// which of a tensor's rows a call has.
std::int64_t row_alignment(const void* data, std::int64_t stride, std::int64_t batch_stride,
                           DType dtype) {
  const std::int64_t element = dtype_bytes(dtype);
  const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(data) |
                             static_cast<std::uint64_t>(stride * element) |
                             static_cast<std::uint64_t>(batch_stride * element) | 16U;
  return static_cast<std::int64_t>(bits & (~bits + 1));
}

struct Alignments {
  std::int64_t w;
  std::int64_t x;
  std::int64_t y;
};

Alignments alignments(const Gemm& gemm) {
  return {row_alignment(gemm.w, gemm.w_stride, gemm.w_batch_stride, gemm.dtype),
          row_alignment(gemm.x, gemm.x_stride, gemm.x_batch_stride, gemm.dtype),
          row_alignment(gemm.y, gemm.y_stride, gemm.y_batch_stride, gemm.y_dtype)};
}

void init_layout(cublasLtMatrixLayout_t layout, DType dtype, std::int64_t rows, std::int64_t cols,
                 std::int64_t stride, std::int64_t batch, std::int64_t batch_stride) {
  check_cublas(cublasLtMatrixLayoutInit(layout, cuda_type(dtype), static_cast<std::uint64_t>(rows),
                                        static_cast<std::uint64_t>(cols), stride),
               "cublasLtMatrixLayoutInit");
  const auto count = static_cast<std::int32_t>(batch);
  check_cublas(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                                sizeof(count)),
               "batch count");
  check_cublas(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                &batch_stride, sizeof(batch_stride)),
               "batch stride");
}

// A product as cuBLAS sees it. Its matrices are column-major: y transposed [out, rows] = w [out,
// in] times x transposed [in, rows].
struct Problem {
  cublasLtMatmulDescOpaque_t operation{};
  cublasLtMatrixLayoutOpaque_t w{};
  cublasLtMatrixLayoutOpaque_t x{};
  cublasLtMatrixLayoutOpaque_t y{};

  Problem(const Gemm& gemm, std::int64_t rows) {
    const auto compute = gemm.dtype == DType::kFloat32 ? CUBLAS_COMPUTE_32F_PEDANTIC  // no TF32
                                                       : CUBLAS_COMPUTE_32F;
    check_cublas(cublasLtMatmulDescInit(&operation, compute, CUDA_R_32F), "cublasLtMatmulDescInit");
    const cublasOperation_t transpose = gemm.w_transposed ? CUBLAS_OP_N : CUBLAS_OP_T;
    check_cublas(cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                                sizeof(transpose)),
                 "transpose");
    init_layout(&w, gemm.dtype, gemm.w_transposed ? gemm.out : gemm.in,
                gemm.w_transposed ? gemm.in : gemm.out, gemm.w_stride, gemm.batch,
                gemm.w_batch_stride);
    init_layout(&x, gemm.dtype, gemm.in, rows, gemm.x_stride, gemm.batch, gemm.x_batch_stride);
    init_layout(&y, gemm.y_dtype, gemm.out, rows, gemm.y_stride, gemm.batch, gemm.y_batch_stride);
  }
};

template <class T>
void set_preference(cublasLtMatmulPreference_t preference,
                    cublasLtMatmulPreferenceAttributes_t attribute, std::int64_t value) {
  const auto typed = static_cast<T>(value);
  check_cublas(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &typed, sizeof(typed)),
               "cublasLtMatmulPreferenceSetAttribute");
}

bool runs(cublasLtHandle_t handle, const Gemm& gemm, std::int64_t rows,
          const cublasLtMatmulAlgo_t& algo, std::int64_t workspace_bytes) {
  Problem problem(gemm, rows);
  cublasLtMatmulHeuristicResult_t result{};
  return cublasLtMatmulAlgoCheck(handle, &problem.operation, &problem.w, &problem.x, &problem.y,
                                 &problem.y, &algo, &result) == CUBLAS_STATUS_SUCCESS &&
         result.state == CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= static_cast<std::size_t>(workspace_bytes);
}

}  // namespace

const GemmPlans::Plan& GemmPlans::plan(cublasLtHandle_t handle, const Gemm& gemm,
                                       std::int64_t workspace_bytes) {
  const Alignments aligned = alignments(gemm);
  const Key key = {gemm.out,
                   gemm.in,
                   gemm.batch,
                   static_cast<std::int64_t>(gemm.dtype),
                   static_cast<std::int64_t>(gemm.y_dtype),
                   gemm.w_transposed ? 1 : 0,
                   gemm.w_stride,
                   gemm.w_batch_stride,
                   gemm.x_stride,
                   gemm.x_batch_stride,
                   gemm.y_stride,
                   gemm.y_batch_stride,
                   aligned.w,
                   aligned.x,
                   aligned.y,
                   workspace_bytes};
  const auto known = plans_.find(key);
  if (known != plans_.end()) {
    return known->second;
  }
  cublasLtMatmulPreferenceOpaque_t preference{};
  check_cublas(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit");
  set_preference<std::uint64_t>(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                workspace_bytes);
  // Parts of a split sum meet in float32 and in order, or not at all.
  set_preference<std::uint32_t>(
      &preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
  set_preference<std::uint32_t>(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned.w);
  set_preference<std::uint32_t>(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned.x);
  set_preference<std::uint32_t>(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned.y);
  set_preference<std::uint32_t>(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned.y);
  Problem problem(gemm, kPlannedRows);
  std::array<cublasLtMatmulHeuristicResult_t, kMaxCandidates> candidates{};
  int num_candidates = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle, &problem.operation, &problem.w, &problem.x, &problem.y, &problem.y, &preference,
      kMaxCandidates, candidates.data(), &num_candidates);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) {
    check_cublas(status, "cublasLtMatmulAlgoGetHeuristic");
  }
  Plan made;
  for (int i = 0; i < num_candidates && !made.found; ++i) {
    const cublasLtMatmulHeuristicResult_t& candidate = candidates.at(static_cast<std::size_t>(i));
    made.found = candidate.state == CUBLAS_STATUS_SUCCESS &&
                 runs(handle, gemm, 1, candidate.algo, workspace_bytes) &&
                 runs(handle, gemm, kMaxRows, candidate.algo, workspace_bytes);
    made.algo = candidate.algo;
  }
  return plans_.emplace(key, made).first->second;
}

void GemmPlans::run(cublasLtHandle_t handle, const Gemm& gemm, const GemmWorkspace& workspace,
                    cudaStream_t stream) {
  const Plan& chosen = plan(handle, gemm, workspace.bytes);
  if (!chosen.found) {
    plain_gemm(gemm, stream);
    return;
  }
  const float one = 1;
  const float zero = 0;
  for (std::int64_t first = 0; first < gemm.rows; first += kMaxRows) {
    Problem problem(gemm, std::min(kMaxRows, gemm.rows - first));
    const auto* x =
        static_cast<const std::byte*>(gemm.x) + first * gemm.x_stride * dtype_bytes(gemm.dtype);
    auto* y = static_cast<std::byte*>(gemm.y) + first * gemm.y_stride * dtype_bytes(gemm.y_dtype);
    check_cublas(cublasLtMatmul(handle, &problem.operation, &one, gemm.w, &problem.w, x, &problem.x,
                                &zero, y, &problem.y, y, &problem.y, &chosen.algo, workspace.data,
                                static_cast<std::size_t>(workspace.bytes), stream),
                 "cublasLtMatmul");
  }
}

}  // namespace kdtree
