// Watches the collective that this rank is in: one that does not finish in time is printed (who
// waits for what) and ends the run. A communicator and its parts share one: a rank is in one
// collective at a time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <thread>

#include "comm/communicator.h"

namespace kdtree {

class CollectiveWatch {
 public:
  // A limit of 0 watches nothing.
  CollectiveWatch(int rank, int world_size, std::chrono::seconds limit);
  CollectiveWatch(const CollectiveWatch&) = delete;
  CollectiveWatch& operator=(const CollectiveWatch&) = delete;
  ~CollectiveWatch();

  // Marks a collective from construction to destruction.
  class Scope {
   public:
    // `ranks` names a part's ranks, and outlives the scope; empty: all of them.
    Scope(CollectiveWatch& watch, const char* call, CollectiveLabel label, std::string_view ranks)
        : watch_(watch) {
      watch_.enter(call, label, ranks);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() { watch_.leave(); }

   private:
    CollectiveWatch& watch_;
  };

 private:
  void enter(const char* call, CollectiveLabel label, std::string_view ranks);
  void leave();
  void watch();

  int rank_;
  int world_size_;
  std::chrono::seconds limit_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  bool inside_ = false;
  const char* call_ = "";
  CollectiveLabel label_;
  std::string_view ranks_;
  std::int64_t sequence_number_ = 0;
  std::chrono::steady_clock::time_point entered_;
  std::thread thread_;
};

// The limit of environment variable KDTREE_COLLECTIVE_TIMEOUT_S (seconds, 0 = none); 300 s without
// it. InputError if it is no whole number.
std::chrono::seconds collective_time_limit();

}  // namespace kdtree
