#include "weights/upload_queue.h"

#include <thread>
#include <utility>

#include "core/check.h"

namespace kdtree {

UploadQueue::UploadQueue(Backend& backend, int num_slots, std::int64_t slot_bytes) {
  for (int index = 0; index < num_slots; ++index) {
    auto slot = std::make_unique<UploadSlot>();
    slot->memory = backend.allocate_host(slot_bytes);
    free_.push_back(std::move(slot));
  }
}

std::int64_t UploadQueue::slot_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& slot : free_) {
    bytes += slot->memory.bytes();
  }
  return bytes;
}

std::unique_ptr<UploadSlot> UploadQueue::acquire(std::int64_t bytes) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return stopped_ || !free_.empty(); });
  if (stopped_) {
    return nullptr;
  }
  std::unique_ptr<UploadSlot> slot = std::move(free_.front());
  free_.pop_front();
  check(bytes <= slot->memory.bytes(), "a piece of {} bytes in a slot of {}", bytes,
        slot->memory.bytes());
  slot->bytes = bytes;
  return slot;
}

void UploadQueue::submit(std::unique_ptr<UploadSlot> slot) {
  const std::lock_guard lock(mutex_);
  ready_.push_back(std::move(slot));
  changed_.notify_all();
}

bool UploadQueue::failed() {
  const std::lock_guard lock(mutex_);
  return stopped_;
}

void UploadQueue::stop(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  if (error_ == nullptr) {
    error_ = std::move(error);
  }
  changed_.notify_all();
}

void UploadQueue::upload_all(Backend& backend, const std::function<void(std::int64_t)>& uploaded) {
  while (true) {
    std::deque<std::unique_ptr<UploadSlot>> pieces;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopped_ || !ready_.empty() || num_active_ == 0; });
      if (stopped_ || ready_.empty()) {
        return;
      }
      pieces.swap(ready_);
    }
    std::int64_t bytes = 0;
    for (const auto& piece : pieces) {
      backend.upload(piece->device, piece->memory.data(), piece->bytes);
      bytes += piece->bytes;
    }
    // The memory may only be filled again once the device has it.
    backend.synchronize();
    uploaded(bytes);
    const std::lock_guard lock(mutex_);
    for (auto& piece : pieces) {
      free_.push_back(std::move(piece));
    }
    changed_.notify_all();
  }
}

void UploadQueue::run(int num_threads, const std::function<void()>& work, Backend& backend,
                      const std::function<void(std::int64_t)>& uploaded) {
  num_active_ = num_threads;
  std::vector<std::jthread> threads;
  try {
    for (int thread = 0; thread < num_threads; ++thread) {
      threads.emplace_back([this, &work] {
        try {
          work();
        } catch (...) {
          stop(std::current_exception());
        }
        const std::lock_guard lock(mutex_);
        --num_active_;
        changed_.notify_all();
      });
    }
    upload_all(backend, uploaded);
  } catch (...) {
    stop(std::current_exception());
  }
  threads.clear();  // joins
  if (error_ != nullptr) {
    std::rethrow_exception(error_);
  }
}

}  // namespace kdtree
