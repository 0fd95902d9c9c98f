// Collectives on device tensors over NCCL: a communicator and its parts, all calls in the program's
// order.
#pragma once

#include <nccl.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/nccl/nccl_watch.h"
#include "comm/peer_watch.h"

namespace kdtree {

// Tensors lie on the CUDA device that was current at construction. Calls put work on the stream and
// return; they may be captured in CUDA graphs. An NVTX range names each.
//
// A lost rank, an error of NCCL, or a collective that exceeds KDTREE_COLLECTIVE_TIMEOUT_S is
// printed (which rank on which host, in which collective) and ends the process with a non-zero exit
// code from a watching thread: the program's own may wait for the device for ever.
class NcclCommunicator final : public Communicator {
 public:
  // Collective over the group, which must outlive the communicator; ranks must not share a GPU.
  // Sends data to and fro once and checks them (Error where they arrive wrong).
  explicit NcclCommunicator(ProcessGroup& group);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  // Waits for the work given so far; during an exception it aborts it instead.
  ~NcclCommunicator() override;

  std::string name() const override { return "nccl"; }
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  bool capturable() const override { return true; }
  // float32 or bfloat16, in an order of NCCL's choice: the same for the same size, the same bits on
  // all ranks.
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
  void replayed(Stream stream, CollectiveLabel label) override;

 private:
  class Call;
  // A part of `whole`: owns `comm`, whose ranks, as the whole counts them, are `ranks`.
  NcclCommunicator(NcclCommunicator& whole, ncclComm_t comm, const std::vector<int>& ranks);

  void start(ProcessGroup& group);
  // Prints "rank ... on ... <what>", tells the other ranks, and ends the process.
  void end_run(const std::string& what, int exit_code);
  void print_and_exit(const std::string& message, int exit_code, const std::string& announcement);
  static void abort_in_time(const std::vector<ncclComm_t>& comms);

  ProcessGroup& group_;
  int rank_;
  int world_size_;
  std::string host_;
  int device_ = 0;
  int exceptions_at_start_;
  ncclComm_t comm_ = nullptr;
  const char* ranks_ = nullptr;       // of a part: "1, 3"
  std::shared_ptr<NcclWatch> watch_;  // of the whole and its parts
  std::unique_ptr<PeerWatch> peers_;  // of the whole alone
};

}  // namespace kdtree
