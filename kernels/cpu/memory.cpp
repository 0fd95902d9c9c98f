#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <string_view>

#include "core/check.h"
#include "kernels/cpu/cpu_backend.h"

namespace kdtree {
namespace {

constexpr std::int64_t kAlignment = 256;

void copy_bytes(void* to, const void* from, std::int64_t bytes) {
  check(bytes >= 0, "copy of {} bytes", bytes);
  if (bytes > 0) {  // an empty tensor may have no address
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

}  // namespace

CpuBackend::CpuBackend(int num_threads) : num_threads_(num_threads) {
  require_input(num_threads >= 1, "the CPU backend needs at least 1 thread, not {}", num_threads);
}

Buffer CpuBackend::allocate(std::int64_t bytes) {
  check(bytes >= 0 && bytes <= std::numeric_limits<std::int64_t>::max() - kAlignment,
        "allocation of {} bytes", bytes);
  // calloc takes large blocks from the kernel as pages that are zero already: nothing is written
  // here, and a page settles near the thread that first uses it.
  void* block = std::calloc(static_cast<std::size_t>(bytes + kAlignment), 1);
  check(block != nullptr, "the host has no memory for {} bytes", bytes);
  const auto address = reinterpret_cast<std::uintptr_t>(block);
  const std::uintptr_t skip = (kAlignment - address % kAlignment) % kAlignment;
  return {static_cast<std::byte*>(block) + skip, bytes, [block](void*) { std::free(block); }};
}

void CpuBackend::upload(void* device, const void* host, std::int64_t bytes) {
  copy_bytes(device, host, bytes);
}

void CpuBackend::download(void* host, const void* device, std::int64_t bytes) {
  copy_bytes(host, device, bytes);
}

std::int64_t CpuBackend::free_bytes() const {
  // The kernel's own estimate: unlike the free pages it counts the file cache that would make room.
  std::ifstream meminfo("/proc/meminfo");
  std::string line;
  constexpr std::string_view kKey = "MemAvailable:";
  while (std::getline(meminfo, line)) {
    if (line.starts_with(kKey)) {
      return std::strtoll(line.c_str() + kKey.size(), nullptr, 10) * 1024;  // stated in KiB
    }
  }
  return std::int64_t{sysconf(_SC_AVPHYS_PAGES)} * sysconf(_SC_PAGESIZE);
}

void CpuBackend::prepare(const WeightView& /*matrix*/) {}  // read as they are stored

void CpuBackend::run_recorded(std::int64_t /*key*/, bool /*replayable*/,
                              const std::function<void()>& body) {
  body();
}

void CpuBackend::mark(std::size_t index) {
  marks_.at(index) = std::chrono::steady_clock::now();
}

double CpuBackend::milliseconds_between(std::size_t first, std::size_t second) {
  return std::chrono::duration<double, std::milli>(marks_.at(second) - marks_.at(first)).count();
}

void CpuBackend::copy(ConstTensorView source, TensorView target) {
  expect_tensor("copy's target", target, source.dtype(), source.shape());
  if (source.num_elements() == 0) {
    return;
  }
  const std::int64_t element = dtype_bytes(source.dtype());
  if (source.contiguous() && target.contiguous()) {
    copy_bytes(target.raw(), source.raw(), source.bytes());
    return;
  }
  const auto* from = static_cast<const std::byte*>(source.raw());
  auto* to = static_cast<std::byte*>(target.raw());
  for (std::int64_t r = 0; r < source.size(0); ++r) {
    copy_bytes(to + r * target.row_stride() * element, from + r * source.row_stride() * element,
               source.shape().row_elements() * element);
  }
}

void CpuBackend::fill_zero(TensorView target) {
  if (!target.contiguous()) {
    fail("fill_zero of {} with rows {} elements apart: expected a contiguous tensor",
         target.shape().to_string(), target.row_stride());
  }
  if (target.num_elements() > 0) {
    std::memset(target.raw(), 0, static_cast<std::size_t>(target.bytes()));
  }
}

}  // namespace kdtree
