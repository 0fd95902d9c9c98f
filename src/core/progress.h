// Progress of a long transfer of bytes: a line every few seconds with the share done, GB/s and the
// time left.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

namespace kdtree {

class Progress {
 public:
  // `label` says what is transferred ("loading model"); total_bytes may be 0.
  Progress(std::string label, std::int64_t total_bytes);

  // Counts bytes as done. Safe from several threads; logs at most one line each two seconds.
  void add(std::int64_t bytes);
  // Logs the closing line: bytes (decimal GB), seconds, GB/s.
  void finish();

 private:
  double seconds() const;

  std::string label_;
  std::int64_t total_bytes_;
  std::chrono::steady_clock::time_point start_;
  std::atomic<std::int64_t> done_bytes_{0};
  std::atomic<std::int64_t> next_report_ms_{2000};
};

}  // namespace kdtree
