// The work list of the experts: the pairs of (row, place) that chose a slot, some to an entry.
#include "kernels/cuda/cuda_call.h"
#include "kernels/cuda/experts_work.h"

namespace kdtree {
namespace {

constexpr int kListThreads = 1024;
constexpr int kWarpThreads = 32;
constexpr unsigned kAllLanes = 0xffffffffU;
constexpr int kListTile = 2048;  // pairs looked at together

// Large entries are as large as leaves enough of them to keep all blocks busy: matrices are read
// less often, but fewer blocks share an expert's work. With too few even of the smallest, all
// entries are of kEntryPairs.
struct LargeSize {
  int pairs;          // of an entry, at most
  int least_entries;  // of that size
};
__device__ constexpr LargeSize kLargeSizes[] = {{kLargeEntryPairs, 6}, {32, 6}, {16, 2}};

// How `count` pairs of a slot are shared out: `full` large entries of `most`, then one of `rest`
// (0: none), then entries of kEntryPairs.
struct Shares {
  int full = 0;
  int rest = 0;
  int large_pairs = 0;
  int small_entries = 0;

  __device__ Shares(int count, int most) {
    if (most > 0) {
      full = count / most;
      rest = count % most;
      rest = rest > kEntryPairs ? rest : 0;
      large_pairs = full * most + rest;
    }
    small_entries = (count - large_pairs + kEntryPairs - 1) / kEntryPairs;
  }
};

// The sum of the values of all threads before this one, and of all.
__device__ int exclusive_sum(int own, int* warp_sums, int& total) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  int inclusive = own;
  for (int offset = 1; offset < kWarpThreads; offset *= 2) {
    const int below = __shfl_up_sync(kAllLanes, inclusive, offset);
    inclusive += lane >= offset ? below : 0;
  }
  if (lane == kWarpThreads - 1) {
    warp_sums[warp] = inclusive;
  }
  __syncthreads();
  int before = 0;
  total = 0;
  for (int w = 0; w < kListThreads / kWarpThreads; ++w) {
    before += w < warp ? warp_sums[w] : 0;
    total += warp_sums[w];
  }
  __syncthreads();
  return before + inclusive - own;
}

// number(slot) entries for every slot, one slot's after the other's: calls place(slot, first) for
// every slot and returns how many there are.
template <class Number, class Place>
__device__ int number_entries(int num_slots, int* warp_sums, const Number& number,
                              const Place& place) {
  int num_entries = 0;
  for (int base = 0; base < num_slots; base += kListThreads) {
    const int s = base + static_cast<int>(threadIdx.x);
    int total = 0;
    const int before = num_entries + exclusive_sum(s < num_slots ? number(s) : 0, warp_sums, total);
    if (s < num_slots) {
      place(s, before);
    }
    num_entries += total;
  }
  return num_entries;
}

template <int kMostPairs>
__device__ void fill_entry(ExpertEntryOf<kMostPairs>& entry, const SlotMatrices& matrices, int slot,
                           int count) {
  entry.codes[0] = static_cast<const std::byte*>(matrices.gate.data);
  entry.codes[1] = static_cast<const std::byte*>(matrices.up.data);
  entry.codes[2] = static_cast<const std::byte*>(matrices.down.data);
  entry.scales[0] = static_cast<const std::byte*>(matrices.gate.scales);
  entry.scales[1] = static_cast<const std::byte*>(matrices.up.scales);
  entry.scales[2] = static_cast<const std::byte*>(matrices.down.scales);
  entry.slot = slot;
  entry.count = count;
}

// What the block knows of every slot, in shared memory. Each thread writes and reads its own slots
// only, except counts.
struct SlotArrays {
  std::int32_t* counts;       // [num_slots] pairs
  std::int32_t* first_entry;  // [num_slots] of the slot's entries of kEntryPairs
  std::int32_t* cursors;      // [num_slots] pairs placed
  std::int32_t* first_full;   // [num_slots] the first full large entry; only with large entries
  std::int32_t* rest_entry;   // [num_slots] the large entry of the rest; likewise

  __device__ SlotArrays(std::int32_t* memory, int num_slots)
      : counts(memory),
        first_entry(memory + num_slots),
        cursors(memory + 2 * num_slots),
        first_full(memory + 3 * num_slots),
        rest_entry(memory + 4 * num_slots) {}
};
constexpr int kArrays = 3;
constexpr int kArraysWithLarge = 5;

__device__ void count_pairs(const ExpertsList& list, const SlotArrays& arrays) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int s = thread; s < list.num_slots; s += kListThreads) {
    arrays.counts[s] = 0;
    arrays.cursors[s] = 0;
  }
  __syncthreads();
  for (std::int64_t p = thread; p < list.num_pairs; p += kListThreads) {
    const std::int32_t id = list.ids[p / list.k * list.ids_stride + p % list.k];
    std::int32_t slot = -1;
    if (id >= 0 && id < list.num_experts) {
      slot = list.logical_to_slot[id];
      slot = slot >= 0 && slot < list.num_slots ? slot : -1;
    }
    list.pair_slots[p] = slot;
    if (slot >= 0) {
      atomicAdd(&arrays.counts[slot], 1);
    }
  }
  __syncthreads();
}

// Pairs of a large entry, at most; 0: there are to be none.
__device__ int choose_size(const ExpertsList& list, const SlotArrays& arrays, int* warp_sums) {
  for (const LargeSize& size : kLargeSizes) {
    const int num_entries = number_entries(
        list.num_slots, warp_sums,
        [&](int s) {
          const Shares shares(arrays.counts[s], size.pairs);
          return shares.full + (shares.rest > 0 ? 1 : 0);
        },
        [](int, int) {});
    if (num_entries >= size.least_entries) {
      return size.pairs;
    }
  }
  return 0;
}

