// Steps recorded as CUDA graphs, and time stamps.
#include <utility>

#include "kernels/cuda/cuda_backend_impl.h"

namespace kdtree {

CudaBackend::Recorded::~Recorded() {
  if (executable != nullptr) {
    cudaGraphExecDestroy(executable);
  }
}

// The first call of a key runs body as it is: scratch grows, libraries load their kernels,
// collectives connect. The second one records it, and every later one replays.
void CudaBackend::run_recorded(std::int64_t key, bool replayable,
                               const std::function<void()>& body) {
  check(!recording_, "run_recorded inside of run_recorded");
  if (!replayable) {
    body();
    return;
  }
  const auto known = recorded_.find(key);
  if (known == recorded_.end()) {
    body();
    recorded_.emplace(key, std::make_unique<Recorded>());
    return;
  }
  Recorded& recorded = *known->second;
  if (recorded.executable == nullptr) {
    recorded.executable = record(body);
  }
  check_cuda(cudaGraphLaunch(recorded.executable, stream_), "replay of a recorded step");
}

cudaGraphExec_t CudaBackend::record(const std::function<void()>& body) {
  // Other threads (of MPI, say) may go on making calls that a recording forbids.
  check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
             "cudaStreamBeginCapture");
  cudaGraph_t graph = nullptr;
  recording_ = true;
  try {
    body();
  } catch (...) {
    recording_ = false;
    cudaStreamEndCapture(stream_, &graph);  // the stream works again; the first error counts
    if (graph != nullptr) {
      cudaGraphDestroy(graph);
    }
    cudaGetLastError();
    throw;
  }
  recording_ = false;
  const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);
  if (ended != cudaSuccess) {
    cudaGetLastError();
    check_cuda(ended, "a step did something that cannot be recorded");
  }
  cudaGraphExec_t executable = nullptr;
  const cudaError_t instantiated = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);  // the executable has all that it needs
  check_cuda(instantiated, "cudaGraphInstantiate");
  return executable;
}

void CudaBackend::forget_recorded(std::int64_t key) {
  check(!recording_, "forget_recorded while a step is being recorded");
  const auto known = recorded_.find(key);
  if (known == recorded_.end()) {
    return;
  }
  synchronize();  // it may be running
  recorded_.erase(known);
}

void CudaBackend::mark(std::size_t index) {
  // An ordinary event inside a recording only orders work; an external one is stamped at each
  // replay.
  const unsigned flags = recording_ ? cudaEventRecordExternal : cudaEventRecordDefault;
  check_cuda(cudaEventRecordWithFlags(marks_.at(index), stream_, flags), "mark");
}

double CudaBackend::milliseconds_between(std::size_t first, std::size_t second) {
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, marks_.at(first), marks_.at(second)),
             "milliseconds_between");
  return milliseconds;
}

}  // namespace kdtree
