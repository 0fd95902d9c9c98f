// sum_words: what a plain read of memory takes.
#include <atomic>
#include <cstdint>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel.h"

namespace kdtree {

void CpuBackend::sum_words(ConstTensorView words, TensorView sum) {
  const std::int64_t count = words.num_elements();
  expect_tensor("sum_words' words", words, DType::kInt32, Shape{count});
  expect_tensor("sum_words' sum", sum, DType::kInt32, Shape{1});
  const auto* from = words.data<std::int32_t>();
  // Modulo 2^32 the order of the parts shows in no bit.
  std::atomic<std::uint32_t> total{0};
  parallel_for(num_threads_, {count, count}, [&](std::int64_t begin, std::int64_t end) {
    std::uint32_t part = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      part += static_cast<std::uint32_t>(from[i]);
    }
    total += part;
  });
  *sum.data<std::int32_t>() = static_cast<std::int32_t>(total.load());
}

}  // namespace kdtree
