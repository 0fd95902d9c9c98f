#include "comm/nccl/nccl_watch.h"

#include <utility>

#include "comm/staged/cuda_call.h"

namespace kdtree {

namespace {
constexpr int kTimeoutExitCode = 124;  // as comm/mpi/collective_watch
constexpr int kErrorExitCode = 1;
// NCCL's own error says that "a remote process" has gone; comm/peer_watch says which. It goes
// first.
constexpr std::chrono::seconds kPatience{3};
}  // namespace

NcclWatch::NcclWatch(int device, std::chrono::seconds limit, OnFailure on_failure)
    : device_(device), limit_(limit), on_failure_(std::move(on_failure)) {
  for (Pending& pending : pending_) {
    check_cuda(cudaEventCreateWithFlags(&pending.event, cudaEventDisableTiming),
               "cudaEventCreateWithFlags");
  }
  thread_ = std::thread([this] { watch(); });
}

NcclWatch::~NcclWatch() {
  stop();
  for (const Pending& pending : pending_) {
    cudaEventDestroy(pending.event);
  }
}

void NcclWatch::stop() {
  {
    const std::lock_guard lock(host_mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void NcclWatch::watch_errors_of(ncclComm_t comm) {
  const std::lock_guard lock(comm_mutex_);
  comms_.push_back(comm);
}

void NcclWatch::forget(ncclComm_t comm) {
  const std::lock_guard lock(comm_mutex_);
  std::erase(comms_, comm);
}

std::vector<ncclComm_t> NcclWatch::comms() {
  const std::lock_guard lock(comm_mutex_);
  return comms_;
}

const char* NcclWatch::keep(std::string text) {
  const std::lock_guard lock(comm_mutex_);
  return texts_.emplace_back(std::move(text)).c_str();
}

void NcclWatch::enter(const char* call, CollectiveLabel label, const char* ranks) {
  const std::lock_guard lock(host_mutex_);
  inside_ = true;
  latest_ = {call, label, ranks, latest_.number + 1};
  entered_ = Clock::now();
}

void NcclWatch::leave() {
  const std::lock_guard lock(host_mutex_);
  inside_ = false;
}

void NcclWatch::leave(cudaStream_t stream) {
  Collective collective;
  {
    const std::lock_guard lock(host_mutex_);
    inside_ = false;
    collective = latest_;
  }
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (limit_.count() == 0 || cudaStreamIsCapturing(stream, &capture) != cudaSuccess ||
      capture != cudaStreamCaptureStatusNone) {
    return;
  }
  const std::lock_guard lock(pending_mutex_);
  const auto room = static_cast<std::int64_t>(pending_.size());
  if (end_pending_ - first_pending_ == room) {
    drop_finished();
  }
  if (end_pending_ - first_pending_ == room) {
    return;
  }
  Pending& next = pending_[static_cast<std::size_t>(end_pending_ % room)];
  if (cudaEventRecord(next.event, stream) == cudaSuccess) {
    next.collective = collective;
    ++end_pending_;
  }
}

std::string NcclWatch::describe() {
  const std::lock_guard lock(host_mutex_);
  return latest_.call == nullptr ? "no collective yet" : "last came to " + text_of(latest_);
}

std::string NcclWatch::text_of(const Collective& collective) {
  const bool part = collective.ranks != nullptr;
  const std::string name = fmt::format("{} number {}{}{}", collective.call, collective.number,
                                       part ? " of ranks " : "", part ? collective.ranks : "");
  return collective.label.layer < 0 ? fmt::format("{} ({})", name, collective.label.what)
                                    : fmt::format("{} ({}, layer {})", name, collective.label.what,
                                                  collective.label.layer);
}

void NcclWatch::watch() {
  cudaSetDevice(device_);
  // An event query is among the calls that would spoil a capture of another thread.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  while (true) {
    {
      std::unique_lock lock(host_mutex_);
      if (stopped_.wait_for(lock, std::chrono::milliseconds(200), [this] { return stop_; })) {
        return;
      }
    }
    check_host();
    check_errors();
    check_device();
  }
}

void NcclWatch::check_host() {
  Collective late;
  {
    const std::lock_guard lock(host_mutex_);
    if (limit_.count() > 0 && inside_ && Clock::now() - entered_ > limit_) {
      late = latest_;
    }
  }
  if (late.call != nullptr) {
    fail_late(late, "on the host");
  }
}

void NcclWatch::check_errors() {
  std::string text;
  {
    const std::lock_guard lock(comm_mutex_);
    for (const ncclComm_t comm : comms_) {
      ncclResult_t error = ncclSuccess;
      if (ncclCommGetAsyncError(comm, &error) == ncclSuccess && error != ncclSuccess &&
          error != ncclInProgress) {
        text = fmt::format("gets an error from NCCL: {} ({})", ncclGetErrorString(error),
                           ncclGetLastError(comm));
        break;
      }
    }
  }
  if (text.empty()) {
    return;
  }
  if (!error_seen_) {
    error_seen_ = true;
    error_since_ = Clock::now();
  }
  if (Clock::now() - error_since_ >= kPatience) {
    on_failure_(fmt::format("{}; it {}", text, describe()), kErrorExitCode);
  }
}

// The device works through a stream in order, so the oldest unfinished collective is the one that
// waits for another rank, or that waits for work in front of it.
void NcclWatch::check_device() {
  Collective oldest;
  {
    const std::lock_guard lock(pending_mutex_);
    drop_finished();
    if (first_pending_ < end_pending_) {
      oldest = pending_[static_cast<std::size_t>(first_pending_) % pending_.size()].collective;
    }
  }
  if (oldest.call == nullptr || oldest.number != oldest_number_) {
    oldest_number_ = oldest.number;
    oldest_since_ = Clock::now();
  } else if (Clock::now() - oldest_since_ > limit_) {
    fail_late(oldest, "on its GPU");
  }
}

void NcclWatch::fail_late(const Collective& collective, const char* where) {
  on_failure_(
      fmt::format("waits {} since {} s in {}; it {}: another rank has not come, or its GPUs "
                  "cannot reach each other (KDTREE_COLLECTIVE_TIMEOUT_S sets the limit)",
                  where, limit_.count(), text_of(collective), describe()),
      kTimeoutExitCode);
}

// An event that fails counts as finished: the program's own calls meet the same error, and say
// more.
void NcclWatch::drop_finished() {
  while (
      first_pending_ < end_pending_ &&
      cudaEventQuery(pending_[static_cast<std::size_t>(first_pending_) % pending_.size()].event) !=
          cudaErrorNotReady) {
    ++first_pending_;
  }
}

}  // namespace kdtree
