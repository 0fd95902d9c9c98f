#include "core/gpu_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <fstream>

namespace kdtree {

std::string format_gpu_uuid(std::span<const std::uint8_t, 16> bytes) {
  std::string text = "GPU";
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const bool starts_group = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
    text += fmt::format("{}{:02x}", starts_group ? "-" : "", bytes[i]);
  }
  return text;
}

int numa_node_of_pci_device(std::string_view pci_bus_id, const std::filesystem::path& devices) {
  std::string name(pci_bus_id);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  std::ifstream file(devices / name / "numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

}  // namespace kdtree
