// The SwiGLU feed-forward of dense layers, shared experts and the drafter: down(silu(gate(x)) *
// up(x)).
#pragma once

#include <string>

#include "kernels/device_tensor.h"
#include "model/model_context.h"
#include "weights/weight_store.h"

namespace kdtree {

struct MlpWorkspace {
  MlpWorkspace() = default;
  MlpWorkspace(Backend& backend, std::int64_t width, std::int64_t max_rows)
      : gate(backend, backend.activation_dtype(), Shape{max_rows, width}),
        up(backend, backend.activation_dtype(), Shape{max_rows, width}) {}
  DeviceTensor gate;  // [rows, width]; any MLP up to this width may use it
  DeviceTensor up;    // [rows, width]

  static std::int64_t bytes(std::int64_t width, std::int64_t max_rows, DType dtype) {
    return 2 * width * max_rows * dtype_bytes(dtype);
  }
};

class Mlp {
 public:
  // `prefix` "model.layers.0.mlp." of gate_proj, up_proj and down_proj.
  Mlp(const WeightStore& weights, const std::string& prefix);

  // x [rows, hidden] -> out [rows, hidden]: the share of the columns that this rank holds.
  void forward(Backend& backend, const ConstTensorView& x, MlpWorkspace& workspace,
               const TensorView& out) const;

 private:
  WeightView gate_proj_;
  WeightView up_proj_;
  WeightView down_proj_;
};

}  // namespace kdtree
