// Random tensors: kernels/random_fill.h.
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel.h"
#include "kernels/op_contract.h"

namespace kdtree {

void CpuBackend::fill_random(const RandomFill& fill, const RandomBlock& block, TensorView target) {
  check_random_fill(fill, block, target);
  const std::int64_t rows = target.size(0);
  const std::int64_t cols = target.size(1);
  const auto index = [&](std::int64_t r, std::int64_t c) {
    return (block.first_row + r) * block.total_columns + block.first_column + c;
  };
  // One rounding a product and a sum, as the CUDA backend has it.
  const float width = fill.high - fill.low;
  const auto value = [&](std::int64_t r, std::int64_t c) {
    const float product = random_share(random_bits(fill.seed, index(r, c))) * width;
    return BFloat16::from_float(fill.low + product);
  };
  parallel_for(num_threads_, {rows, rows * cols}, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        if (fill.kind == RandomFill::Kind::kBits) {
          target.row<std::int32_t>(r)[c] =
              static_cast<std::int32_t>(random_bits(fill.seed, index(r, c)) >> 32);
        } else if (target.dtype() == DType::kBFloat16) {
          target.row<BFloat16>(r)[c] = value(r, c);
        } else {
          target.row<float>(r)[c] = value(r, c).to_float();
        }
      }
    }
  });
}

}  // namespace kdtree
