#include "comm/nccl/nccl_communicator.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <thread>

#include "comm/mpi/collective_watch.h"
#include "comm/nccl/nccl_call.h"
#include "comm/nccl/nccl_self_check.h"
#include "comm/nccl/nvtx_range.h"
#include "comm/staged/cuda_call.h"
#include "comm/staged/device_self_communicator.h"
#include "core/log.h"

namespace kdtree {

namespace {

constexpr int kLostRankExitCode = 1;

std::size_t size_of(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

std::int64_t row_bytes(const ConstTensorView& view) {
  return view.shape().row_elements() * dtype_bytes(view.dtype());
}

void copy_on_device(void* target, const void* source, std::int64_t bytes, cudaStream_t stream) {
  if (bytes > 0 && target != source) {
    check_cuda(cudaMemcpyAsync(target, source, size_of(bytes), cudaMemcpyDeviceToDevice, stream),
               "cudaMemcpyAsync");
  }
}

// Between construction and finish(), sends and receives are gathered and start together.
class Group {
 public:
  Group() { check_nccl(ncclGroupStart(), "ncclGroupStart"); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() {
    if (!finished_) {
      ncclGroupEnd();
    }
  }
  void finish() {
    finished_ = true;
    check_nccl(ncclGroupEnd(), "ncclGroupEnd");
  }

 private:
  bool finished_ = false;
};

}  // namespace

// Marks a collective for the watch and the profiler; also an empty one, so that its number is the
// same on all ranks.
class NcclCommunicator::Call {
 public:
  Call(const NcclCommunicator& communicator, const char* call, Stream stream, CollectiveLabel label)
      : range_(call, label), watch_(*communicator.watch_), stream_(cuda_stream(stream)) {
    watch_.enter(call, label, communicator.ranks_);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() { watch_.leave(stream_); }
  cudaStream_t stream() const { return stream_; }

 private:
  NvtxRange range_;
  NcclWatch& watch_;
  cudaStream_t stream_;
};

NcclCommunicator::NcclCommunicator(ProcessGroup& group)
    : group_(group),
      rank_(group.rank()),
      world_size_(group.world_size()),
      host_(group.host_name()),
      exceptions_at_start_(std::uncaught_exceptions()) {
  try {
    start(group);
  } catch (...) {
    if (watch_) {
      watch_->stop();  // it tells its failures to peers_, which goes first
    }
    if (comm_ != nullptr) {
      abort_in_time({comm_});
    }
    throw;
  }
}

NcclCommunicator::NcclCommunicator(NcclCommunicator& whole, ncclComm_t comm,
                                   const std::vector<int>& ranks)
    : group_(whole.group_),
      rank_(static_cast<int>(std::find(ranks.begin(), ranks.end(), whole.rank_) - ranks.begin())),
      world_size_(static_cast<int>(ranks.size())),
      host_(whole.host_),
      device_(whole.device_),
      exceptions_at_start_(std::uncaught_exceptions()),
      comm_(comm),
      ranks_(whole.watch_->keep(fmt::format("{}", fmt::join(ranks, ", ")))),
      watch_(whole.watch_) {
  watch_->watch_errors_of(comm_);
}

// The process group gathers, not NCCL: every rank must know whether its part is more than itself
// before a communicator is made of it.
std::unique_ptr<Communicator> NcclCommunicator::split(int part) {
  check(ranks_ == nullptr, "a part of a communicator, ranks {}, is to be split again", ranks_);
  std::vector<int> parts(size_of(world_size_));
  group_.all_gather(&part, sizeof part, parts.data());
  std::vector<int> ranks;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (parts[size_of(rank)] == part) {
      ranks.push_back(rank);
    }
  }
  watch_->enter("ncclCommSplit", {"parts of the ranks", -1});
  ncclComm_t comm = nullptr;
  const ncclResult_t status =
      ncclCommSplit(comm_, ranks.size() > 1 ? part : NCCL_SPLIT_NOCOLOR, rank_, &comm, nullptr);
  watch_->leave();
  check_nccl(status, "ncclCommSplit", comm_);
  if (ranks.size() == 1) {
    return std::make_unique<DeviceSelfCommunicator>();
  }
  return std::unique_ptr<Communicator>(new NcclCommunicator(*this, comm, ranks));
}

void NcclCommunicator::start(ProcessGroup& group) {
  const std::chrono::seconds limit = collective_time_limit();
  check_cuda(cudaGetDevice(&device_), "cudaGetDevice");
  PeerWatchOptions options;
  if (limit.count() == 0) {
    options.silence_limit = std::chrono::milliseconds(0);  // somebody debugs
  }
  watch_ = std::make_unique<NcclWatch>(
      device_, limit, [this](const std::string& what, int code) { end_run(what, code); });
  peers_ = std::make_unique<PeerWatch>(
      group, options,
      PeerWatchEvents{.on_failure =
                          [this](const std::string& message) {
                            print_and_exit(fmt::format("{}\nrank {} on {} {}. Ending the run",
                                                       message, rank_, host_, watch_->describe()),
                                           kLostRankExitCode, "");
                          },
                      .describe = [this] { return watch_->describe(); }});
  ncclUniqueId id{};
  run_together(group, [&] {
    if (rank_ == 0) {
      check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
    }
  });
  group.broadcast(&id, sizeof id, 0);
  watch_->enter("ncclCommInitRank", {"start of NCCL", -1});
  ncclComm_t comm = nullptr;  // comm_ is for what can be aborted
  const ncclResult_t status = ncclCommInitRank(&comm, world_size_, id, rank_);
  watch_->leave();
  check_nccl(status, "ncclCommInitRank", comm);
  comm_ = comm;
  watch_->watch_errors_of(comm_);
  check_delivery(*this);
}

NcclCommunicator::~NcclCommunicator() {
  const bool whole = ranks_ == nullptr;
  // In an exception the other ranks may never come to what is still under way here.
  if (std::uncaught_exceptions() > exceptions_at_start_) {
    if (whole) {
      watch_->stop();
    }
    watch_->forget(comm_);
    abort_in_time({comm_});
  } else {
    watch_->forget(comm_);
    watch_->enter("ncclCommDestroy", {"end of NCCL", -1}, ranks_);
    const ncclResult_t status = ncclCommDestroy(comm_);
    watch_->leave();
    if (status != ncclSuccess) {
      spdlog::warn("ncclCommDestroy failed: {}", ncclGetErrorString(status));
    }
    if (whole) {
      watch_->stop();
    }
  }
}

void NcclCommunicator::end_run(const std::string& what, int exit_code) {
  print_and_exit(fmt::format("rank {} on {} {}. Ending the run", rank_, host_, what), exit_code,
                 what);
}

// Comes back for nobody: the first thread that gets here ends the process, another one waits for
// that. The other ranks get the announcement, if there is one.
void NcclCommunicator::print_and_exit(const std::string& message, int exit_code,
                                      const std::string& announcement) {
  static std::atomic<bool> ending{false};
  if (ending.exchange(true)) {
    while (true) {
      pause();
    }
  }
  spdlog::error("{}", message);
  std::fflush(nullptr);
  if (peers_ && !announcement.empty()) {
    peers_->announce_failure(announcement);
  }
  abort_in_time(watch_->comms());
  std::_Exit(exit_code);
}

// Releases the kernels that wait for other ranks. ncclCommAbort may itself wait for what is lost,
// so it gets five seconds.
void NcclCommunicator::abort_in_time(const std::vector<ncclComm_t>& comms) {
  std::promise<void> aborted;
  std::future<void> done = aborted.get_future();
  std::thread([comms, aborted = std::move(aborted)]() mutable {
    for (const ncclComm_t comm : comms) {
      ncclCommAbort(comm);
    }
    aborted.set_value();
  }).detach();
  done.wait_for(std::chrono::seconds(5));
}

void NcclCommunicator::all_reduce_sum(TensorView x, Stream stream, CollectiveLabel label) {
  const bool narrow = x.dtype() == DType::kBFloat16;
  check(x.contiguous() && (narrow || x.dtype() == DType::kFloat32),
        "all_reduce_sum needs a contiguous tensor of F32 or BF16, not {}", dtype_name(x.dtype()));
  const Call call(*this, "all_reduce_sum", stream, label);
  if (x.num_elements() == 0) {
    return;
  }
  check_nccl(ncclAllReduce(x.raw(), x.raw(), size_of(x.num_elements()),
                           narrow ? ncclBfloat16 : ncclFloat32, ncclSum, comm_, call.stream()),
             "ncclAllReduce", comm_);
}

void NcclCommunicator::broadcast(TensorView x, int root, Stream stream, CollectiveLabel label) {
  check(x.contiguous(), "broadcast needs a contiguous tensor");
  const Call call(*this, "broadcast", stream, label);
  if (x.bytes() == 0) {
    return;
  }
  check_nccl(
      ncclBroadcast(x.raw(), x.raw(), size_of(x.bytes()), ncclUint8, root, comm_, call.stream()),
      "ncclBroadcast", comm_);
}

void NcclCommunicator::all_gather(ConstTensorView part, TensorView whole, Stream stream,
                                  CollectiveLabel label) {
  check(part.contiguous() && whole.contiguous() && whole.bytes() == part.bytes() * world_size_,
        "all_gather of {} bytes a rank into {} bytes", part.bytes(), whole.bytes());
  const Call call(*this, "all_gather", stream, label);
  if (part.bytes() == 0) {
    return;
  }
  check_nccl(ncclAllGather(part.raw(), whole.raw(), size_of(part.bytes()), ncclUint8, comm_,
                           call.stream()),
             "ncclAllGather", comm_);
}

// Every rank sends its rows to every other.
void NcclCommunicator::all_gather_rows(ConstTensorView part, TensorView whole,
                                       std::span<const std::int64_t> rows, Stream stream,
                                       CollectiveLabel label) {
  const std::int64_t width = row_bytes(whole);
  check(part.contiguous() && whole.contiguous() && row_bytes(part) == width,
        "all_gather_rows: rows of {} and {} bytes", row_bytes(part), width);
  check(
      static_cast<int>(rows.size()) == world_size_ && rows[size_of(rank_)] == part.size(0),
      "all_gather_rows: {} row counts for {} ranks, or another one for this rank than its {} rows",
      rows.size(), world_size_, part.size(0));
  std::int64_t total = 0;
  for (const std::int64_t count : rows) {
    total += count;
  }
  check(total == whole.size(0), "all_gather_rows: counts of {} rows for {}", total, whole.size(0));
  const Call call(*this, "all_gather_rows", stream, label);
  if (total * width == 0) {
    return;
  }
  Group group;
  auto* target = static_cast<std::byte*>(whole.raw());
  std::byte* own_block = nullptr;
  for (int peer = 0; peer < world_size_; ++peer) {
    const std::int64_t bytes = rows[size_of(peer)] * width;
    if (peer == rank_) {
      own_block = target;
    } else {
      if (part.bytes() > 0) {
        check_nccl(
            ncclSend(part.raw(), size_of(part.bytes()), ncclUint8, peer, comm_, call.stream()),
            "ncclSend", comm_);
      }
      if (bytes > 0) {
        check_nccl(ncclRecv(target, size_of(bytes), ncclUint8, peer, comm_, call.stream()),
                   "ncclRecv", comm_);
      }
    }
    target += bytes;
  }
  group.finish();
  copy_on_device(own_block, part.raw(), part.bytes(), call.stream());
}

// Each rank's rows are reduced to it; together they start as one.
void NcclCommunicator::reduce_scatter_rows(ConstTensorView whole, TensorView own,
                                           std::span<const std::int64_t> rows, Stream stream,
                                           CollectiveLabel label) {
  const std::int64_t width = row_bytes(whole);
  const bool narrow = whole.dtype() == DType::kBFloat16;
  check(whole.contiguous() && own.contiguous() && row_bytes(own) == width &&
            whole.dtype() == own.dtype() && (narrow || whole.dtype() == DType::kFloat32),
        "reduce_scatter_rows: rows of {} and {} bytes, {} and {}", width, row_bytes(own),
        dtype_name(whole.dtype()), dtype_name(own.dtype()));
  std::int64_t total = 0;
  for (const std::int64_t count : rows) {
    total += count;
  }
  check(static_cast<int>(rows.size()) == world_size_ && rows[size_of(rank_)] == own.size(0) &&
            total == whole.size(0),
        "reduce_scatter_rows: {} counts of {} rows for {} ranks and {} rows", rows.size(), total,
        world_size_, whole.size(0));
  const Call call(*this, "reduce_scatter_rows", stream, label);
  if (total * width == 0) {
    return;
  }
  Group group;
  const auto* source = static_cast<const std::byte*>(whole.raw());
  const std::int64_t row_elements = width / dtype_bytes(whole.dtype());
  for (int root = 0; root < world_size_; ++root) {
    const std::int64_t count = rows[size_of(root)] * row_elements;
    if (count > 0) {
      check_nccl(ncclReduce(source, own.raw(), size_of(count), narrow ? ncclBfloat16 : ncclFloat32,
                            ncclSum, root, comm_, call.stream()),
                 "ncclReduce", comm_);
    }
    source += count * dtype_bytes(whole.dtype());
  }
  group.finish();
}

void NcclCommunicator::all_to_all(ConstTensorView sent, TensorView received,
                                  const RowCounts& counts, Stream stream, CollectiveLabel label) {
  const std::int64_t width = row_bytes(sent);
  check(sent.contiguous() && received.contiguous() && row_bytes(received) == width,
        "all_to_all: rows of {} and {} bytes", width, row_bytes(received));
  check(static_cast<int>(counts.rows_to.size()) == world_size_ &&
            static_cast<int>(counts.rows_from.size()) == world_size_ &&
            counts.rows_to[size_of(rank_)] == counts.rows_from[size_of(rank_)],
        "all_to_all: {} and {} row counts for {} ranks, or different ones for this rank itself",
        counts.rows_to.size(), counts.rows_from.size(), world_size_);
  std::int64_t rows_sent = 0;
  std::int64_t rows_received = 0;
  for (std::size_t peer = 0; peer < counts.rows_to.size(); ++peer) {
    rows_sent += counts.rows_to[peer];
    rows_received += counts.rows_from[peer];
  }
  check(rows_sent <= sent.size(0) && rows_received <= received.size(0),
        "all_to_all: counts are beyond the tensors");
  const Call call(*this, "all_to_all", stream, label);
  if ((rows_sent + rows_received) * width == 0) {
    return;
  }
  Group group;
  const auto* source = static_cast<const std::byte*>(sent.raw());
  auto* target = static_cast<std::byte*>(received.raw());
  const std::byte* own_source = nullptr;
  std::byte* own_target = nullptr;
  std::int64_t own_bytes = 0;
  for (int peer = 0; peer < world_size_; ++peer) {
    const std::int64_t bytes_to = counts.rows_to[size_of(peer)] * width;
    const std::int64_t bytes_from = counts.rows_from[size_of(peer)] * width;
    if (peer == rank_) {
      own_source = source;
      own_target = target;
      own_bytes = bytes_to;
    } else {
      if (bytes_to > 0) {
        check_nccl(ncclSend(source, size_of(bytes_to), ncclUint8, peer, comm_, call.stream()),
                   "ncclSend", comm_);
      }
      if (bytes_from > 0) {
        check_nccl(ncclRecv(target, size_of(bytes_from), ncclUint8, peer, comm_, call.stream()),
                   "ncclRecv", comm_);
      }
    }
    source += bytes_to;
    target += bytes_from;
  }
  group.finish();
  copy_on_device(own_target, own_source, own_bytes, call.stream());
}

void NcclCommunicator::replayed(Stream stream, CollectiveLabel label) {
  const Call call(*this, "replay of a graph", stream, label);
}

}  // namespace kdtree
