// Ops that move or combine rows: embed, gather_rows, add_rows, add, swiglu.
#include "kernels/cpu/weights.h"
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/row_copy.h"
#include "kernels/cuda/shapes.h"

namespace kdtree {
namespace {

template <class T>
struct Rows {
  T* data;
  std::int64_t stride;

  __device__ T* row(std::int64_t r) const { return data + r * stride; }
};

// The view's rows as elements of T, which need not be the tensor's type but has its size.
template <class T>
Rows<T> rows_of(const TensorView& view) {
  return {static_cast<T*>(view.raw()), view.row_stride()};
}

template <class T>
Rows<const T> rows_of(const ConstTensorView& view) {
  return {static_cast<const T*>(view.raw()), view.row_stride()};
}

template <class From, class To>
__global__ void __launch_bounds__(kBlockThreads)
    embed_kernel(Rows<const From> table, std::int64_t first_row, std::int64_t num_table_rows,
                 const std::int32_t* token_ids, Rows<To> out, std::int64_t cols) {
  const std::int64_t r = blockIdx.x;
  const std::int64_t row = token_ids[r] - first_row;
  const bool here = row >= 0 && row < num_table_rows;
  const From* from = table.row(here ? row : 0);
  To* to = out.row(r);
  for_columns(cols,
              [&](std::int64_t c) { to[c] = from_float<To>(here ? to_float(from[c]) : 0.0F); });
}

// Rows in units of a copy. A row whose index points outside of the source becomes zeros.
template <class Unit>
__global__ void __launch_bounds__(kBlockThreads)
    gather_kernel(Rows<const Unit> source, std::int64_t num_source_rows,
                  const std::int32_t* indices, Rows<Unit> out, std::int64_t units) {
  const std::int64_t r = blockIdx.x;
  const std::int64_t index = indices[r];
  const bool inside = index >= 0 && index < num_source_rows;
  const Unit* from = source.row(inside ? index : 0);
  Unit* to = out.row(r);
  for_columns(units, [&](std::int64_t c) { to[c] = inside ? from[c] : Unit{}; });
}

// A block owns a target row (and some of its columns) and walks over all sources in order: the
// sum's order is that of the sources, without atomics.
template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    add_rows_kernel(Rows<const T> source, std::int64_t num_sources, const std::int32_t* indices,
                    Rows<T> target, std::int64_t cols) {
  __shared__ std::int32_t named[kBlockThreads];
  const std::int64_t row = blockIdx.x;
  T* sum = target.row(row);
  for (std::int64_t first = 0; first < num_sources; first += kBlockThreads) {
    const std::int64_t mine = first + threadIdx.x;
    __syncthreads();  // all have read the earlier ones
    named[threadIdx.x] = mine < num_sources ? indices[mine] : -1;
    __syncthreads();
    const std::int64_t count = min(std::int64_t{kBlockThreads}, num_sources - first);
    for (std::int64_t i = 0; i < count; ++i) {
      if (named[i] == row) {
        const T* from = source.row(first + i);
        for_columns(cols, [&](std::int64_t c) {
          sum[c] = from_float<T>(to_float(sum[c]) + to_float(from[c]));
        });
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    add_kernel(Rows<T> x, Rows<const T> delta, std::int64_t cols) {
  const std::int64_t r = blockIdx.x;
  T* to = x.row(r);
  const T* from = delta.row(r);
  for_columns(cols,
              [&](std::int64_t c) { to[c] = from_float<T>(to_float(to[c]) + to_float(from[c])); });
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    swiglu_kernel(Rows<const T> gate, Rows<const T> up, Rows<T> y, std::int64_t cols) {
  const std::int64_t r = blockIdx.x;
  const T* gates = gate.row(r);
  const T* ups = up.row(r);
  T* to = y.row(r);
  for_columns(cols, [&](std::int64_t c) {
    const float g = to_float(gates[c]);
    to[c] = from_float<T>(g / (1.0F + expf(-g)) * to_float(ups[c]));
  });
}

}  // namespace

void CudaBackend::embed(const WeightView& table, std::int64_t first_row, ConstTensorView token_ids,
                        TensorView out) {
  check_weight("embedding table", table);
  check(table.format != WeightFormat::kInt4Group, "embedding tables in INT4 are not supported");
  expect_matrix("embed's out", out, activation_dtype());
  const std::int64_t rows = out.size(0);
  const std::int64_t cols = table.in_features;
  expect_tensor("embed's out", out, activation_dtype(), Shape{rows, cols});
  const std::int32_t* ids = device_indices("token_ids", token_ids, rows);
  if (rows == 0 || cols == 0) {
    return;
  }
  const DType table_dtype =
      table.format == WeightFormat::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
  with_float_type(table_dtype, [&](auto from_type) {
    with_float_type(activation_dtype(), [&](auto to_type) {
      using From = decltype(from_type);
      using To = decltype(to_type);
      embed_kernel<From, To><<<row_grid(rows, cols), kBlockThreads, 0, cuda_stream()>>>(
          {static_cast<const From*>(table.data), cols}, first_row, table.out_features, ids,
          rows_of<To>(out), cols);
    });
  });
  check_launch("embed");
}

void CudaBackend::gather_rows(ConstTensorView source, ConstTensorView indices, TensorView out) {
  const DType dtype = source.dtype();
  expect_matrix("gather_rows' source", source, dtype);
  expect_matrix("gather_rows' out", out, dtype);
  const std::int64_t rows = out.size(0);
  const std::int64_t cols = source.size(1);
  expect_tensor("gather_rows' out", out, dtype, Shape{rows, cols});
  const std::int32_t* from = device_indices("gather_rows' indices", indices, rows);
  if (rows == 0 || cols == 0) {
    return;
  }
  const std::int64_t element = dtype_bytes(dtype);
  const std::int64_t source_stride = source.row_stride() * element;
  const std::int64_t out_stride = out.row_stride() * element;
  const int unit =
      copy_unit_bytes(source.raw(), out.raw(), {cols * element, source_stride, out_stride});
  const std::int64_t units = cols * element / unit;
  with_copy_unit(unit, [&](auto unit_type) {
    using Unit = decltype(unit_type);
    gather_kernel<Unit><<<row_grid(rows, units), kBlockThreads, 0, cuda_stream()>>>(
        {static_cast<const Unit*>(source.raw()), source_stride / unit}, source.size(0), from,
        {static_cast<Unit*>(out.raw()), out_stride / unit}, units);
  });
  check_launch("gather_rows");
}

void CudaBackend::add_rows(ConstTensorView source, ConstTensorView indices, TensorView target) {
  expect_matrix("add_rows' source", source, activation_dtype());
  expect_matrix("add_rows' target", target, activation_dtype());
  const std::int64_t rows = source.size(0);
  const std::int64_t cols = source.size(1);
  const std::int64_t num_targets = target.size(0);
  expect_tensor("add_rows' target", target, activation_dtype(), Shape{num_targets, cols});
  const std::int32_t* to = device_indices("add_rows' indices", indices, rows);
  if (rows == 0 || cols == 0 || num_targets == 0) {
    return;
  }
  with_float_type(activation_dtype(), [&](auto type) {
    using T = decltype(type);
    add_rows_kernel<T><<<row_grid(num_targets, cols), kBlockThreads, 0, cuda_stream()>>>(
        rows_of<T>(source), rows, to, rows_of<T>(target), cols);
  });
  check_launch("add_rows");
}

void CudaBackend::add(TensorView x, ConstTensorView delta) {
  expect_matrix("add's x", x, activation_dtype());
  expect_tensor("add's delta", delta, activation_dtype(), x.shape());
  const std::int64_t rows = x.size(0);
  const std::int64_t cols = x.size(1);
  if (rows == 0 || cols == 0) {
    return;
  }
  with_float_type(activation_dtype(), [&](auto type) {
    using T = decltype(type);
    add_kernel<T><<<row_grid(rows, cols), kBlockThreads, 0, cuda_stream()>>>(
        rows_of<T>(x), rows_of<T>(delta), cols);
  });
  check_launch("add");
}

void CudaBackend::swiglu(ConstTensorView gate, ConstTensorView up, TensorView y) {
  expect_matrix("swiglu's y", y, activation_dtype());
  expect_tensor("swiglu's gate", gate, activation_dtype(), y.shape());
  expect_tensor("swiglu's up", up, activation_dtype(), y.shape());
  const std::int64_t rows = y.size(0);
  const std::int64_t cols = y.size(1);
  if (rows == 0 || cols == 0) {
    return;
  }
  with_float_type(activation_dtype(), [&](auto type) {
    using T = decltype(type);
    swiglu_kernel<T><<<row_grid(rows, cols), kBlockThreads, 0, cuda_stream()>>>(
        rows_of<T>(gate), rows_of<T>(up), rows_of<T>(y), cols);
  });
  check_launch("swiglu");
}

}  // namespace kdtree
