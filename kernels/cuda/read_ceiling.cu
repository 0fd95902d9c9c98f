// sum_words: what a plain read of memory takes. Plain 16-byte loads that ask the L2 not to keep
// what passes through once, as the kernels that stream weights do.
#include <algorithm>

#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/shapes.h"

namespace kdtree {
namespace {

constexpr int kReadThreads = 512;
constexpr int kBlocksPerSm = 4;  // all threads that a multiprocessor holds
constexpr int kLoads = 4;        // of a thread in flight: 128 KB a multiprocessor
constexpr int kVectorWords = 4;
constexpr int kWarpThreads = 32;

// A buffer as 16-byte vectors, with the words before the first and behind the last of them.
struct WordRuns {
  const std::uint32_t* head;
  std::int64_t num_head;
  const uint4* body;
  std::int64_t num_body;
  const std::uint32_t* tail;
  std::int64_t num_tail;
};

__device__ std::uint64_t evict_first_policy() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  return policy;
}

__device__ uint4 load_once(const uint4* from, std::uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3},[%4],%5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from), "l"(policy));
  return v;
}

__device__ std::uint32_t sum_of(const uint4& v) {
  return v.x + v.y + v.z + v.w;
}

__global__ void __launch_bounds__(kReadThreads)
    sum_words_kernel(WordRuns words, std::uint32_t* sum) {
  const std::uint64_t policy = evict_first_policy();
  const std::int64_t step = std::int64_t{gridDim.x} * kReadThreads;
  const std::int64_t first = std::int64_t{blockIdx.x} * kReadThreads + threadIdx.x;
  std::uint32_t own = 0;
  std::int64_t i = first;
  for (; i + (kLoads - 1) * step < words.num_body; i += kLoads * step) {
    uint4 v[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      v[load] = load_once(words.body + i + load * step, policy);
    }
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      own += sum_of(v[load]);
    }
  }
  for (; i < words.num_body; i += step) {
    own += sum_of(load_once(words.body + i, policy));
  }
  // Fewer than four words each.
  own += first < words.num_head ? words.head[first] : 0U;
  own += first < words.num_tail ? words.tail[first] : 0U;

  for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) {
    own += __shfl_xor_sync(0xffffffffU, own, offset);
  }
  // Modulo 2^32 the order in which warps arrive shows in no bit.
  if (threadIdx.x % kWarpThreads == 0) {
    atomicAdd(sum, own);
  }
}

WordRuns split_words(const ConstTensorView& words) {
  const auto* first = reinterpret_cast<const std::uint32_t*>(words.data<std::int32_t>());
  const std::int64_t count = words.num_elements();
  const auto misplaced = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(first) %
                                                   sizeof(uint4) / sizeof(std::uint32_t));
  const std::int64_t head = std::min(count, (kVectorWords - misplaced) % kVectorWords);
  const std::int64_t body = (count - head) / kVectorWords;
  const std::uint32_t* tail = first + head + body * kVectorWords;
  return {.head = first,
          .num_head = head,
          .body = reinterpret_cast<const uint4*>(first + head),
          .num_body = body,
          .tail = tail,
          .num_tail = count - head - body * kVectorWords};
}

}  // namespace

void CudaBackend::sum_words(ConstTensorView words, TensorView sum) {
  const std::int64_t count = words.num_elements();
  expect_tensor("sum_words' words", words, DType::kInt32, Shape{count});
  expect_tensor("sum_words' sum", sum, DType::kInt32, Shape{1});
  check(words.contiguous(), "sum_words' words must be contiguous");
  check_cuda(cudaMemsetAsync(sum.raw(), 0, sizeof(std::uint32_t), cuda_stream()), "sum_words");
  if (count == 0) {
    return;
  }
  const WordRuns runs = split_words(words);
  const std::int64_t wanted =
      std::max<std::int64_t>(1, (runs.num_body + kReadThreads - 1) / kReadThreads);
  const std::int64_t most = std::int64_t{properties().multiProcessorCount} * kBlocksPerSm;
  sum_words_kernel<<<static_cast<unsigned>(std::min(wanted, most)), kReadThreads, 0,
                     cuda_stream()>>>(runs,
                                      reinterpret_cast<std::uint32_t*>(sum.data<std::int32_t>()));
  check_launch("sum_words");
}

}  // namespace kdtree
