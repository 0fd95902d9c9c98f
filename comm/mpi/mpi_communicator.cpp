#include "comm/mpi/mpi_communicator.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "comm/mpi/mpi_call.h"
#include "comm/self/self_communicator.h"
#include "core/partition.h"

namespace kdtree {

namespace {

MPI_Comm duplicate_of_world() {
  MPI_Comm comm = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &comm), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return comm;
}

int rank_in(MPI_Comm comm) {
  int rank = 0;
  check_mpi(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = 0;
  check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  return size;
}

std::int64_t row_bytes(const ConstTensorView& view) {
  return view.shape().row_elements() * dtype_bytes(view.dtype());
}

}  // namespace

MpiCommunicator::MpiCommunicator()
    : comm_(duplicate_of_world()),
      rank_(rank_in(comm_)),
      world_size_(size_of(comm_)),
      watch_(std::make_shared<CollectiveWatch>(rank_, world_size_, collective_time_limit())) {}

MpiCommunicator::MpiCommunicator(MPI_Comm comm, std::string ranks,
                                 std::shared_ptr<CollectiveWatch> watch)
    : comm_(comm),
      rank_(rank_in(comm_)),
      world_size_(size_of(comm_)),
      ranks_(std::move(ranks)),
      watch_(std::move(watch)) {}

MpiCommunicator::~MpiCommunicator() {
  MPI_Comm_free(&comm_);
}

void MpiCommunicator::fill_layout(Layout& layout, std::span<const std::int64_t> rows,
                                  std::int64_t row_bytes) {
  check(static_cast<int>(rows.size()) == world_size_, "{} row counts for {} ranks", rows.size(),
        world_size_);
  layout.counts.resize(rows.size());
  layout.displacements.resize(rows.size());
  std::int64_t total = 0;
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    layout.counts[rank] = mpi_count(rows[rank] * row_bytes);
    layout.displacements[rank] = mpi_count(total);
    total += rows[rank] * row_bytes;
  }
  layout.total = mpi_count(total);
}

// sum = of the parts of `values` that the ranks have for this one, cut as sent_ says, in rank
// order.
void MpiCommunicator::sum_own_part(const float* values, float* sum) {
  const auto ranks = static_cast<std::size_t>(world_size_);
  const int own = sent_.counts[static_cast<std::size_t>(rank_)];
  received_.counts.assign(ranks, own);
  received_.displacements.resize(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    received_.displacements[rank] = mpi_count(static_cast<std::int64_t>(rank) * own);
  }
  const auto size = static_cast<std::size_t>(own);
  parts_.resize(std::max(parts_.size(), size * ranks));
  check_mpi(MPI_Alltoallv(values, sent_.counts.data(), sent_.displacements.data(), MPI_FLOAT,
                          parts_.data(), received_.counts.data(), received_.displacements.data(),
                          MPI_FLOAT, comm_),
            "MPI_Alltoallv");
  std::copy_n(parts_.begin(), size, sum);
  for (std::size_t rank = 1; rank < ranks; ++rank) {
    const float* part = parts_.data() + rank * size;
    for (std::size_t i = 0; i < size; ++i) {
      sum[i] += part[i];
    }
  }
}

// MPI_Allreduce may choose its order of addition by the message size. Here each rank sums one part
// of x in rank order and the parts are gathered again, so an element's bits depend on the ranks'
// values alone.
void MpiCommunicator::all_reduce_sum(TensorView x, Stream /*stream*/, CollectiveLabel label) {
  check(x.contiguous(), "all_reduce_sum needs a contiguous tensor");
  const CollectiveWatch::Scope scope(*watch_, "all_reduce_sum", label, ranks_);
  float* values = x.data<float>();
  const std::int64_t count = x.num_elements();
  const auto ranks = static_cast<std::size_t>(world_size_);
  sent_.counts.resize(ranks);
  sent_.displacements.resize(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const Range part = partition(count, world_size_, static_cast<std::int64_t>(rank));
    sent_.counts[rank] = mpi_count(part.size());
    sent_.displacements[rank] = mpi_count(part.begin);
  }
  sum_own_part(values, values + partition(count, world_size_, rank_).begin);
  check_mpi(MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, values, sent_.counts.data(),
                           sent_.displacements.data(), MPI_FLOAT, comm_),
            "MPI_Allgatherv");
}

void MpiCommunicator::broadcast(TensorView x, int root, Stream /*stream*/, CollectiveLabel label) {
  check(x.contiguous(), "broadcast needs a contiguous tensor");
  const CollectiveWatch::Scope scope(*watch_, "broadcast", label, ranks_);
  check_mpi(MPI_Bcast(x.raw(), mpi_count(x.bytes()), MPI_BYTE, root, comm_), "MPI_Bcast");
}

