#include "ranks.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "comm/mpi/mpi_process_group.h"

namespace kdtree {

std::unique_ptr<ProcessGroup> start_process_group(int* argc, char*** argv, bool single) {
  if (launched_as_mpi_job()) {
    return make_mpi_process_group(argc, argv, single);
  }
  if (!single) {
    require_no_lost_ranks();
  }
  return make_self_process_group();
}

bool speaks_before_mpi() {
  for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    if (const char* rank = std::getenv(variable); rank != nullptr) {
      return std::string(rank) == "0";
    }
  }
  return true;
}

namespace {

int cores_per_rank(ProcessGroup& group) {
  // What ranks compare: host and allowed cores. A rank that cannot tell has none and shares none.
  struct Place {
    std::array<char, 64> host;
    cpu_set_t cores;
  };
  Place own{};
  const std::string host = group.host_name();
  std::copy_n(host.begin(), std::min(host.size(), own.host.size() - 1), own.host.begin());
  if (sched_getaffinity(0, sizeof own.cores, &own.cores) != 0) {
    CPU_ZERO(&own.cores);
  }
  std::vector<Place> places(static_cast<std::size_t>(group.world_size()));
  group.all_gather(&own, sizeof own, places.data());
  const auto sharing = std::count_if(places.begin(), places.end(), [&](const Place& place) {
    cpu_set_t common;
    CPU_AND(&common, &place.cores, &own.cores);
    return place.host == own.host && CPU_COUNT(&common) > 0;
  });
  return std::max(1, CPU_COUNT(&own.cores) / std::max(1, static_cast<int>(sharing)));
}

}  // namespace

int default_num_threads(ProcessGroup& group) {
  const int cores = cores_per_rank(group);
  const char* wish = std::getenv("OMP_NUM_THREADS");
  const int num_threads = wish == nullptr ? 0 : std::atoi(wish);
  return num_threads > 0 ? num_threads : cores;
}

}  // namespace kdtree
