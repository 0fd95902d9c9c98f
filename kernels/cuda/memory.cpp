// The device, its memory and copies.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/device_code.h"
#include "kernels/cuda/device_info.h"

namespace kdtree {
namespace {

constexpr std::int64_t kScratchUnit = std::int64_t{2} << 20;

void select_device(int device) {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  require_input(device >= 0 && device < count,
                "CUDA device {} does not exist: this process sees {} of them", device, count);
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
}

}  // namespace

// The device is selected once, for the thread that makes the backend; all calls come from that
// thread. Another thread that used the backend would have to select the device itself.
CudaBackend::CudaBackend(const BackendOptions& options)
    : activation_dtype_(options.activation_dtype),
      num_threads_(options.num_threads),
      device_(choose_device(options.local_rank)) {
  require_input(num_threads_ >= 1, "the CUDA backend needs at least 1 host thread, not {}",
                num_threads_);
  check(activation_dtype_ == DType::kFloat32 || activation_dtype_ == DType::kBFloat16,
        "activations of {}: expected F32 or BF16", dtype_name(activation_dtype_));
  select_device(device_);
  check_cuda(cudaGetDeviceProperties(&properties_, device_), "cudaGetDeviceProperties");
  require_input(has_device_code(),
                "CUDA device {} ({}) has compute capability {}.{}, for which this build has no "
                "machine code; build with CMAKE_CUDA_ARCHITECTURES for it (supported: 90a, 120a)",
                device_, properties_.name, properties_.major, properties_.minor);
  // Not blocked by the legacy default stream, which libraries may use.
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  for (cudaEvent_t& event : marks_) {
    check_cuda(cudaEventCreate(&event), "cudaEventCreate");
  }
  for (cudaEvent_t& event : fences_) {
    // The waiting thread sleeps: ranks that share the host's cores need them.
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
               "cudaEventCreate");
  }
  check_cublas(cublasCreate(&cublas_), "cublasCreate");
  check_cublas(cublasSetStream(cublas_, stream_), "cublasSetStream");
  check_cublas(cublasSetMathMode(cublas_, CUBLAS_PEDANTIC_MATH), "cublasSetMathMode");
  // Its own workspace would be allocated in the middle of a recording.
  check_cuda(cudaMalloc(&cublas_workspace_, kCublasWorkspaceBytes), "cuBLAS workspace");
  check_cublas(cublasSetWorkspace(cublas_, cublas_workspace_, kCublasWorkspaceBytes),
               "cublasSetWorkspace");
}

// Errors have no one to go to here, and a device that failed fails every call.
CudaBackend::~CudaBackend() {
  cudaSetDevice(device_);
  cudaStreamSynchronize(stream_);
  recorded_.clear();
  cublasDestroy(cublas_);
  cudaFree(cublas_workspace_);
  cudaFree(scratch_);
  for (void* memory : outgrown_) {
    cudaFree(memory);
  }
  for (cudaEvent_t event : marks_) {
    cudaEventDestroy(event);
  }
  for (cudaEvent_t event : fences_) {
    cudaEventDestroy(event);
  }
  cudaStreamDestroy(stream_);
}

DeviceFacts CudaBackend::device_facts() const {
  const DeviceInfo info = device_info(device_);
  return {.name = info.name,
          .architecture =
              fmt::format("sm_{}{}", info.compute_capability_major, info.compute_capability_minor),
          .uuid = info.uuid,
          .driver_cuda = info.driver_cuda,
          .num_processors = info.num_multiprocessors,
          .memory_bytes = info.total_bytes,
          .cache_bytes = info.l2_bytes};
}

Buffer CudaBackend::allocate(std::int64_t bytes) {
  check(bytes >= 0, "allocation of {} bytes", bytes);
  check(!recording_, "allocation of {} bytes while a step is being recorded", bytes);
  void* data = nullptr;
  // An empty tensor has an address as well, as on the CPU.
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  const cudaError_t status = cudaMalloc(&data, size);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // or the next launch check would report it again
    fail("CUDA device {} has no memory for {} bytes; {} are free", device_, bytes, free_bytes());
  }
  check_cuda(status, "cudaMalloc");
  Buffer buffer(data, bytes, [device = device_](void* memory) {
    cudaSetDevice(device);
    cudaFree(memory);  // waits for the work that uses it
  });
  check_cuda(cudaMemsetAsync(data, 0, size, stream_), "cudaMemsetAsync");
  return buffer;
}

