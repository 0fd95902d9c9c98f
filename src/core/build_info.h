#pragma once

#include <string>

namespace kdtree {

// What this program was built from and with; every log and every machine-readable result carries
// it. Versions are those of the headers compiled against, "none" where a part is not in the build.
struct BuildInfo {
  std::string version;  // of the project, "0.1.0"
  // short git hash, "-dirty" after it if tracked files differ; "unknown" outside git
  std::string commit;
  std::string compiler;    // "GNU 12.2.0"
  std::string build_type;  // "Release"
  std::string cuda;
  std::string nccl;
  std::string mpi;
};

const BuildInfo& build_info();

}  // namespace kdtree
