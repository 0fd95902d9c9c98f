#include "weights/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/check.h"

namespace kdtree {

namespace {

// One read or write call moves at most some 2 GB on Linux; smaller pieces are as quick.
constexpr std::int64_t kMaxCallBytes = std::int64_t{1} << 30;
constexpr int kFileMode = 0644;

}  // namespace

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  // Without O_NONBLOCK a pipe would wait for its writer; it changes nothing for regular files.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  require_input(descriptor_ >= 0, "{}: {}", path_, std::strerror(errno));
  struct stat status {};
  const bool regular = ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode);
  if (!regular) {
    ::close(descriptor_);
    fail_input("{}: not a regular file", path_);
  }
  size_ = status.st_size;
}

InputFile::~InputFile() {
  ::close(descriptor_);
}

void InputFile::read(std::int64_t offset, std::int64_t bytes, void* target) const {
  auto* place = static_cast<char*>(target);
  while (bytes > 0) {
    const auto count = static_cast<std::size_t>(std::min(bytes, kMaxCallBytes));
    const ssize_t done = ::pread(descriptor_, place, count, offset);
    if (done < 0 && errno == EINTR) {
      continue;
    }
    require_input(done >= 0, "{}: reading at byte {}: {}", path_, offset, std::strerror(errno));
    require_input(done > 0, "{}: ends at byte {}, {} more bytes expected", path_, offset, bytes);
    place += done;
    offset += done;
    bytes -= done;
  }
}

// Of both advices no error matters: the reads that follow meet it again.
void InputFile::expect_sequential_reads() const {
  ::posix_fadvise(descriptor_, 0, 0, POSIX_FADV_SEQUENTIAL);
}

void InputFile::will_need(std::int64_t offset, std::int64_t bytes) const {
  ::posix_fadvise(descriptor_, offset, bytes, POSIX_FADV_WILLNEED);
}

OutputFile::OutputFile(std::string path) : path_(std::move(path)) {
  descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, kFileMode);
  check(descriptor_ >= 0, "{}: {}", path_, std::strerror(errno));
}

OutputFile::~OutputFile() {
  ::close(descriptor_);
}

std::int64_t OutputFile::size() const {
  struct stat status {};
  check(::fstat(descriptor_, &status) == 0, "{}: {}", path_, std::strerror(errno));
  return status.st_size;
}

void OutputFile::write(std::int64_t offset, const void* data, std::int64_t bytes) {
  const auto* place = static_cast<const char*>(data);
  while (bytes > 0) {
    const auto count = static_cast<std::size_t>(std::min(bytes, kMaxCallBytes));
    const ssize_t done = ::pwrite(descriptor_, place, count, offset);
    if (done < 0 && errno == EINTR) {
      continue;
    }
    check(done > 0, "{}: writing at byte {}: {}", path_, offset, std::strerror(errno));
    place += done;
    offset += done;
    bytes -= done;
  }
}

void OutputFile::resize(std::int64_t bytes) {
  check(::ftruncate(descriptor_, bytes) == 0, "{}: {}", path_, std::strerror(errno));
}

void OutputFile::sync() {
  check(::fsync(descriptor_) == 0, "{}: {}", path_, std::strerror(errno));
}

bool OutputFile::lock() {
  return ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0;
}

}  // namespace kdtree