// `host` may be pageable memory, which is staged before the call returns, or pinned memory, which
// must keep its content until synchronize().
void CudaBackend::upload(void* device, const void* host, std::int64_t bytes) {
  check(bytes >= 0, "upload of {} bytes", bytes);
  if (bytes > 0) {
    check_cuda(cudaMemcpyAsync(device, host, static_cast<std::size_t>(bytes),
                               cudaMemcpyHostToDevice, stream_),
               "upload");
  }
}

void CudaBackend::download(void* host, const void* device, std::int64_t bytes) {
  check(bytes >= 0, "download of {} bytes", bytes);
  if (bytes > 0) {
    check_cuda(cudaMemcpyAsync(host, device, static_cast<std::size_t>(bytes),
                               cudaMemcpyDeviceToHost, stream_),
               "download");
  }
}

void CudaBackend::synchronize() {
  check_cuda(cudaStreamSynchronize(stream_), "work on the CUDA device failed");
}

Buffer CudaBackend::allocate_host(std::int64_t bytes) {
  check(bytes >= 0, "host allocation of {} bytes", bytes);
  check(!recording_, "host allocation of {} bytes while a step is being recorded", bytes);
  void* data = nullptr;
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  check_cuda(cudaMallocHost(&data, size), "cudaMallocHost");
  std::memset(data, 0, size);
  return {data, bytes, [](void* memory) { cudaFreeHost(memory); }};
}

void CudaBackend::set_fence(std::size_t index) {
  check(!recording_, "a fence inside of run_recorded");
  check_cuda(cudaEventRecord(fences_.at(index), stream_), "set_fence");
}

void CudaBackend::wait_fence(std::size_t index) {
  check_cuda(cudaEventSynchronize(fences_.at(index)), "work on the CUDA device failed");
}

std::int64_t CudaBackend::free_bytes() const {
  std::size_t free = 0;
  std::size_t total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<std::int64_t>(free);
}

void CudaBackend::copy(ConstTensorView source, TensorView target) {
  expect_tensor("copy's target", target, source.dtype(), source.shape());
  if (source.num_elements() == 0) {
    return;
  }
  if (source.contiguous() && target.contiguous()) {
    check_cuda(cudaMemcpyAsync(target.raw(), source.raw(), static_cast<std::size_t>(source.bytes()),
                               cudaMemcpyDeviceToDevice, stream_),
               "copy");
    return;
  }
  const std::int64_t element = dtype_bytes(source.dtype());
  check_cuda(cudaMemcpy2DAsync(
                 target.raw(), static_cast<std::size_t>(target.row_stride() * element),
                 source.raw(), static_cast<std::size_t>(source.row_stride() * element),
                 static_cast<std::size_t>(source.shape().row_elements() * element),
                 static_cast<std::size_t>(source.size(0)), cudaMemcpyDeviceToDevice, stream_),
             "strided copy");
}

void CudaBackend::fill_zero(TensorView target) {
  if (!target.contiguous()) {
    fail("fill_zero of {} with rows {} elements apart: expected a contiguous tensor",
         target.shape().to_string(), target.row_stride());
  }
  if (target.num_elements() > 0) {
    check_cuda(cudaMemsetAsync(target.raw(), 0, static_cast<std::size_t>(target.bytes()), stream_),
               "fill_zero");
  }
}

void* CudaBackend::scratch(std::int64_t bytes) {
  check(bytes >= 0, "scratch of {} bytes", bytes);
  if (bytes <= scratch_bytes_) {
    return scratch_;
  }
  check(!recording_, "scratch would grow from {} to {} bytes while a step is being recorded",
        scratch_bytes_, bytes);
  const std::int64_t size = (bytes + kScratchUnit - 1) / kScratchUnit * kScratchUnit;
  void* grown = nullptr;
  check_cuda(cudaMalloc(&grown, static_cast<std::size_t>(size)), "scratch");
  const bool named = std::any_of(recorded_.begin(), recorded_.end(), [](const auto& entry) {
    return entry.second->executable != nullptr;
  });
  if (named) {  // recorded work goes on using the memory that it was recorded with
    outgrown_.push_back(scratch_);
  } else if (scratch_ != nullptr) {
    check_cuda(cudaStreamSynchronize(stream_), "scratch");
    check_cuda(cudaFree(scratch_), "scratch");
  }
  scratch_ = grown;
  scratch_bytes_ = size;
  return scratch_;
}

}  // namespace kdtree
