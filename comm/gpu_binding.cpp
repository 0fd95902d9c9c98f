#include "comm/gpu_binding.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <utility>

#include "core/check.h"

namespace kdtree {

namespace {

using Text = std::array<char, 64>;

struct Row {
  int device_index;
  int numa_node;
  Text host;
  Text pci_bus_id;
  Text uuid;
  Text name;
};

Text text_of(const std::string& value) {
  Text text{};
  std::copy_n(value.begin(), std::min(value.size(), text.size() - 1), text.begin());
  return text;
}

}  // namespace

std::vector<GpuOfRank> gather_gpu_binding(ProcessGroup& group, const GpuOfRank& own) {
  const Row row{own.device_index,        own.numa_node,     text_of(group.host_name()),
                text_of(own.pci_bus_id), text_of(own.uuid), text_of(own.name)};
  std::vector<Row> rows(static_cast<std::size_t>(group.world_size()));
  group.all_gather(&row, sizeof row, rows.data());
  std::vector<GpuOfRank> binding;
  binding.reserve(rows.size());
  for (const Row& other : rows) {
    binding.push_back({.rank = static_cast<int>(binding.size()),
                       .host = other.host.data(),
                       .device_index = other.device_index,
                       .pci_bus_id = other.pci_bus_id.data(),
                       .uuid = other.uuid.data(),
                       .name = other.name.data(),
                       .numa_node = other.numa_node});
  }
  return binding;
}

std::string format_gpu_binding(std::span<const GpuOfRank> binding) {
  std::size_t host_width = 4;
  for (const GpuOfRank& gpu : binding) {
    host_width = std::max(host_width, gpu.host.size());
  }
  std::string table = fmt::format("{:>4}  {:<{}}  {:>6}  {:<14}  {:<40}  {:>4}  {}", "rank", "host",
                                  host_width, "device", "PCI bus id", "UUID", "NUMA", "name");
  for (const GpuOfRank& gpu : binding) {
    const std::string numa = gpu.numa_node < 0 ? "?" : std::to_string(gpu.numa_node);
    table += fmt::format("\n{:>4}  {:<{}}  {:>6}  {:<14}  {:<40}  {:>4}  {}", gpu.rank, gpu.host,
                         host_width, gpu.device_index, gpu.pci_bus_id, gpu.uuid, numa, gpu.name);
  }
  return table;
}

void require_gpu_for_each_rank(std::span<const GpuOfRank> binding) {
  std::map<std::pair<std::string, std::string>, std::vector<int>> ranks_of_gpu;
  for (const GpuOfRank& gpu : binding) {
    ranks_of_gpu[{gpu.host, gpu.pci_bus_id}].push_back(gpu.rank);
  }
  std::string shared;
  for (const auto& [gpu, ranks] : ranks_of_gpu) {
    if (ranks.size() > 1) {
      shared += fmt::format("{}ranks {} share GPU {} of {}", shared.empty() ? "" : "; ",
                            fmt::join(ranks, ", "), gpu.second, gpu.first);
    }
  }
  require_input(shared.empty(),
                "--communicator nccl needs a GPU for each rank, but {}. Start no more ranks than "
                "there are GPUs, see to it that each rank sees its own, or take --communicator "
                "mpi, which goes through host memory and lets ranks share a GPU",
                shared);
}

}  // namespace kdtree
