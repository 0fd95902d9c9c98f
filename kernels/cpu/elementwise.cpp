// Ops that move or combine rows: embed, gather_rows, add_rows, add, swiglu.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/exp_lanes.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/shapes.h"
#include "kernels/cpu/weights.h"

namespace kdtree {

namespace {

// gates = silu(gates) * ups.
KDTREE_INLINE void swiglu_lanes(Lanes& gates, const Lanes& ups) {
  Lanes e = -gates;
  exp_lanes(e);
  gates = gates / (1.0F + e) * ups;
}

}  // namespace

KDTREE_SIMD_CLONES
void swiglu_row(const float* gate, const float* up, std::int64_t n, float* to) {
  Lanes gates;
  Lanes ups;
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    load_lanes(gate + i, gates);
    load_lanes(up + i, ups);
    swiglu_lanes(gates, ups);
    store_lanes(gates, to + i);
  }
  if (i < n) {
    load_lanes(gate + i, n - i, gates);
    load_lanes(up + i, n - i, ups);
    swiglu_lanes(gates, ups);
    std::memcpy(to + i, &gates, static_cast<std::size_t>(n - i) * sizeof(float));
  }
}

void CpuBackend::embed(const WeightView& table, std::int64_t first_row, ConstTensorView token_ids,
                       TensorView out) {
  expect_matrix("embed's out", out, DType::kFloat32);
  const std::int64_t rows = out.size(0);
  const std::int64_t cols = table.in_features;
  check_weight("embedding table", table);
  check(table.format != WeightFormat::kInt4Group, "embedding tables in INT4 are not supported");
  expect_tensor("embed's out", out, DType::kFloat32, Shape{rows, cols});
  const auto ids = read_indices("token_ids", token_ids, rows);
  parallel_for(num_threads_, {rows, rows * cols}, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t row = ids[static_cast<std::size_t>(r)] - first_row;
      if (row >= 0 && row < table.out_features) {
        decode_weights(table, row, 0, cols, out.row<float>(r));
      } else {
        std::fill_n(out.row<float>(r), cols, 0.0F);
      }
    }
  });
}

void CpuBackend::gather_rows(ConstTensorView source, ConstTensorView indices, TensorView out) {
  expect_matrix("gather_rows' source", source, source.dtype());
  expect_matrix("gather_rows' out", out, source.dtype());
  const std::int64_t rows = out.size(0);
  const std::int64_t cols = source.size(1);
  expect_tensor("gather_rows' out", out, source.dtype(), Shape{rows, cols});
  const auto from = read_indices("gather_rows' indices", indices, rows);
  check_indices("gather_rows' indices", from, source.size(0));
  if (cols == 0) {
    return;
  }
  const std::int64_t element = dtype_bytes(source.dtype());
  const auto* first = static_cast<const std::byte*>(source.raw());
  auto* to = static_cast<std::byte*>(out.raw());
  parallel_for(num_threads_, {rows, rows * cols}, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t row = from[static_cast<std::size_t>(r)];
      std::memcpy(to + r * out.row_stride() * element, first + row * source.row_stride() * element,
                  static_cast<std::size_t>(cols * element));
    }
  });
}

void CpuBackend::add_rows(ConstTensorView source, ConstTensorView indices, TensorView target) {
  expect_matrix("add_rows' source", source, DType::kFloat32);
  expect_matrix("add_rows' target", target, DType::kFloat32);
  const std::int64_t rows = source.size(0);
  const std::int64_t cols = source.size(1);
  expect_tensor("add_rows' target", target, DType::kFloat32, Shape{target.size(0), cols});
  const auto to = read_indices("add_rows' indices", indices, rows);
  for (const std::int32_t row : to) {
    check(row < target.size(0), "add_rows' indices name row {} of {}", row, target.size(0));
  }
  // Shared by columns: rows that are named several times stay in order.
  parallel_for(num_threads_, {cols, rows * cols}, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = 0; r < rows; ++r) {
      if (to[static_cast<std::size_t>(r)] < 0) {
        continue;
      }
      const float* from = source.row<float>(r);
      float* sum = target.row<float>(to[static_cast<std::size_t>(r)]);
      for (std::int64_t c = begin; c < end; ++c) {
        sum[c] += from[c];
      }
    }
  });
}

void CpuBackend::add(TensorView x, ConstTensorView delta) {
  expect_matrix("add's x", x, DType::kFloat32);
  expect_tensor("add's delta", delta, DType::kFloat32, x.shape());
  const std::int64_t rows = x.size(0);
  const std::int64_t cols = x.size(1);
  parallel_for(num_threads_, {rows, rows * cols}, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      float* to = x.row<float>(r);
      const float* from = delta.row<float>(r);
      for (std::int64_t c = 0; c < cols; ++c) {
        to[c] += from[c];
      }
    }
  });
}

void CpuBackend::swiglu(ConstTensorView gate, ConstTensorView up, TensorView y) {
  expect_matrix("swiglu's y", y, DType::kFloat32);
  expect_tensor("swiglu's gate", gate, DType::kFloat32, y.shape());
  expect_tensor("swiglu's up", up, DType::kFloat32, y.shape());
  const std::int64_t rows = y.size(0);
  const std::int64_t cols = y.size(1);
  parallel_for(num_threads_, {rows, rows * cols * kExpWork},
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t r = begin; r < end; ++r) {
                   swiglu_row(gate.row<float>(r), up.row<float>(r), cols, y.row<float>(r));
                 }
               });
}

}  // namespace kdtree
