// Writes down which CUDA runtime calls a program makes, in order, for tests of what a step does on
// the host: preloaded (LD_PRELOAD) into a program that uses the shared runtime library.
// KDTREE_API_TRACE names the file; each process appends its id. A line a call.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

// Never closed: calls may come until the process is gone.
std::FILE* trace() {
  static std::FILE* const file = [] {
    const char* path = std::getenv("KDTREE_API_TRACE");
    return path == nullptr
               ? nullptr
               : std::fopen((std::string(path) + "." + std::to_string(::getpid())).c_str(), "w");
  }();
  return file;
}

void note(const char* name) {
  if (std::FILE* file = trace()) {
    std::fprintf(file, "%s\n", name);
    std::fflush(file);
  }
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// The runtime's functions as the linker sees them: arguments in registers, at most six of them, and
// the result in one. An argument that a function does not have is not looked at.
#define KDTREE_TRACE(name)                                                                       \
  extern "C" int name(void* a, void* b, void* c, void* d, void* e, void* f) {                    \
    static const auto original = next<int (*)(void*, void*, void*, void*, void*, void*)>(#name); \
    note(#name);                                                                                 \
    return original(a, b, c, d, e, f);                                                           \
  }

KDTREE_TRACE(cudaGraphLaunch)
KDTREE_TRACE(cudaGraphInstantiate)
KDTREE_TRACE(cudaStreamBeginCapture)
KDTREE_TRACE(cudaStreamSynchronize)
KDTREE_TRACE(cudaDeviceSynchronize)
KDTREE_TRACE(cudaEventSynchronize)
KDTREE_TRACE(cudaEventRecord)
KDTREE_TRACE(cudaMalloc)
KDTREE_TRACE(cudaFree)
KDTREE_TRACE(cudaMallocHost)
KDTREE_TRACE(cudaFreeHost)
KDTREE_TRACE(cudaMallocAsync)
KDTREE_TRACE(cudaFreeAsync)
KDTREE_TRACE(cudaMemcpy)
KDTREE_TRACE(cudaMemcpyAsync)
KDTREE_TRACE(cudaMemsetAsync)