void MpiCommunicator::all_gather(ConstTensorView part, TensorView whole, Stream /*stream*/,
                                 CollectiveLabel label) {
  check(part.contiguous() && whole.contiguous() && whole.bytes() == part.bytes() * world_size_,
        "all_gather of {} bytes a rank into {} bytes", part.bytes(), whole.bytes());
  const CollectiveWatch::Scope scope(*watch_, "all_gather", label, ranks_);
  const auto* own_block = static_cast<const std::byte*>(whole.raw()) + rank_ * part.bytes();
  const void* sent = part.raw() == own_block ? MPI_IN_PLACE : part.raw();
  const int count = mpi_count(part.bytes());
  check_mpi(MPI_Allgather(sent, count, MPI_BYTE, whole.raw(), count, MPI_BYTE, comm_),
            "MPI_Allgather");
}

void MpiCommunicator::all_gather_rows(ConstTensorView part, TensorView whole,
                                      std::span<const std::int64_t> rows, Stream /*stream*/,
                                      CollectiveLabel label) {
  check(part.contiguous() && whole.contiguous() && row_bytes(part) == row_bytes(whole),
        "all_gather_rows: rows of {} and {} bytes", row_bytes(part), row_bytes(whole));
  fill_layout(received_, rows, row_bytes(whole));
  check(received_.total == whole.bytes() && rows[static_cast<std::size_t>(rank_)] == part.size(0),
        "all_gather_rows: counts do not match the tensors");
  const CollectiveWatch::Scope scope(*watch_, "all_gather_rows", label, ranks_);
  const auto* own_block = static_cast<const std::byte*>(whole.raw()) +
                          received_.displacements[static_cast<std::size_t>(rank_)];
  const void* sent = part.raw() == own_block ? MPI_IN_PLACE : part.raw();
  check_mpi(
      MPI_Allgatherv(sent, mpi_count(part.bytes()), MPI_BYTE, whole.raw(), received_.counts.data(),
                     received_.displacements.data(), MPI_BYTE, comm_),
      "MPI_Allgatherv");
}

void MpiCommunicator::reduce_scatter_rows(ConstTensorView whole, TensorView own,
                                          std::span<const std::int64_t> rows, Stream /*stream*/,
                                          CollectiveLabel label) {
  check(whole.contiguous() && own.contiguous() && row_bytes(whole) == row_bytes(own),
        "reduce_scatter_rows: rows of {} and {} bytes", row_bytes(whole), row_bytes(own));
  fill_layout(sent_, rows, whole.shape().row_elements());
  check(sent_.total == whole.num_elements() && rows[static_cast<std::size_t>(rank_)] == own.size(0),
        "reduce_scatter_rows: counts do not match the tensors");
  const CollectiveWatch::Scope scope(*watch_, "reduce_scatter_rows", label, ranks_);
  sum_own_part(whole.data<float>(), own.data<float>());
}

void MpiCommunicator::all_to_all(ConstTensorView sent, TensorView received, const RowCounts& counts,
                                 Stream /*stream*/, CollectiveLabel label) {
  check(sent.contiguous() && received.contiguous() && row_bytes(sent) == row_bytes(received),
        "all_to_all: rows of {} and {} bytes", row_bytes(sent), row_bytes(received));
  fill_layout(sent_, counts.rows_to, row_bytes(sent));
  fill_layout(received_, counts.rows_from, row_bytes(received));
  check(sent_.total <= sent.bytes() && received_.total <= received.bytes(),
        "all_to_all: counts are beyond the tensors");
  const CollectiveWatch::Scope scope(*watch_, "all_to_all", label, ranks_);
  check_mpi(MPI_Alltoallv(sent.raw(), sent_.counts.data(), sent_.displacements.data(), MPI_BYTE,
                          received.raw(), received_.counts.data(), received_.displacements.data(),
                          MPI_BYTE, comm_),
            "MPI_Alltoallv");
}

std::unique_ptr<MpiCommunicator> MpiCommunicator::split_mpi(int part) {
  check(ranks_.empty(), "a part of a communicator, ranks {}, is to be split again", ranks_);
  const CollectiveWatch::Scope scope(*watch_, "split", {}, ranks_);
  MPI_Comm comm = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split(comm_, part, rank_, &comm), "MPI_Comm_split");
  check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  std::vector<int> ranks(static_cast<std::size_t>(size_of(comm)));
  check_mpi(MPI_Allgather(&rank_, 1, MPI_INT, ranks.data(), 1, MPI_INT, comm), "MPI_Allgather");
  return std::unique_ptr<MpiCommunicator>(
      new MpiCommunicator(comm, fmt::format("{}", fmt::join(ranks, ", ")), watch_));
}

std::unique_ptr<Communicator> MpiCommunicator::split(int part) {
  std::unique_ptr<MpiCommunicator> made = split_mpi(part);
  if (made->world_size() == 1) {
    return std::make_unique<SelfCommunicator>();
  }
  return made;
}

}  // namespace kdtree
