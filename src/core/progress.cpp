#include "core/progress.h"

#include <algorithm>
#include <utility>

#include "core/log.h"

namespace kdtree {

namespace {
constexpr double kGigabyte = 1e9;
constexpr std::int64_t kReportIntervalMs = 2000;
}  // namespace

Progress::Progress(std::string label, std::int64_t total_bytes)
    : label_(std::move(label)),
      total_bytes_(total_bytes),
      start_(std::chrono::steady_clock::now()) {}

double Progress::seconds() const {
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
  return std::max(elapsed.count(), 1e-9);
}

void Progress::add(std::int64_t bytes) {
  const std::int64_t done = done_bytes_.fetch_add(bytes) + bytes;
  const double elapsed = seconds();
  const auto now_ms = static_cast<std::int64_t>(elapsed * 1000);
  std::int64_t due = next_report_ms_.load();
  if (now_ms < due || !next_report_ms_.compare_exchange_strong(due, now_ms + kReportIntervalMs)) {
    return;
  }
  const double rate = static_cast<double>(done) / elapsed;
  const double left = static_cast<double>(std::max<std::int64_t>(total_bytes_ - done, 0)) / rate;
  spdlog::info("{}: {:.1f} of {:.1f} GB, {:.2f} GB/s, {:.0f} s left", label_,
               static_cast<double>(done) / kGigabyte, static_cast<double>(total_bytes_) / kGigabyte,
               rate / kGigabyte, left);
}

void Progress::finish() {
  const double elapsed = seconds();
  const auto done = static_cast<double>(done_bytes_.load());
  spdlog::info("{}: {:.4f} GB in {:.2f} s, {:.2f} GB/s", label_, done / kGigabyte, elapsed,
               done / elapsed / kGigabyte);
}

}  // namespace kdtree
