#include "kernels/cuda/cuda_call.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/gemm.h"

namespace kdtree {
namespace {

// One thread an output, the sum in order of k.
template <class T, class Y>
__global__ void __launch_bounds__(kBlockThreads) plain_gemm_kernel(Gemm gemm) {
  const std::int64_t r = blockIdx.x;
  for_columns(gemm.batch * gemm.out, [&](std::int64_t i) {
    const std::int64_t b = i / gemm.out;
    const std::int64_t o = i - b * gemm.out;
    const std::int64_t out_step = gemm.w_transposed ? 1 : gemm.w_stride;
    const std::int64_t in_step = gemm.w_transposed ? gemm.w_stride : 1;
    const T* w = static_cast<const T*>(gemm.w) + b * gemm.w_batch_stride + o * out_step;
    const T* x = static_cast<const T*>(gemm.x) + b * gemm.x_batch_stride + r * gemm.x_stride;
    float sum = 0;
    for (std::int64_t k = 0; k < gemm.in; ++k) {
      sum = fmaf(to_float(w[k * in_step]), to_float(x[k]), sum);
    }
    static_cast<Y*>(gemm.y)[b * gemm.y_batch_stride + r * gemm.y_stride + o] = from_float<Y>(sum);
  });
}

}  // namespace

void plain_gemm(const Gemm& gemm, cudaStream_t stream) {
  with_float_type(gemm.dtype, [&](auto type) {
    with_float_type(gemm.y_dtype, [&](auto y_type) {
      using T = decltype(type);
      using Y = decltype(y_type);
      plain_gemm_kernel<T, Y>
          <<<row_grid(gemm.rows, gemm.batch * gemm.out), kBlockThreads, 0, stream>>>(gemm);
    });
  });
  check_launch("plain_gemm");
}

}  // namespace kdtree
