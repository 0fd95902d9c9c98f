// Watches the collectives of an NCCL communicator and of its parts: those that the host is in,
// those that the device has not finished, and the errors that NCCL reports behind a call.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"

namespace kdtree {

class NcclWatch {
 public:
  // Called on the watching thread, with what continues "rank 1 ..."; it ends the process.
  using OnFailure = std::function<void(const std::string& message, int exit_code)>;

  // For collectives on CUDA device `device`; a limit of 0 is none.
  NcclWatch(int device, std::chrono::seconds limit, OnFailure on_failure);
  NcclWatch(const NcclWatch&) = delete;
  NcclWatch& operator=(const NcclWatch&) = delete;
  ~NcclWatch();

  // Asks for this one's errors, too, until it is told to forget it. The watch frees none.
  void watch_errors_of(ncclComm_t comm);
  void forget(ncclComm_t comm);
  // Those whose errors it asks for.
  std::vector<ncclComm_t> comms();
  // The text for as long as the watch is there, for `ranks` of enter().
  const char* keep(std::string text);
  // Ends the watching; enter, leave and describe may still be called.
  void stop();

  // The host is in a collective, until it leaves. `ranks` names a part's ranks; nullptr: all.
  void enter(const char* call, CollectiveLabel label, const char* ranks = nullptr);
  // It has left, and nothing is under way behind it.
  void leave();
  // It has left the collective's work on the stream. That is not watched any further where the
  // stream is being captured, or while 256 others are unfinished. Allocates nothing, throws
  // nothing.
  void leave(cudaStream_t stream);

  // The latest collective, "all_reduce_sum number 12 (moe, layer 3)". Makes no CUDA calls. From any
  // thread.
  std::string describe();

 private:
  using Clock = std::chrono::steady_clock;

  struct Collective {
    const char* call = nullptr;  // nullptr: none yet
    CollectiveLabel label;
    const char* ranks = nullptr;
    std::int64_t number = 0;
  };
  // A collective that the device may not have finished: its event comes behind it on its stream.
  struct Pending {
    cudaEvent_t event = nullptr;
    Collective collective;
  };

  static std::string text_of(const Collective& collective);
  void watch();
  void check_host();
  void check_device();
  void check_errors();
  void fail_late(const Collective& collective, const char* where);
  void drop_finished();

  int device_;
  std::chrono::seconds limit_;
  OnFailure on_failure_;

  std::mutex host_mutex_;  // the next four; never held over a CUDA call
  Collective latest_;
  bool inside_ = false;
  Clock::time_point entered_;
  bool stop_ = false;
  std::condition_variable stopped_;

  std::mutex pending_mutex_;  // the next three
  std::array<Pending, 256> pending_;
  std::int64_t first_pending_ = 0;  // pending_[i % 256] is in use for i in [first, end)
  std::int64_t end_pending_ = 0;

  std::mutex comm_mutex_;  // the next two
  std::vector<ncclComm_t> comms_;
  std::deque<std::string> texts_;

  // Of the watching thread.
  std::int64_t oldest_number_ = 0;  // of the oldest unfinished collective, since when it is that
  Clock::time_point oldest_since_;
  Clock::time_point error_since_;
  bool error_seen_ = false;
  std::thread thread_;
};

}  // namespace kdtree
