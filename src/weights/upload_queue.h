// Passes pieces of host memory from reading threads to the one thread that talks to the device.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/backend.h"

namespace kdtree {

// A piece on its way: the first `bytes` of `memory` for `device`.
struct UploadSlot {
  Buffer memory;
  void* device = nullptr;
  std::int64_t bytes = 0;
};

class UploadQueue {
 public:
  // At most `num_slots` pieces of at most slot_bytes bytes exist at a time. Their memory is the
  // backend's own host memory, which a GPU copies from without a stage between; it lives as long as
  // the queue.
  UploadQueue(Backend& backend, int num_slots, std::int64_t slot_bytes);

  // For the reading threads. Waits for a free slot, for a piece of `bytes` bytes; nullptr once
  // another thread has failed.
  std::unique_ptr<UploadSlot> acquire(std::int64_t bytes);
  void submit(std::unique_ptr<UploadSlot> slot);
  bool failed();
  // Host memory of all slots together, in bytes; once run() has returned.
  std::int64_t slot_bytes() const;

  // Runs `work` on num_threads threads of its own and, meanwhile, uploads on this one what they
  // submit; `uploaded` is told the bytes. The first exception of any thread is thrown here, after
  // all threads have ended.
  void run(int num_threads, const std::function<void()>& work, Backend& backend,
           const std::function<void(std::int64_t)>& uploaded);

 private:
  void stop(std::exception_ptr error);
  void upload_all(Backend& backend, const std::function<void(std::int64_t)>& uploaded);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<UploadSlot>> free_;
  std::deque<std::unique_ptr<UploadSlot>> ready_;
  int num_active_ = 0;
  bool stopped_ = false;
  std::exception_ptr error_;
};

}  // namespace kdtree
