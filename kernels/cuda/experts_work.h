// What the kernels of the experts share: the work list on the device and the tensors of one call.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "kernels/cuda/experts_decode.cuh"

namespace kdtree {

// The matrices of a slot.
struct SlotMatrices {
  MatrixRef gate;
  MatrixRef up;
  MatrixRef down;
};

inline constexpr int kEntryPairs = 8;

// Some (row, place) pairs of one slot; a slot with more has several entries. Pair row * k + place
// names both the input row and where its results go.
struct alignas(16) ExpertEntry {
  const std::byte* codes[3];  // the slot's gate, up, down: here, so that they are one load away
  const std::byte* scales[3];
  std::int32_t slot;
  std::int32_t count;  // of pairs, at least 1
  std::int32_t pairs[kEntryPairs];
};

struct ExpertsWork {
  const SlotMatrices* slots = nullptr;
  const std::int32_t* num_entries = nullptr;  // on the device
  const ExpertEntry* entries = nullptr;       // [num_pairs] at most
  std::int64_t num_pairs = 0;                 // rows * k, with those that are not held here
  std::int64_t k = 0;
  const void* x = nullptr;  // [rows, hidden] activation
  std::int64_t x_stride = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  void* inner = nullptr;   // [num_pairs, intermediate] silu(gate) * up: float32, or bf16 for INT4
  float* outer = nullptr;  // [num_pairs, hidden] what comes out of down
};

// gate, up and down of all entries: every format, float32 arithmetic.
void run_generic_experts(const ExpertsWork& work, DType activation_dtype, int num_processors,
                         cudaStream_t stream);

// The same with tensor cores, for bf16 activations and packed INT4 matrices of fitting sizes.
bool int4_experts_fit(std::int64_t hidden, std::int64_t intermediate);
void run_int4_experts(const ExpertsWork& work, const cudaDeviceProp& device, cudaStream_t stream);

}  // namespace kdtree
