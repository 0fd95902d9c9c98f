// Collectives on device tensors over MPI: through page-locked host memory, with the sums in rank
// order of comm/mpi. Several ranks may share a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/mpi/mpi_communicator.h"

namespace kdtree {

// A call waits until the stream has come to it and returns when the other ranks have come, too: it
// cannot be captured in a CUDA graph (Error). The result is there in stream order. Tensors lie on
// the calling thread's CUDA device.
class StagedCommunicator final : public Communicator {
 public:
  // Collective over MPI_COMM_WORLD. Takes page-locked memory for messages of up to `bytes`; a
  // larger one takes more when it comes.
  explicit StagedCommunicator(std::int64_t bytes);
  StagedCommunicator(const StagedCommunicator&) = delete;
  StagedCommunicator& operator=(const StagedCommunicator&) = delete;
  ~StagedCommunicator() override;

  std::string name() const override { return "mpi"; }
  int rank() const override { return mpi_->rank(); }
  int world_size() const override { return mpi_->world_size(); }
  // float32 or bfloat16; the latter is summed in float32 and rounded once.
  void all_reduce_sum(TensorView x, Stream stream, CollectiveLabel label) override;
  void broadcast(TensorView x, int root, Stream stream, CollectiveLabel label) override;
  void all_gather(ConstTensorView part, TensorView whole, Stream stream,
                  CollectiveLabel label) override;
  void all_gather_rows(ConstTensorView part, TensorView whole, std::span<const std::int64_t> rows,
                       Stream stream, CollectiveLabel label) override;
  void reduce_scatter_rows(ConstTensorView whole, TensorView own,
                           std::span<const std::int64_t> rows, Stream stream,
                           CollectiveLabel label) override;
  void all_to_all(ConstTensorView sent, TensorView received, const RowCounts& counts, Stream stream,
                  CollectiveLabel label) override;
  std::unique_ptr<Communicator> split(int part) override;

 private:
  // Page-locked host memory.
  struct Staging {
    Buffer memory;
    std::byte* reserve(std::int64_t bytes);
  };
  // What messages pass through; one for all ranks' communicator and its parts, whose calls come one
  // after another.
  struct Passage {
    explicit Passage(std::int64_t bytes);
    Passage(const Passage&) = delete;
    Passage& operator=(const Passage&) = delete;
    ~Passage();
    Staging sent;
    Staging received;
    std::vector<float> widened;  // bfloat16 values that are summed
    cudaEvent_t delivered = nullptr;
  };
  StagedCommunicator(std::unique_ptr<MpiCommunicator> mpi, std::shared_ptr<Passage> passage);

  // Refuses capture, and waits until the memory's last use is over.
  void begin(cudaStream_t stream);
  // The tensor in host memory at `host`, once it is there.
  void fetch(void* host, const ConstTensorView& device, cudaStream_t stream);
  // Sends the host's bytes to the device in stream order.
  void deliver(void* device, const void* host, std::int64_t bytes, cudaStream_t stream);

  void widen(const std::byte* values, std::int64_t count);

  std::unique_ptr<MpiCommunicator> mpi_;
  std::shared_ptr<Passage> passage_;
};

}  // namespace kdtree
