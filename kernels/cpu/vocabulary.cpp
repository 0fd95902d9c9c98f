// The best tokens of a part of the vocabulary, and the parts put together.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/exp_lanes.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scalar_math.h"
#include "kernels/cpu/shapes.h"

namespace kdtree {
namespace {

struct Candidate {
  float value;  // never NaN
  std::int32_t id;
};

bool is_better(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// The `k` best of the candidates offered.
class BestCandidates {
 public:
  BestCandidates(std::vector<Candidate>& heap, std::int64_t k)
      : heap_(heap), k_(static_cast<std::size_t>(k)) {
    heap_.clear();
    heap_.reserve(k_);
  }

  void offer(const Candidate& candidate) {
    if (heap_.size() < k_) {
      heap_.push_back(candidate);
      std::push_heap(heap_.begin(), heap_.end(), is_better);  // the worst comes to the front
    } else if (k_ > 0 && is_better(candidate, heap_.front())) {
      std::pop_heap(heap_.begin(), heap_.end(), is_better);
      heap_.back() = candidate;
      std::push_heap(heap_.begin(), heap_.end(), is_better);
    }
  }

  // No candidate behind those offered so far, and not better than worst(), can come in: ids ascend.
  bool full() const { return heap_.size() == k_ && k_ > 0; }
  float worst() const { return heap_.front().value; }

  // Best first; places that nothing was offered for become -infinity and -1.
  void write(float* values, std::int32_t* ids) {
    std::sort_heap(heap_.begin(), heap_.end(), is_better);
    for (std::size_t i = 0; i < k_; ++i) {
      const bool found = i < heap_.size();
      values[i] = found ? heap_[i].value : kMinusInfinity;
      ids[i] = found ? heap_[i].id : -1;
    }
  }

 private:
  std::vector<Candidate>& heap_;
  std::size_t k_;
};

using DoubleLanes = double __attribute__((vector_size(kLanes * sizeof(double))));

// The first column from `c` on whose value is above `bound`, or `cols`.
KDTREE_SIMD_CLONES
std::int64_t next_above(const float* values, std::int64_t c, std::int64_t cols, float bound) {
  for (; c + kLanes <= cols; c += kLanes) {
    Lanes v;
    load_lanes(values + c, v);
    const IntLanes above = v > bound;  // false for NaN
    std::int64_t words[kLanes / 2];
    std::memcpy(words, &above, sizeof(words));
    if ((words[0] | words[1] | words[2] | words[3]) != 0) {
      break;
    }
  }
  while (c < cols && !(values[c] > bound)) {
    ++c;
  }
  return c;
}

// Eight logits from `i` on, -infinity behind the last of `n`.
KDTREE_INLINE void load_logits(const float* logits, std::int64_t i, std::int64_t n, Lanes& v) {
  if (i + kLanes <= n) {
    load_lanes(logits + i, v);
  } else {
    v = Lanes{} + kMinusInfinity;
    std::memcpy(&v, logits + i, static_cast<std::size_t>(n - i) * sizeof(float));
  }
}

// The largest of a row's logits and the sum of exp(logit - largest), each in float32, added in
// double in eight lanes. NaN counts as -infinity.
KDTREE_SIMD_CLONES
void log_sum_exp_row(const float* logits, std::int64_t n, float* partial) {
  Lanes v;
  Lanes best = Lanes{} + kMinusInfinity;
  for (std::int64_t i = 0; i < n; i += kLanes) {
    load_logits(logits, i, n, v);
    best = v > best ? v : best;  // false for NaN
  }
  float highest = kMinusInfinity;
  for (std::int64_t lane = 0; lane < kLanes; ++lane) {
    highest = std::max(highest, best[lane]);
  }
  DoubleLanes sums = {};
  for (std::int64_t i = 0; i < n && highest > kMinusInfinity; i += kLanes) {
    load_logits(logits, i, n, v);
    // The maximum itself counts 1, also when it is infinite.
    Lanes e = v == highest ? Lanes{} : v - highest;
    e = v <= highest ? e : Lanes{} + kMinusInfinity;  // false for NaN
    exp_lanes(e);
    sums += __builtin_convertvector(e, DoubleLanes);
  }
  double sum = 0;
  for (std::int64_t lane = 0; lane < kLanes; ++lane) {
    sum += sums[lane];
  }
  partial[0] = highest;
  partial[1] = static_cast<float>(sum);
}

// log of the sum over the whole vocabulary of exp(logit), from the parts' (m, s), in order of the
// parts.
double log_sum_exp(const ConstTensorView& partials, std::int64_t row) {
  const std::int64_t parts = partials.size(0);
  float highest = kMinusInfinity;
  for (std::int64_t p = 0; p < parts; ++p) {
    highest = std::max(highest, partials.row<float>(p)[row * 2]);
  }
  double sum = 0;
  for (std::int64_t p = 0; p < parts; ++p) {
    const float* partial = partials.row<float>(p) + row * 2;
    // Equal maxima need no exponential, which infinite ones do not have.
    const double factor =
        partial[0] == highest ? 1.0 : std::exp(static_cast<double>(partial[0]) - highest);
    sum += factor * partial[1];
  }
  return highest + std::log(sum);
}

}  // namespace

void CpuBackend::top_k(ConstTensorView logits, std::int64_t first_id, TensorView values,
                       TensorView ids) {
  expect_matrix("top_k's logits", logits, DType::kFloat32);
  expect_matrix("top_k's values", values, DType::kFloat32);
  const std::int64_t rows = logits.size(0);
  const std::int64_t cols = logits.size(1);
  const std::int64_t k = values.size(1);
  expect_tensor("top_k's values", values, DType::kFloat32, Shape{rows, k});
  expect_tensor("top_k's ids", ids, DType::kInt32, Shape{rows, k});
  parallel_for(num_threads_, {rows, rows * cols}, [&](std::int64_t begin, std::int64_t end) {
    thread_local std::vector<Candidate> heap;
    for (std::int64_t r = begin; r < end; ++r) {
      const float* from = logits.row<float>(r);
      BestCandidates best(heap, k);
      for (std::int64_t c = 0; c < cols;) {
        best.offer({nan_to_minus_infinity(from[c]), static_cast<std::int32_t>(first_id + c)});
        c = best.full() ? next_above(from, c + 1, cols, best.worst()) : c + 1;
      }
      best.write(values.row<float>(r), ids.row<std::int32_t>(r));
    }
  });
}

void CpuBackend::log_sum_exp_partials(ConstTensorView logits, TensorView partials) {
  expect_matrix("log_sum_exp_partials' logits", logits, DType::kFloat32);
  const std::int64_t rows = logits.size(0);
  const std::int64_t cols = logits.size(1);
  expect_tensor("partials", partials, DType::kFloat32, Shape{rows, 2});
  parallel_for(num_threads_, {rows, rows * cols * kExpWork},
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t r = begin; r < end; ++r) {
                   log_sum_exp_row(logits.row<float>(r), cols, partials.row<float>(r));
                 }
               });
}

