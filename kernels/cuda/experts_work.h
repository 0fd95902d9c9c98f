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

// Some (row, place) pairs of one slot; a slot with more has several entries. Pair row * k + place
// names both the input row and where its results go.
template <int kMostPairs>
struct alignas(16) ExpertEntryOf {
  const std::byte* codes[3];  // the slot's gate, up, down: here, so that they are one load away
  const std::byte* scales[3];
  std::int32_t slot;
  std::int32_t count;  // of pairs, at least 1
  std::int32_t pairs[kMostPairs];
};

inline constexpr int kEntryPairs = 8;
using ExpertEntry = ExpertEntryOf<kEntryPairs>;

// Entries of slots with many pairs, more than kEntryPairs each. They are of four kinds: with up to
// 64, 48, 32 and 16 pairs (kind 0 to 3); entries of a kind lie together, kind 0 first.
inline constexpr int kLargeEntryPairs = 64;
inline constexpr int kLargeKinds = 4;
using LargeExpertEntry = ExpertEntryOf<kLargeEntryPairs>;

constexpr int large_kind(int count) {
  return kLargeKinds - 1 - (count - 1) / 16;
}

// Large entries that num_pairs pairs can make, at most.
constexpr std::int64_t most_large_entries(std::int64_t num_pairs) {
  return num_pairs / (kEntryPairs + 1);
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
