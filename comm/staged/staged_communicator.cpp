#include "comm/staged/staged_communicator.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <utility>

#include "comm/staged/cuda_call.h"
#include "comm/staged/device_self_communicator.h"
#include "core/log.h"

namespace kdtree {

namespace {

void require_contiguous(const ConstTensorView& view, const char* call) {
  check(view.contiguous(), "{} needs contiguous tensors", call);
}

}  // namespace

StagedCommunicator::Passage::Passage(std::int64_t bytes) {
  check_cuda(cudaEventCreateWithFlags(&delivered, cudaEventDisableTiming),
             "cudaEventCreateWithFlags");
  sent.reserve(bytes);
  received.reserve(bytes);
  widened.reserve(static_cast<std::size_t>(bytes) / sizeof(BFloat16));
}

StagedCommunicator::Passage::~Passage() {
  cudaEventSynchronize(delivered);
  cudaEventDestroy(delivered);
}

StagedCommunicator::StagedCommunicator(std::int64_t bytes)
    : StagedCommunicator(std::make_unique<MpiCommunicator>(), std::make_shared<Passage>(bytes)) {}

StagedCommunicator::StagedCommunicator(std::unique_ptr<MpiCommunicator> mpi,
                                       std::shared_ptr<Passage> passage)
    : mpi_(std::move(mpi)), passage_(std::move(passage)) {}

StagedCommunicator::~StagedCommunicator() = default;

std::unique_ptr<Communicator> StagedCommunicator::split(int part) {
  std::unique_ptr<MpiCommunicator> mpi = mpi_->split_mpi(part);
  if (mpi->world_size() == 1) {
    return std::make_unique<DeviceSelfCommunicator>();
  }
  return std::unique_ptr<Communicator>(new StagedCommunicator(std::move(mpi), passage_));
}

// At least `bytes`; what was in it is lost where it grows.
std::byte* StagedCommunicator::Staging::reserve(std::int64_t bytes) {
  if (bytes > memory.bytes()) {
    const auto size = std::bit_ceil(static_cast<std::uint64_t>(bytes));
    if (memory.bytes() > 0) {
      spdlog::debug("staged communicator: {} bytes of page-locked memory instead of {}", size,
                    memory.bytes());
    }
    void* data = nullptr;
    check_cuda(cudaMallocHost(&data, size), "cudaMallocHost");
    memory = Buffer(data, static_cast<std::int64_t>(size), [](void* old) { cudaFreeHost(old); });
  }
  return static_cast<std::byte*>(memory.data());
}

void StagedCommunicator::begin(cudaStream_t stream) {
  check(!capturing(stream),
        "--communicator mpi waits on the host, so its collectives cannot be captured in a CUDA "
        "graph");
  check_cuda(cudaEventSynchronize(passage_->delivered), "cudaEventSynchronize");
}

void StagedCommunicator::fetch(void* host, const ConstTensorView& device, cudaStream_t stream) {
  if (device.bytes() > 0) {
    check_cuda(cudaMemcpyAsync(host, device.raw(), static_cast<std::size_t>(device.bytes()),
                               cudaMemcpyDeviceToHost, stream),
               "cudaMemcpyAsync");
  }
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

void StagedCommunicator::deliver(void* device, const void* host, std::int64_t bytes,
                                 cudaStream_t stream) {
  if (bytes > 0) {
    check_cuda(cudaMemcpyAsync(device, host, static_cast<std::size_t>(bytes),
                               cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
  }
  check_cuda(cudaEventRecord(passage_->delivered, stream), "cudaEventRecord");
}

// passage_->widened = these bfloat16 values.
void StagedCommunicator::widen(const std::byte* values, std::int64_t count) {
  const auto* narrow = reinterpret_cast<const BFloat16*>(values);
  passage_->widened.resize(static_cast<std::size_t>(count));
  std::transform(narrow, narrow + count, passage_->widened.begin(),
                 [](BFloat16 value) { return value.to_float(); });
}

void StagedCommunicator::all_reduce_sum(TensorView x, Stream stream, CollectiveLabel label) {
  require_contiguous(x, "all_reduce_sum");
  const bool narrow = x.dtype() == DType::kBFloat16;
  check(narrow || x.dtype() == DType::kFloat32, "all_reduce_sum of {}", dtype_name(x.dtype()));
  begin(cuda_stream(stream));
  std::byte* host = passage_->sent.reserve(x.bytes());
  fetch(host, x, cuda_stream(stream));
  if (narrow) {
    widen(host, x.num_elements());
    mpi_->all_reduce_sum({passage_->widened.data(), DType::kFloat32, x.shape()}, {}, label);
    std::transform(passage_->widened.begin(), passage_->widened.end(),
                   reinterpret_cast<BFloat16*>(host), BFloat16::from_float);
  } else {
    mpi_->all_reduce_sum({host, DType::kFloat32, x.shape()}, {}, label);
  }
  deliver(x.raw(), host, x.bytes(), cuda_stream(stream));
}

void StagedCommunicator::broadcast(TensorView x, int root, Stream stream, CollectiveLabel label) {
  require_contiguous(x, "broadcast");
  begin(cuda_stream(stream));
  std::byte* host = passage_->sent.reserve(x.bytes());
  if (rank() == root) {
    fetch(host, x, cuda_stream(stream));
  }
  mpi_->broadcast({host, x.dtype(), x.shape()}, root, {}, label);
  if (rank() != root) {
    deliver(x.raw(), host, x.bytes(), cuda_stream(stream));
  }
}

void StagedCommunicator::all_gather(ConstTensorView part, TensorView whole, Stream stream,
                                    CollectiveLabel label) {
  require_contiguous(part, "all_gather");
  require_contiguous(whole, "all_gather");
  check(whole.bytes() == part.bytes() * world_size(), "all_gather of {} bytes a rank into {} bytes",
        part.bytes(), whole.bytes());
  begin(cuda_stream(stream));
  std::byte* host = passage_->received.reserve(whole.bytes());
  std::byte* own_block = host + rank() * part.bytes();
  fetch(own_block, part, cuda_stream(stream));
  mpi_->all_gather({own_block, part.dtype(), part.shape()}, {host, whole.dtype(), whole.shape()},
                   {}, label);
  deliver(whole.raw(), host, whole.bytes(), cuda_stream(stream));
}

void StagedCommunicator::all_gather_rows(ConstTensorView part, TensorView whole,
                                         std::span<const std::int64_t> rows, Stream stream,
                                         CollectiveLabel label) {
  require_contiguous(part, "all_gather_rows");
  require_contiguous(whole, "all_gather_rows");
  begin(cuda_stream(stream));
  std::byte* sent = passage_->sent.reserve(part.bytes());
  std::byte* received = passage_->received.reserve(whole.bytes());
  fetch(sent, part, cuda_stream(stream));
  mpi_->all_gather_rows({sent, part.dtype(), part.shape()},
                        {received, whole.dtype(), whole.shape()}, rows, {}, label);
  deliver(whole.raw(), received, whole.bytes(), cuda_stream(stream));
}

void StagedCommunicator::reduce_scatter_rows(ConstTensorView whole, TensorView own,
                                             std::span<const std::int64_t> rows, Stream stream,
                                             CollectiveLabel label) {
  require_contiguous(whole, "reduce_scatter_rows");
  require_contiguous(own, "reduce_scatter_rows");
  const bool narrow = whole.dtype() == DType::kBFloat16;
  check(whole.dtype() == own.dtype() && (narrow || whole.dtype() == DType::kFloat32),
        "reduce_scatter_rows of {} into {}", dtype_name(whole.dtype()), dtype_name(own.dtype()));
  begin(cuda_stream(stream));
  std::byte* sent = passage_->sent.reserve(whole.bytes());
  const std::int64_t float_bytes = own.num_elements() * dtype_bytes(DType::kFloat32);
  std::byte* received = passage_->received.reserve(float_bytes);
  fetch(sent, whole, cuda_stream(stream));
  const TensorView sum(received, DType::kFloat32, own.shape());
  if (narrow) {
    widen(sent, whole.num_elements());
    mpi_->reduce_scatter_rows({passage_->widened.data(), DType::kFloat32, whole.shape()}, sum, rows,
                              {}, label);
    const float* sums = sum.data<float>();
    auto* rounded = reinterpret_cast<BFloat16*>(passage_->sent.reserve(own.bytes()));
    std::transform(sums, sums + own.num_elements(), rounded, BFloat16::from_float);
    deliver(own.raw(), rounded, own.bytes(), cuda_stream(stream));
  } else {
    mpi_->reduce_scatter_rows({sent, DType::kFloat32, whole.shape()}, sum, rows, {}, label);
    deliver(own.raw(), received, own.bytes(), cuda_stream(stream));
  }
}

void StagedCommunicator::all_to_all(ConstTensorView sent, TensorView received,
                                    const RowCounts& counts, Stream stream, CollectiveLabel label) {
  require_contiguous(sent, "all_to_all");
  require_contiguous(received, "all_to_all");
  std::int64_t rows_received = 0;
  for (const std::int64_t rows : counts.rows_from) {
    rows_received += rows;
  }
  // Rows behind those stay as they are.
  const TensorView result = received.rows(0, rows_received);
  begin(cuda_stream(stream));
  std::byte* host_sent = passage_->sent.reserve(sent.bytes());
  std::byte* host_received = passage_->received.reserve(result.bytes());
  fetch(host_sent, sent, cuda_stream(stream));
  mpi_->all_to_all({host_sent, sent.dtype(), sent.shape()},
                   {host_received, result.dtype(), result.shape()}, counts, {}, label);
  deliver(result.raw(), host_received, result.bytes(), cuda_stream(stream));
}

}  // namespace kdtree