void CpuBackend::merge_top_k(ConstTensorView part_values, ConstTensorView part_ids,
                             ConstTensorView partials, TensorView values, TensorView ids) {
  check(part_values.shape().rank() == 3, "part_values has {} dimensions, expected 3",
        part_values.shape().rank());
  expect_matrix("merge_top_k's values", values, DType::kFloat32);
  const std::int64_t parts = part_values.size(0);
  const std::int64_t rows = part_values.size(1);
  const std::int64_t k_in = part_values.size(2);
  const std::int64_t k_out = values.size(1);
  expect_tensor("part_values", part_values, DType::kFloat32, Shape{parts, rows, k_in});
  expect_tensor("part_ids", part_ids, DType::kInt32, Shape{parts, rows, k_in});
  expect_tensor("merge_top_k's values", values, DType::kFloat32, Shape{rows, k_out});
  expect_tensor("merge_top_k's ids", ids, DType::kInt32, Shape{rows, k_out});
  if (!partials.empty()) {
    expect_tensor("partials", partials, DType::kFloat32, Shape{parts, rows, 2});
  }
  parallel_for(
      num_threads_, {rows, rows * parts * k_in}, [&](std::int64_t begin, std::int64_t end) {
        thread_local std::vector<Candidate> heap;
        for (std::int64_t r = begin; r < end; ++r) {
          BestCandidates best(heap, k_out);
          for (std::int64_t p = 0; p < parts; ++p) {
            const float* from = part_values.row<float>(p) + r * k_in;
            const auto* from_ids = part_ids.row<std::int32_t>(p) + r * k_in;
            for (std::int64_t i = 0; i < k_in; ++i) {
              if (from_ids[i] >= 0) {
                best.offer({nan_to_minus_infinity(from[i]), from_ids[i]});
              }
            }
          }
          float* to = values.row<float>(r);
          best.write(to, ids.row<std::int32_t>(r));
          if (partials.empty()) {
            continue;
          }
          const double normaliser = log_sum_exp(partials, r);
          for (std::int64_t i = 0; i < k_out; ++i) {
            // -infinity stays so, even where the whole row is.
            to[i] =
                to[i] == kMinusInfinity ? kMinusInfinity : static_cast<float>(to[i] - normaliser);
          }
        }
      });
}

}  // namespace kdtree
