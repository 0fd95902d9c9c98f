// Notices that a rank is gone. A thread of each rank holds a TCP connection to rank 0 (rank 0 to
// all) and sends a sign of life; a connection that closes without a goodbye, or falls silent, is a
// lost rank, and rank 0 tells the others which. Needs no MPI beside its construction.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "comm/process_group.h"

namespace kdtree {

struct PeerWatchOptions {
  std::chrono::milliseconds heartbeat{1000};
  // Silence that means a lost rank (a host that is down, a stopped process); 0: silence means
  // nothing. Time in which this process itself did not run is not counted.
  std::chrono::milliseconds silence_limit{20000};
  // For each address of rank 0 that is tried.
  std::chrono::milliseconds connect_limit{5000};
};

struct PeerWatchEvents {
  // Called once, on the watching thread, with what happened and to which rank. May end the process;
  // if it returns, the watch is over.
  std::function<void(const std::string& message)> on_failure;
  // What this rank is doing (at most 239 bytes), called on the watching thread once a heartbeat. On
  // a failure rank 0's message lists the latest of every rank. May be empty.
  std::function<std::string()> describe;
};

class PeerWatch {
 public:
  // Collective. Where a rank cannot reach rank 0 a warning says so, and nobody watches that one.
  PeerWatch(ProcessGroup& group, const PeerWatchOptions& options, PeerWatchEvents events);
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;
  // Says goodbye: from here on this rank may end without being missed.
  ~PeerWatch();

  // Tells the other ranks that this one fails, and why; their on_failure gets it. Returns when it
  // is on its way, at the latest after a second. From any thread.
  void announce_failure(const std::string& text);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kdtree
