// Random tensors: kernels/random_fill.h.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/elements.h"
#include "kernels/op_contract.h"

namespace kdtree {
namespace {

constexpr unsigned kMostBlocks = 1U << 16;

template <class T>
__device__ T random_element(const RandomFill& fill, std::int64_t index) {
  const std::uint64_t bits = random_bits(fill.seed, index);
  if constexpr (std::is_same_v<T, std::int32_t>) {
    return static_cast<std::int32_t>(bits >> 32);
  } else {
    const float width = __fsub_rn(fill.high, fill.low);
    const float value = __fadd_rn(fill.low, __fmul_rn(random_share(bits), width));
    return from_float<T>(__bfloat162float(__float2bfloat16_rn(value)));
  }
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    fill_random_kernel(RandomFill fill, RandomBlock block, T* target, std::int64_t count,
                       std::int64_t cols) {
  const std::int64_t step = std::int64_t{gridDim.x} * kBlockThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kBlockThreads + threadIdx.x; i < count;
       i += step) {
    const std::int64_t row = block.first_row + i / cols;
    target[i] = random_element<T>(fill, row * block.total_columns + block.first_column + i % cols);
  }
}

}  // namespace

void CudaBackend::fill_random(const RandomFill& fill, const RandomBlock& block, TensorView target) {
  check_random_fill(fill, block, target);
  const std::int64_t count = target.num_elements();
  if (count == 0) {
    return;
  }
  const std::int64_t blocks = (count + kBlockThreads - 1) / kBlockThreads;
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(blocks, kMostBlocks));
  const auto launch = [&](auto type) {
    using T = decltype(type);
    fill_random_kernel<T><<<grid, kBlockThreads, 0, cuda_stream()>>>(
        fill, block, static_cast<T*>(target.raw()), count, target.size(1));
  };
  if (fill.kind == RandomFill::Kind::kBits) {
    launch(std::int32_t{});
  } else {
    with_float_type(target.dtype(), launch);
  }
  check_launch("fill_random");
}

}  // namespace kdtree
