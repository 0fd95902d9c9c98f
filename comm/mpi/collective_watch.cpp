#include "comm/mpi/collective_watch.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "core/log.h"

namespace kdtree {

namespace {
constexpr std::chrono::seconds kDefaultLimit{300};
constexpr int kTimeoutExitCode = 124;
}  // namespace

std::chrono::seconds collective_time_limit() {
  const char* value = std::getenv("KDTREE_COLLECTIVE_TIMEOUT_S");
  if (value == nullptr) {
    return kDefaultLimit;
  }
  const std::string_view text = value;
  std::int64_t seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  require_input(
      error == std::errc() && end == text.data() + text.size() && seconds >= 0,
      "KDTREE_COLLECTIVE_TIMEOUT_S={}: expected a whole number of seconds, 0 for no limit", value);
  return std::chrono::seconds(seconds);
}

CollectiveWatch::CollectiveWatch(int rank, int world_size, std::chrono::seconds limit)
    : rank_(rank), world_size_(world_size), limit_(limit) {
  if (limit_.count() > 0) {
    thread_ = std::thread([this] { watch(); });
  }
}

CollectiveWatch::~CollectiveWatch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void CollectiveWatch::enter(const char* call, CollectiveLabel label, std::string_view ranks) {
  const std::lock_guard lock(mutex_);
  inside_ = true;
  call_ = call;
  label_ = label;
  ranks_ = ranks;
  ++sequence_number_;
  entered_ = std::chrono::steady_clock::now();
}

void CollectiveWatch::leave() {
  const std::lock_guard lock(mutex_);
  inside_ = false;
}

void CollectiveWatch::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    stopped_.wait_for(lock, std::chrono::milliseconds(200));
    if (inside_ && std::chrono::steady_clock::now() - entered_ > limit_) {
      spdlog::error(
          "rank {} of {} waits since {} s in {} number {}{}{} ({}, layer {}): another rank has not "
          "come. Ending the run "
          "(KDTREE_COLLECTIVE_TIMEOUT_S sets the limit)",
          rank_, world_size_, limit_.count(), call_, sequence_number_,
          ranks_.empty() ? "" : " of ranks ", ranks_, label_.what, label_.layer);
      std::fflush(nullptr);
      // Not MPI_Abort: MPI runs funneled, and this is not its thread. The launcher ends the other
      // ranks.
      std::_Exit(kTimeoutExitCode);
    }
  }
}

}  // namespace kdtree
