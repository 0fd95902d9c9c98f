#include "model/mlp.h"

namespace kdtree {

Mlp::Mlp(const WeightStore& weights, const std::string& prefix)
    : gate_proj_(weights.matrix(prefix + "gate_proj.weight")),
      up_proj_(weights.matrix(prefix + "up_proj.weight")),
      down_proj_(weights.matrix(prefix + "down_proj.weight")) {}

void Mlp::forward(Backend& backend, const ConstTensorView& x, MlpWorkspace& workspace,
                  const TensorView& out) const {
  const std::int64_t rows = x.size(0);
  const std::int64_t width = gate_proj_.out_features;
  const DType dtype = backend.activation_dtype();
  check(width <= workspace.gate.view().size(1), "an MLP of width {} in a workspace of {}", width,
        workspace.gate.view().size(1));
  // Packed to this MLP's own width, so that rows stay contiguous.
  const TensorView gate(workspace.gate.view().raw(), dtype, Shape{rows, width});
  const TensorView up(workspace.up.view().raw(), dtype, Shape{rows, width});
  backend.linear(gate_proj_, x, gate);
  backend.linear(up_proj_, x, up);
  backend.swiglu(gate, up, gate);
  backend.linear(down_proj_, gate, out);
}

}  // namespace kdtree
