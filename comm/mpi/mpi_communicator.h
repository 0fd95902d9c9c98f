// Collectives over MPI for tensors in host memory.
#pragma once

#include <mpi.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/mpi/collective_watch.h"

namespace kdtree {

// Uses a communicator of its own, so that its messages never meet those of the process group.
class MpiCommunicator final : public Communicator {
 public:
  // Of all ranks. Collective over MPI_COMM_WORLD.
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
  void reduce_scatter_rows(ConstTensorView whole, TensorView own,
                           std::span<const std::int64_t> rows, Stream stream,
                           CollectiveLabel label) override;
  void all_to_all(ConstTensorView sent, TensorView received, const RowCounts& counts, Stream stream,
                  CollectiveLabel label) override;
  std::unique_ptr<Communicator> split(int part) override;
  // The same, whatever the number of ranks: also a part of one is "mpi".
  std::unique_ptr<MpiCommunicator> split_mpi(int part);

 private:
  // Owns `comm`, whose ranks, as the whole counts them, are `ranks`.
  MpiCommunicator(MPI_Comm comm, std::string ranks, std::shared_ptr<CollectiveWatch> watch);

  // Counts and displacements of an MPI v-collective, one a rank, in bytes or elements.
  struct Layout {
    std::vector<int> counts;
    std::vector<int> displacements;
    int total = 0;
  };
  void fill_layout(Layout& layout, std::span<const std::int64_t> rows, std::int64_t row_bytes);

  void sum_own_part(const float* values, float* sum);

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int world_size_ = 1;
  std::vector<float> parts_;  // all_reduce_sum: every rank's copy of this rank's part
  Layout sent_;
  Layout received_;
  std::string ranks_;                       // of a part: "1, 3"
  std::shared_ptr<CollectiveWatch> watch_;  // of all ranks and of the parts
};

}  // namespace kdtree
