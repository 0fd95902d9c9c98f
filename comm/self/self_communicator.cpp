#include "comm/self/self_communicator.h"

#include <cstring>

namespace kdtree {

namespace {

void copy_all(const ConstTensorView& source, const TensorView& target) {
  check(source.contiguous() && target.contiguous() && source.bytes() == target.bytes(),
        "collective of one rank: {} bytes into {}", source.bytes(), target.bytes());
  if (source.bytes() > 0 && source.raw() != target.raw()) {
    std::memcpy(target.raw(), source.raw(), static_cast<std::size_t>(source.bytes()));
  }
}

}  // namespace

void SelfCommunicator::all_reduce_sum(TensorView /*x*/, Stream /*stream*/,
                                      CollectiveLabel /*label*/) {}

void SelfCommunicator::broadcast(TensorView /*x*/, int root, Stream /*stream*/,
                                 CollectiveLabel /*label*/) {
  check(root == 0, "broadcast from rank {} of 1", root);
}

void SelfCommunicator::all_gather(ConstTensorView part, TensorView whole, Stream /*stream*/,
                                  CollectiveLabel /*label*/) {
  copy_all(part, whole);
}

void SelfCommunicator::all_gather_rows(ConstTensorView part, TensorView whole,
                                       std::span<const std::int64_t> rows, Stream /*stream*/,
                                       CollectiveLabel /*label*/) {
  check(rows.size() == 1 && rows[0] == part.size(0), "all_gather_rows of one rank: wrong counts");
  copy_all(part, whole);
}

void SelfCommunicator::reduce_scatter_rows(ConstTensorView whole, TensorView own,
                                           std::span<const std::int64_t> rows, Stream /*stream*/,
                                           CollectiveLabel /*label*/) {
  check(rows.size() == 1 && rows[0] == own.size(0),
        "reduce_scatter_rows of one rank: wrong counts");
  copy_all(whole, own);
}

void SelfCommunicator::all_to_all(ConstTensorView sent, TensorView received,
                                  const RowCounts& counts, Stream /*stream*/,
                                  CollectiveLabel /*label*/) {
  check(counts.rows_to.size() == 1 && counts.rows_from.size() == 1 &&
            counts.rows_to[0] == counts.rows_from[0],
        "all_to_all of one rank: wrong counts");
  copy_all(sent, received);
}

std::unique_ptr<Communicator> SelfCommunicator::split(int /*part*/) {
  return std::make_unique<SelfCommunicator>();
}

}  // namespace kdtree
