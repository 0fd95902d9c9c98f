#include <memory>

#include "core/check.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#ifdef KDTREE_WITH_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif

namespace kdtree {

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