__device__ void list_large_entries(const ExpertsList& list, const SlotArrays& arrays, int most,
                                   int* warp_sums) {
  int first_of_kind = 0;
  for (int kind = 0; kind < kLargeKinds; ++kind) {
    const auto full_of_kind = [&](const Shares& shares) {
      return most > 0 && large_kind(most) == kind ? shares.full : 0;
    };
    const auto rest_of_kind = [&](const Shares& shares) {
      return shares.rest > 0 && large_kind(shares.rest) == kind ? 1 : 0;
    };
    const int num_entries = number_entries(
        list.num_slots, warp_sums,
        [&](int s) {
          const Shares shares(arrays.counts[s], most);
          return full_of_kind(shares) + rest_of_kind(shares);
        },
        [&](int s, int before) {
          const Shares shares(arrays.counts[s], most);
          const int full = full_of_kind(shares);
          int at = first_of_kind + before;
          if (full > 0) {
            arrays.first_full[s] = at;
          }
          for (int e = 0; e < full; ++e, ++at) {
            fill_entry(list.large_entries[at], list.slots[s], s, most);
          }
          if (rest_of_kind(shares) > 0) {
            arrays.rest_entry[s] = at;
            fill_entry(list.large_entries[at], list.slots[s], s, shares.rest);
          }
        });
    if (threadIdx.x == 0) {
      list.num_large_entries[kind] = num_entries;
    }
    first_of_kind += num_entries;
  }
}

__device__ void list_entries(const ExpertsList& list, const SlotArrays& arrays, int most,
                             int* warp_sums) {
  const int num_entries = number_entries(
      list.num_slots, warp_sums,
      [&](int s) { return Shares(arrays.counts[s], most).small_entries; },
      [&](int s, int before) {
        const Shares shares(arrays.counts[s], most);
        arrays.first_entry[s] = before;
        for (int e = 0; e < shares.small_entries; ++e) {
          fill_entry(list.entries[before + e], list.slots[s], s,
                     min(kEntryPairs, arrays.counts[s] - shares.large_pairs - e * kEntryPairs));
        }
      });
  if (threadIdx.x == 0) {
    *list.num_entries = num_entries;
  }
}

// Pair number `placed` of slot s goes to its entry.
template <bool kLarge>
__device__ void place_pair(const ExpertsList& list, const SlotArrays& arrays, const Shares& shares,
                           int most, int s, int placed, std::int32_t pair) {
  const int small = placed - shares.large_pairs;
  if (!kLarge || small >= 0) {
    list.entries[arrays.first_entry[s] + small / kEntryPairs].pairs[small % kEntryPairs] = pair;
  } else if (placed < shares.full * most) {
    list.large_entries[arrays.first_full[s] + placed / most].pairs[placed % most] = pair;
  } else {
    list.large_entries[arrays.rest_entry[s]].pairs[placed - shares.full * most] = pair;
  }
}

// One block. Entries (of a kind) are ordered by slot, their pairs ascend: the list does not depend
// on the order in which threads run. Ids and slots that do not exist are left out.
template <bool kLarge>
__global__ void __launch_bounds__(kListThreads) list_experts_kernel(ExpertsList list) {
  extern __shared__ std::int32_t slot_memory[];
  __shared__ int warp_sums[kListThreads / kWarpThreads];
  __shared__ int4 tile_slots[kListTile / 4];
  const SlotArrays arrays(slot_memory, list.num_slots);
  const int thread = static_cast<int>(threadIdx.x);
  count_pairs(list, arrays);
  int most = 0;
  if constexpr (kLarge) {
    most = choose_size(list, arrays, warp_sums);
    list_large_entries(list, arrays, most, warp_sums);
  }
  list_entries(list, arrays, most, warp_sums);

  // Every slot in use looks for its pairs among all, in their order.
  for (std::int64_t base = 0; base < list.num_pairs; base += kListTile) {
    __syncthreads();
    for (int i = thread; i < kListTile; i += kListThreads) {
      const std::int64_t p = base + i;
      reinterpret_cast<std::int32_t*>(tile_slots)[i] = p < list.num_pairs ? list.pair_slots[p] : -1;
    }
    __syncthreads();
    const auto in_tile = static_cast<int>(min(std::int64_t{kListTile}, list.num_pairs - base));
    for (int s = thread; s < list.num_slots; s += kListThreads) {
      int placed = arrays.cursors[s];
      const int count = arrays.counts[s];
      const Shares shares(count, most);
      for (int i = 0; i < in_tile && placed < count; i += 4) {
        const int4 four = tile_slots[i / 4];
        const int slots[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (slots[j] == s) {
            place_pair<kLarge>(list, arrays, shares, most, s, placed,
                               static_cast<std::int32_t>(base) + i + j);
            ++placed;
          }
        }
      }
      arrays.cursors[s] = placed;
    }
  }
}

template <bool kLarge>
void launch(const ExpertsList& list, cudaStream_t stream) {
  constexpr std::int64_t kSlotBytes = (kLarge ? kArraysWithLarge : kArrays) * sizeof(std::int32_t);
  const auto kernel = list_experts_kernel<kLarge>;
  if constexpr (kLarge) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(kMostListSlots * kSlotBytes)),
               "experts' work list, shared memory");
  }
  const auto bytes = static_cast<std::size_t>(list.num_slots * kSlotBytes);
  kernel<<<1, kListThreads, bytes, stream>>>(list);
  check_launch("experts, work list");
}

}  // namespace

void list_experts(const ExpertsList& list, cudaStream_t stream) {
  if (list.large_entries != nullptr) {
    launch<true>(list, stream);
  } else {
    launch<false>(list, stream);
  }
}

}  // namespace kdtree
