// What the kernels of packed INT4 experts share: the arithmetic that makes a row's bits the same
// whichever of them computes it.
//
// An output is computed as: the products of a group of 32 columns, summed by two
// multiply_accumulate that start from zero; sum = fmaf(scale, products, sum) over the groups of a
// slice in order, from zero; the slices' sums added in order, from zero.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kdtree {

inline constexpr int kUnitCodeBytes = 512;
inline constexpr int kUnitScaleBytes = 64;
// Shared memory that a block may have: H200 and sm_120.
inline constexpr int kLargeSharedMemory = 227 * 1024;
inline constexpr int kSmallSharedMemory = 99 * 1024;

// sums += a * b of mma.m16n8k16. Not volatile: it may be moved and has no other effect.
__device__ inline void multiply_accumulate(float (&sums)[4], const std::uint32_t (&a)[4],
                                           std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The two codes at bits 0 and 16 as bf16 integers, minus 8: 0x43 in front of a code is 128 + code,
// and 136 = 0x4308 is subtracted exactly.
__device__ inline std::uint32_t code_pair(std::uint32_t word) {
  std::uint32_t biased;
  asm("lop3.b32 %0,%1,%2,%3,0xEA;" : "=r"(biased) : "r"(word), "r"(0x000f000fU), "r"(0x43004300U));
  const std::uint32_t offset = 0x43084308U;
  const __nv_bfloat162 difference = __hsub2(reinterpret_cast<const __nv_bfloat162&>(biased),
                                            reinterpret_cast<const __nv_bfloat162&>(offset));
  return reinterpret_cast<const std::uint32_t&>(difference);
}

// silu(gate) * up
__device__ inline float gated(float gate, float up) {
  return gate / (1.0F + expf(-gate)) * up;
}

}  // namespace kdtree
