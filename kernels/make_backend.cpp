#include <memory>

#include "core/check.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/experts_workspace.h"
#ifdef KDTREE_WITH_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif

namespace kdtree {

namespace {

class CudaMemoryTraits final : public MemoryTraits {
 public:
  explicit CudaMemoryTraits(DType activation_dtype) : activation_dtype_(activation_dtype) {}

  DType activation_dtype() const override { return activation_dtype_; }
  bool asynchronous() const override { return true; }
  std::int64_t experts_workspace_bytes(std::int64_t max_rows, std::int64_t num_experts_per_tok,
                                       std::int64_t hidden_size,
                                       std::int64_t moe_intermediate_size) const override {
    return ExpertsWorkspaceLayout(max_rows * num_experts_per_tok, hidden_size,
                                  moe_intermediate_size)
        .bytes;
  }

 private:
  DType activation_dtype_;
};

}  // namespace

std::unique_ptr<MemoryTraits> make_memory_traits(const std::string& name, DType activation_dtype) {
  if (name == "cuda") {
    return std::make_unique<CudaMemoryTraits>(activation_dtype);
  }
  require_input(name == "cpu", "unknown backend \"{}\": expected cpu or cuda", name);
  return std::make_unique<CpuBackend>(1);
}

std::unique_ptr<Backend> make_backend(const BackendOptions& options) {
  require_input(options.name == "auto" || options.name == "cpu" || options.name == "cuda",
                "unknown backend \"{}\": expected auto, cpu or cuda", options.name);
  if (options.name != "cpu") {
#ifdef KDTREE_WITH_CUDA
    if (cuda_device_count() > 0) {
      return make_cuda_backend(options);
    }
    require_input(options.name == "auto",
                  "backend \"cuda\": no CUDA device was found on this machine");
#else
    require_input(
        options.name == "auto",
        "backend \"cuda\": this build has no CUDA; build with `cmake --preset cuda && cmake "
        "--build --preset cuda`, or take backend \"cpu\"");
#endif
  }
  return std::make_unique<CpuBackend>(options.num_threads);
}

}  // namespace kdtree
