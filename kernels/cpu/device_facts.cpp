// What the host's processor is, as Linux says it.
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>

#include "kernels/cpu/cpu_backend.h"

namespace kdtree {
namespace {

// "model name : ..." of the first core; other architectures than x86 may not have it.
std::string cpu_model() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line;
  while (std::getline(cpuinfo, line)) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

// The size of the largest cache that core 0 reads through; 0 where the system does not say.
std::int64_t last_level_cache_bytes() {
  std::int64_t largest = 0;
  for (const int level : {_SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE, _SC_LEVEL4_CACHE_SIZE}) {
    largest = std::max<std::int64_t>(largest, sysconf(level));
  }
  return largest;
}

std::string machine() {
  utsname names{};
  return uname(&names) == 0 ? names.machine : "unknown";
}

}  // namespace

DeviceFacts CpuBackend::device_facts() const {
  return {.name = cpu_model(),
          .architecture = machine(),
          .uuid = "",
          .driver_cuda = "",
          .num_processors = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)),
          .memory_bytes = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE),
          .cache_bytes = last_level_cache_bytes()};
}

}  // namespace kdtree
