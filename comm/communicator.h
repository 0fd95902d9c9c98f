// Collectives on tensors, ordered on a stream. All ranks of the group call the same ones in the
// same order with matching sizes; nothing checks that for them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "comm/process_group.h"
#include "core/buffer.h"
#include "core/tensor_view.h"

namespace kdtree {

// What a collective is for; named when it does not finish in time.
struct CollectiveLabel {
  const char* what = "collective";
  std::int64_t layer = -1;  // -1: outside the layers
};

// How all_to_all cuts its tensors: rows for (from) rank r are rows_to[r] (rows_from[r]), in rank
// order without gaps.
struct RowCounts {
  std::span<const std::int64_t> rows_to;
  std::span<const std::int64_t> rows_from;
};

class Communicator {
 public:
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  virtual std::string name() const = 0;  // "self", "mpi", "nccl"
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // Whether calls may be captured in a CUDA graph: they neither wait on the host nor allocate.
  virtual bool capturable() const { return false; }

  // x[i] = sum over ranks of x[i], added in rank order on every rank and for every size (self,
  // mpi), so the bits do not depend on the size of the message; nccl chooses an order by the size.
  // All ranks get the same bits. Contiguous float32; on devices bfloat16 as well (self, mpi: summed
  // in float32 and rounded once; nccl may round between two ranks' sums).
  virtual void all_reduce_sum(TensorView x, Stream stream, CollectiveLabel label) = 0;
  // Contiguous, any dtype.
  virtual void broadcast(TensorView x, int root, Stream stream, CollectiveLabel label) = 0;
  // whole [world_size, ...]: block r is rank r's part. Contiguous, equal sizes, any dtype. part may
  // be whole's own block.
  virtual void all_gather(ConstTensorView part, TensorView whole, Stream stream,
                          CollectiveLabel label) = 0;
  // whole's rows in rank order: rank r gives rows[r] of them. Contiguous, any dtype. part may be
  // whole's own block.
  virtual void all_gather_rows(ConstTensorView part, TensorView whole,
                               std::span<const std::int64_t> rows, Stream stream,
                               CollectiveLabel label) = 0;
  // own [rows[rank()], ...] = the sum over ranks of the rows of their `whole`s that are this
  // rank's: in rank order, rank r has rows[r] of them. Added like all_reduce_sum, so that where
  // that adds in rank order an element has the same bits. Contiguous, apart from each other; dtypes
  // of all_reduce_sum.
  virtual void reduce_scatter_rows(ConstTensorView whole, TensorView own,
                                   std::span<const std::int64_t> rows, Stream stream,
                                   CollectiveLabel label) = 0;
  // Rows of `sent` go to the ranks by counts.rows_to; `received` gets counts.rows_from. Contiguous,
  // any dtype.
  virtual void all_to_all(ConstTensorView sent, TensorView received, const RowCounts& counts,
                          Stream stream, CollectiveLabel label) = 0;

  // The communicator of those ranks that give the same `part`, in this one's order. Collective over
  // all ranks; this one outlives it. Error for one that is itself a part of several ranks. Calls on
  // a communicator and on its parts go to the same stream, and ranks that share two of them make
  // their calls on both in the same order: then nobody waits for ever. Time limits and errors name
  // ranks as this one counts them. A part of one rank is "self".
  virtual std::unique_ptr<Communicator> split(int part) = 0;

  // To be called behind the launch of a graph that holds captured collectives: a replay makes no
  // calls, so this is what its time limit is counted from. `label` names the graph. Does nothing
  // where collectives are not asynchronous.
  virtual void replayed(Stream /*stream*/, CollectiveLabel /*label*/) {}
};

struct CommunicatorOptions {
  std::string name = "auto";    // auto | self | mpi | nccl
  std::string backend = "cpu";  // whose tensors are sent
  // Host memory that mpi takes at the start for device tensors: at least the largest message of a
  // step, or the first larger message allocates more.
  std::int64_t staging_bytes = std::int64_t{16} << 20;
};

// InputError for an unknown name, for "self" with several ranks, for "mpi" without an MPI job, for
// an invalid time limit, for one that this build or backend does not have. The same verdict on
// every rank, without communication.
void check_communicator(const CommunicatorOptions& options, const ProcessGroup& group);

// auto: self for one rank, otherwise nccl for tensors on GPUs and mpi for others. Collective;
// errors as check_communicator. For GPUs it logs which rank uses which (the calling thread's
// current CUDA device); nccl with two ranks on one GPU is an AgreedError that names --communicator
// mpi. The group must outlive the communicator.
std::unique_ptr<Communicator> make_communicator(const CommunicatorOptions& options,
                                                ProcessGroup& group);

}  // namespace kdtree
