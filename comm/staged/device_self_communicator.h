// The communicator of a single rank whose tensors lie on a GPU.
#pragma once

#include "comm/communicator.h"

namespace kdtree {

// Copies on the stream; may be captured in CUDA graphs.
class DeviceSelfCommunicator final : public Communicator {
 public:
  std::string name() const override { return "self"; }
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  bool capturable() const override { return true; }
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
};

}  // namespace kdtree
