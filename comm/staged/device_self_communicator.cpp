#include "comm/staged/device_self_communicator.h"

#include "comm/staged/cuda_call.h"

namespace kdtree {

namespace {

void copy_all(const ConstTensorView& source, const TensorView& target, Stream stream) {
  check(source.contiguous() && target.contiguous() && source.bytes() == target.bytes(),
        "collective of one rank: {} bytes into {}", source.bytes(), target.bytes());
  if (source.bytes() > 0 && source.raw() != target.raw()) {
    check_cuda(cudaMemcpyAsync(target.raw(), source.raw(), static_cast<std::size_t>(source.bytes()),
                               cudaMemcpyDeviceToDevice, cuda_stream(stream)),
               "cudaMemcpyAsync");
  }
}

}  // namespace

void DeviceSelfCommunicator::all_reduce_sum(TensorView /*x*/, Stream /*stream*/,
                                            CollectiveLabel /*label*/) {}

void DeviceSelfCommunicator::broadcast(TensorView /*x*/, int root, Stream /*stream*/,
                                       CollectiveLabel /*label*/) {
  check(root == 0, "broadcast from rank {} of 1", root);
}

void DeviceSelfCommunicator::all_gather(ConstTensorView part, TensorView whole, Stream stream,
                                        CollectiveLabel /*label*/) {
  copy_all(part, whole, stream);
}

void DeviceSelfCommunicator::all_gather_rows(ConstTensorView part, TensorView whole,
                                             std::span<const std::int64_t> rows, Stream stream,
                                             CollectiveLabel /*label*/) {
  check(rows.size() == 1 && rows[0] == part.size(0), "all_gather_rows of one rank: wrong counts");
  copy_all(part, whole, stream);
}

void DeviceSelfCommunicator::reduce_scatter_rows(ConstTensorView whole, TensorView own,
                                                 std::span<const std::int64_t> rows, Stream stream,
                                                 CollectiveLabel /*label*/) {
  check(rows.size() == 1 && rows[0] == own.size(0),
        "reduce_scatter_rows of one rank: wrong counts");
  copy_all(whole, own, stream);
}

void DeviceSelfCommunicator::all_to_all(ConstTensorView sent, TensorView received,
                                        const RowCounts& counts, Stream stream,
                                        CollectiveLabel /*label*/) {
  check(counts.rows_to.size() == 1 && counts.rows_from.size() == 1 &&
            counts.rows_to[0] == counts.rows_from[0],
        "all_to_all of one rank: wrong counts");
  copy_all(sent.rows(0, counts.rows_to[0]), received.rows(0, counts.rows_from[0]), stream);
}

std::unique_ptr<Communicator> DeviceSelfCommunicator::split(int /*part*/) {
  return std::make_unique<DeviceSelfCommunicator>();
}

}  // namespace kdtree
