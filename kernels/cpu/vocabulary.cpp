// The best tokens of a part of the vocabulary, and the parts put together.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
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
      for (std::int64_t c = 0; c < cols; ++c) {
        best.offer({nan_to_minus_infinity(from[c]), static_cast<std::int32_t>(first_id + c)});
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
  parallel_for(
      num_threads_, {rows, rows * cols * kExpWork}, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
          const float* from = logits.row<float>(r);
          float highest = kMinusInfinity;
          for (std::int64_t c = 0; c < cols; ++c) {
            highest = std::max(highest, from[c]);  // max ignores a NaN on its right
          }
          double sum = 0;
          for (std::int64_t c = 0; c < cols && highest > kMinusInfinity; ++c) {
            // The maximum itself counts 1, also when it is infinite.
            sum += from[c] == highest ? 1.0F : std::exp(nan_to_minus_infinity(from[c]) - highest);
          }
          partials.row<float>(r)[0] = highest;
          partials.row<float>(r)[1] = static_cast<float>(sum);
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
