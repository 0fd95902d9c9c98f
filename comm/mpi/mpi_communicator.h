// Collectives over MPI for tensors in host memory.
#pragma once

#include <mpi.h>

#include <vector>

#include "comm/communicator.h"
#include "comm/mpi/collective_watch.h"

namespace kdtree {

// Uses a duplicate of MPI_COMM_WORLD, so that its messages never meet those of the process group.
class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator();
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;
  ~MpiCommunicator() override;

  std::string name() const override { return "mpi"; }
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  void all_reduce_sum(TensorView x, Stream stream, CollectiveLabel label) override;
  void broadcast(TensorView x, int root, Stream stream, CollectiveLabel label) override;
  void all_gather(ConstTensorView part, TensorView whole, Stream stream,
                  CollectiveLabel label) override;
  void all_gather_rows(ConstTensorView part, TensorView whole, std::span<const std::int64_t> rows,
                       Stream stream, CollectiveLabel label) override;
  void all_to_all(ConstTensorView sent, TensorView received, const RowCounts& counts, Stream stream,
                  CollectiveLabel label) override;

 private:
  // Counts and displacements of an MPI v-collective, one a rank, in bytes or elements.
  struct Layout {
    std::vector<int> counts;
    std::vector<int> displacements;
    int total = 0;
  };
  void fill_layout(Layout& layout, std::span<const std::int64_t> rows, std::int64_t row_bytes);

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int world_size_ = 1;
  std::vector<float> parts_;  // all_reduce_sum: every rank's copy of this rank's part
  Layout sent_;
  Layout received_;
  CollectiveWatch watch_;
};

}  // namespace kdtree
