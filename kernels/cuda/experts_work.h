// What the kernels of the experts share: the work list on the device and the tensors of one call.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "kernels/cuda/experts_decode.cuh"
#include "kernels/cuda/experts_workspace.h"

namespace kdtree {

// The matrices of a slot.
struct SlotMatrices {
  MatrixRef gate;
  MatrixRef up;
  MatrixRef down;
};

constexpr int large_kind(int count) {
  return kLargeKinds - 1 - (count - 1) / 16;
}

// What the list of entries is made of, and where it goes: all on the device.
struct ExpertsList {
  const std::int32_t* ids = nullptr;  // [num_pairs / k, k] with rows ids_stride apart
  std::int64_t ids_stride = 0;
  std::int64_t k = 0;
  std::int64_t num_pairs = 0;
  const std::int32_t* logical_to_slot = nullptr;  // [num_experts]
  std::int64_t num_experts = 0;
  std::int32_t num_slots = 0;
  const SlotMatrices* slots = nullptr;  // [num_slots]
  std::int32_t* pair_slots = nullptr;   // [num_pairs] slot, or -1
  std::int32_t* num_entries = nullptr;
  ExpertEntry* entries = nullptr;             // [num_pairs]
  std::int32_t* num_large_entries = nullptr;  // [kLargeKinds]
  LargeExpertEntry* large_entries = nullptr;  // [most_large_entries], or nullptr: make none
};

inline constexpr std::int64_t kMostListSlots = 3072;
inline constexpr std::int64_t kMostListPairs = 0x7fffffff - 4096;  // ids and sums of them are int32
void list_experts(const ExpertsList& list, cudaStream_t stream);

struct ExpertsWork {
  const SlotMatrices* slots = nullptr;
  const std::int32_t* num_entries = nullptr;        // on the device
  const ExpertEntry* entries = nullptr;             // [num_pairs] at most
  const std::int32_t* num_large_entries = nullptr;  // [kLargeKinds]
  const LargeExpertEntry* large_entries = nullptr;  // nullptr: there are none
  std::int64_t num_pairs = 0;                       // rows * k, with those that are not held here
  std::int64_t k = 0;
  const void* x = nullptr;  // [rows, hidden] activation
  std::int64_t x_stride = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  void* inner = nullptr;   // [num_pairs, intermediate] silu(gate) * up: float32, or bf16 for INT4
  float* outer = nullptr;  // [num_pairs, hidden] what comes out of down
};

// gate, up and down of all entries, none large: every format, float32 arithmetic.
void run_generic_experts(const ExpertsWork& work, DType activation_dtype, int num_processors,
                         cudaStream_t stream);

// The same with tensor cores, for bf16 activations and packed INT4 matrices of fitting sizes.
bool int4_experts_fit(std::int64_t hidden, std::int64_t intermediate);
void run_int4_experts(const ExpertsWork& work, const cudaDeviceProp& device, cudaStream_t stream);

// Gate and up, or down, of the large entries; run_int4_experts calls it. The same bits.
void run_large_int4_experts(const ExpertsWork& work, bool gate_up, const cudaDeviceProp& device,
                            cudaStream_t stream);

}  // namespace kdtree
