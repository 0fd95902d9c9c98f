// Owned memory of a device, and the stream that work on it is ordered by.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

namespace kdtree {

// The order of work on a device: ops and collectives given the same stream run one after the other.
// `handle` is the backend's own (a cudaStream_t); the CPU backend finishes each call before it
// returns and needs none.
struct Stream {
  void* handle = nullptr;
};

// Move-only ownership of a block of memory, host or device; whoever allocates gives the way to
// release it.
class Buffer {
 public:
  using Release = std::function<void(void*)>;

  Buffer() = default;
  Buffer(void* data, std::int64_t bytes, Release release)
      : data_(data), bytes_(bytes), release_(std::move(release)) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer taken(std::move(other));
    swap(taken);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (data_ != nullptr && release_) {
      release_(data_);
    }
  }

  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(release_, other.release_);
  }

  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
  Release release_;
};

}  // namespace kdtree
